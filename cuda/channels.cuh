// The work of kernels that go over the channels of images.
//
// A block goes over the positions of a part of the images (grid.y parts) with ACROSS threads for neighbouring channels,
// VECTOR of them each, and as many rows of such threads as there is room for. A thread reads a few positions (AHEAD)
// before it works on the first; channels move together where those of all tensors can (WHOLE), else one by one. Results
// of rows, and then of parts, are combined in a fixed order. A multiprocessor has room for BLOCKS blocks, and the grid
// is no larger than the blocks that run at a time. RANK axes number the positions; ELEMENT is the images'. If VECTOR is
// more than 1, channels of every tensor of theirs lie side by side.
#pragma once
#include "place.cuh"

constexpr int THREADS = 256, ROWS = THREADS / ACROSS;
constexpr int CHANNELS = 8, LANES = THREADS / CHANNELS;  // where parts are put together, one for each thread across
typedef Wide<ELEMENT> Number;

// A thread's own channels and positions.
template <int WIDTH, int EACH> struct Share {
    static constexpr int HEIGHT = THREADS / WIDTH;
    i64 channel, left, first, last;  // `left` channels from its first one on
    int row;

    __device__ Share(i64 channels, i64 count, i64 count_a_part) {
        channel = (static_cast<i64>(blockIdx.x) * WIDTH + threadIdx.x % WIDTH) * EACH;
        left = channels - channel;
        row = threadIdx.x / WIDTH;
        const i64 begin = blockIdx.y * count_a_part, end = begin + count_a_part;
        first = begin + row;
        last = left > 0 ? (end < count ? end : count) : 0;
    }
    // The number of positions of the thread.
    __device__ i64 count() const { return first < last ? (last - first + HEIGHT - 1) / HEIGHT : 0; }
    // Whether there is a `k`-th position from one of them on; and that position, or the first one again. A select, not
    // a branch, drops the repeated number: compilers move a load into the branch that uses it.
    __device__ bool there(i64 position, int k) const { return k == 0 || position + k * HEIGHT < last; }
    __device__ i64 ahead(i64 position, int k) const { return there(position, k) ? position + k * HEIGHT : position; }
    // The channel whose result of `combine` the thread has; -1: none.
    __device__ i64 combined(i64 channels) const {
        const int lane = threadIdx.x % (THREADS / EACH);
        const i64 found = (static_cast<i64>(blockIdx.x) * WIDTH + lane) * EACH + threadIdx.x / (THREADS / EACH);
        return lane < WIDTH && found < channels ? found : -1;
    }
};
typedef Share<ACROSS, VECTOR> Own;

// A tensor of the images' shape.
struct Images {
    char* start;
    i64 channel_step, strides[RANK];  // bytes; of packed bits: bits

    __device__ i64 offset(i64 position, const i64 (&extents)[RANK], i64 channel) const {
        return offset_of<RANK>(static_cast<INDEX>(position), extents, strides) + channel * channel_step;
    }
    // Whether VECTOR channels of every position can move together, except the last ones.
    template <class T> __device__ bool is_whole() const {
        return VECTOR == 1 || (any(reinterpret_cast<u64>(start)) % alignof(Vector<T, VECTOR>) == 0);
    }
    __device__ bool are_whole_bits() const { return channel_step == 1 && any(0) % BITS_APART<VECTOR> == 0; }

private:
    // Bits that are in a number or in one of the strides.
    __device__ u32 any(u64 found) const {
#pragma unroll
        for (int axis = 0; axis < RANK; ++axis) found |= static_cast<u64>(strides[axis]);
        return static_cast<u32>(found);
    }
};

template <class T, bool WHOLE> __device__ inline Vector<T, VECTOR> read(const char* place, i64 left) {
    if constexpr (WHOLE) return load_vector<T, VECTOR>(place);
    else return load_each<T, VECTOR>(place, left);
}

template <bool WHOLE> __device__ inline Vector<bool, VECTOR> read_bits(const Images& mask, i64 offset, i64 left) {
    if constexpr (WHOLE) return load_bits<VECTOR>(mask.start, offset);
    else return load_bits<VECTOR>(mask.start, offset, mask.channel_step, left);
}

// What the threads of the same channels have, `together`: each first takes as many of them as it had channels, and then
// they are taken in pairs.
template <int WIDTH, int EACH, class T> __device__ inline T combine(const T (&own)[EACH], T (&shared)[EACH][THREADS]) {
    constexpr int ACTIVE = THREADS / EACH;  // for one of the channels that a thread had
    static_assert(ACTIVE >= WIDTH, "a thread for each channel");
#pragma unroll
    for (int k = 0; k < EACH; ++k) shared[k][threadIdx.x] = own[k];
    __syncthreads();
    T* const all = shared[threadIdx.x / ACTIVE];
    const int lane = threadIdx.x % ACTIVE;
    T found[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) found[i] = all[lane + i * ACTIVE];
    all[lane] = together(found);
    for (int half = ACTIVE / 2; half >= WIDTH; half /= 2) {
        __syncthreads();
        if (lane >= half) continue;
        const T both[] = {all[lane], all[lane + half]};
        all[lane] = together(both);
    }
    return all[lane];
}
