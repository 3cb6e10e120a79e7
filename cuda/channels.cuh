// The work of kernels that go over the channels of images.
//
// A block goes over the positions of a part of the images (grid.y parts) with ACROSS threads for neighbouring channels,
// VECTOR of them each, and as many rows of such threads as there is room for. What rows have, and then what parts have,
// is put together in a fixed order. RANK axes number the positions; ELEMENT is the images'. If VECTOR is more than 1,
// channels of every tensor of theirs lie side by side.
#pragma once
#include "place.cuh"

constexpr int THREADS = 256, ROWS = THREADS / ACROSS;
constexpr int CHANNELS = 32, LANES = THREADS / CHANNELS;  // where parts are put together, a channel for each thread across
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
    // How many positions the thread goes over.
    __device__ i64 count() const { return first < last ? (last - first + HEIGHT - 1) / HEIGHT : 0; }
    __device__ bool writes() const { return row == 0 && left > 0; }
};

// A tensor of the images' shape.
struct Images {
    char* start;
    i64 channel_step, strides[RANK];  // bytes; of packed bits: bits

    __device__ i64 offset(i64 position, const i64 (&extents)[RANK], i64 channel) const {
        return offset_of<RANK>(static_cast<INDEX>(position), extents, strides) + channel * channel_step;
    }
};

template <class T> __device__ inline Vector<Wide<T>, VECTOR> read(const char* place, i64 left) {
    const Vector<T, VECTOR> narrow = load<T, VECTOR>(place, left);
    Vector<Wide<T>, VECTOR> found;
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) found.at[i] = widened(narrow.at[i]);
    return found;
}

// What the threads of the same channels have, `together` in pairs; for the first of them.
template <int WIDTH, int EACH, class T> __device__ inline void combine(T (&own)[EACH], T (&shared)[THREADS]) {
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        __syncthreads();
        shared[threadIdx.x] = own[i];
        for (int half = THREADS / 2; half >= WIDTH; half /= 2) {
            __syncthreads();
            if (threadIdx.x < half) shared[threadIdx.x] = together(shared[threadIdx.x], shared[threadIdx.x + half]);
        }
        own[i] = shared[threadIdx.x];
    }
}
