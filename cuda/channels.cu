// Statistics of the channels of images, and what batch normalisation's gradient needs of them.
//
// A block goes over the positions of a part of the images (grid.y parts) with ACROSS threads for neighbouring channels,
// VECTOR of them each, and as many rows of such threads as there is room for. What rows have, and then what parts have,
// is put together in a fixed order. RANK axes number the positions.
#include "place.cuh"

constexpr int THREADS = 256, ROWS = THREADS / ACROSS;
constexpr int CHANNELS = 32, LANES = THREADS / CHANNELS;  // where parts are put together, a channel for each thread across
typedef Wide<ELEMENT> Number;

// Count, mean and sum of squared differences from it (Chan, Golub and LeVeque 1979).
struct Moments {
    Number count, mean, squares;
};

__device__ inline Moments together(Moments a, Moments b) {
    const Number count = a.count + b.count;
    if (b.count == 0) return a;
    if (a.count == 0) return b;
    const Number apart = b.mean - a.mean, share = b.count / count;
    return Moments{count, a.mean + apart * share, a.squares + b.squares + apart * apart * a.count * share};
}

struct Arguments {
    const char* x;
    const char* g;
    i64 channels, positions, positions_a_part, parts;
    i64 channel_step, g_channel_step;  // bytes
    i64 extents[RANK], strides[RANK], g_strides[RANK];
    double epsilon;
    const Number* scale;
    const Number* mean;
    const Number* variance;
    Number* first;   // of parts: [parts, channels] each; first the means or sums of g, second the squares or moments
    Number* second;
    Number* result_first;   // mean, dscale
    Number* result_second;  // variance, dbias
    Number* vectors;        // [3, channels]: slope, shift and factor of dx = (g - (x - mean) · slope - shift) · factor
};

// A thread's own channels and positions.
template <int WIDTH, int EACH> struct Share {
    static constexpr int HEIGHT = THREADS / WIDTH;
    i64 channel, first, last;
    int row;

    __device__ Share(const Arguments& a, i64 count, i64 count_a_part) {
        channel = (static_cast<i64>(blockIdx.x) * WIDTH + threadIdx.x % WIDTH) * EACH;
        row = threadIdx.x / WIDTH;
        const i64 begin = blockIdx.y * count_a_part, end = begin + count_a_part;
        first = begin + row;
        last = channel < a.channels ? (end < count ? end : count) : 0;
    }
    // How many positions the thread goes over.
    __device__ i64 count() const { return first < last ? (last - first + HEIGHT - 1) / HEIGHT : 0; }
    __device__ bool writes(const Arguments& a) const { return row == 0 && channel < a.channels; }
};

__device__ inline Vector<Number, VECTOR> read(const char* start, i64 channels) {
    const Vector<ELEMENT, VECTOR> narrow = load<ELEMENT, VECTOR>(start, channels);
    Vector<Number, VECTOR> found;
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) found.at[i] = widened(narrow.at[i]);
    return found;
}

template <int EACH> struct Found {
    Moments at[EACH];
};

// What the threads of the same channels have, put together in pairs; for the first of them.
template <int WIDTH, int EACH> __device__ inline void combine(Found<EACH>& own, Moments (&shared)[THREADS]) {
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        __syncthreads();
        shared[threadIdx.x] = own.at[i];
        for (int half = THREADS / 2; half >= WIDTH; half /= 2) {
            __syncthreads();
            if (threadIdx.x < half) shared[threadIdx.x] = together(shared[threadIdx.x], shared[threadIdx.x + half]);
        }
        own.at[i] = shared[threadIdx.x];
    }
}

struct Pair {
    Number first, second;
};

template <int EACH> struct Pairs {
    Pair at[EACH];
};

template <int WIDTH, int EACH> __device__ inline void combine(Pairs<EACH>& own, Pair (&shared)[THREADS]) {
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        __syncthreads();
        shared[threadIdx.x] = own.at[i];
        for (int half = THREADS / 2; half >= WIDTH; half /= 2) {
            __syncthreads();
            if (threadIdx.x < half) {
                shared[threadIdx.x].first += shared[threadIdx.x + half].first;
                shared[threadIdx.x].second += shared[threadIdx.x + half].second;
            }
        }
        own.at[i] = shared[threadIdx.x];
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) moments(const Arguments a) {
    __shared__ Moments shared[THREADS];
    const Share<ACROSS, VECTOR> own(a, a.positions, a.positions_a_part);
    const i64 left = a.channels - own.channel;
    Found<VECTOR> found = {};
    if (own.count()) {
        // Differences from one of the numbers are as small as those from their mean, but for chance.
        const char* x = a.x + own.channel * a.channel_step;
        const auto near = read(x + offset_of<RANK>(static_cast<INDEX>(own.first), a.extents, a.strides), left);
        Number sums[VECTOR] = {}, squares[VECTOR] = {};
#pragma unroll 2
        for (i64 i = own.first; i < own.last; i += ROWS) {
            const auto here = read(x + offset_of<RANK>(static_cast<INDEX>(i), a.extents, a.strides), left);
#pragma unroll
            for (int k = 0; k < VECTOR; ++k) {
                const Number apart = here.at[k] - near.at[k];
                sums[k] += apart;
                squares[k] += apart * apart;
            }
        }
        const Number count = static_cast<Number>(own.count());
#pragma unroll
        for (int k = 0; k < VECTOR; ++k) {
            const Number mean = sums[k] / count;
            found.at[k] = Moments{count, near.at[k] + mean, squares[k] - mean * sums[k]};
        }
    }
    combine<ACROSS, VECTOR>(found, shared);
    if (!own.writes(a)) return;
#pragma unroll
    for (int k = 0; k < VECTOR; ++k)
        if (k < left) {
            a.first[blockIdx.y * a.channels + own.channel + k] = found.at[k].mean;
            a.second[blockIdx.y * a.channels + own.channel + k] = found.at[k].squares;
        }
}

extern "C" __global__ void __launch_bounds__(THREADS) moments_of_parts(const Arguments a) {
    __shared__ Moments shared[THREADS];
    const Share<CHANNELS, 1> own(a, a.parts, a.parts);
    Found<1> found = {};
#pragma unroll 4
    for (i64 i = own.first; i < own.last; i += LANES) {
        const i64 left = a.positions - i * a.positions_a_part;
        const Number count = static_cast<Number>(left < a.positions_a_part ? left : a.positions_a_part);
        const i64 at = i * a.channels + own.channel;
        found.at[0] = together(found.at[0], Moments{count, a.first[at], a.second[at]});
    }
    combine<CHANNELS, 1>(found, shared);
    if (!own.writes(a)) return;
    const Moments all = found.at[0];
    a.result_first[own.channel] = all.mean;
    a.result_second[own.channel] = (all.squares > 0 || all.squares != all.squares ? all.squares : 0) / all.count;
}

extern "C" __global__ void __launch_bounds__(THREADS) gradient_sums(const Arguments a) {
    __shared__ Pair shared[THREADS];
    const Share<ACROSS, VECTOR> own(a, a.positions, a.positions_a_part);
    const i64 left = a.channels - own.channel;
    Pairs<VECTOR> found = {};
    if (own.count()) {
        const char* x = a.x + own.channel * a.channel_step;
        const char* g = a.g + own.channel * a.g_channel_step;
        Number means[VECTOR];
#pragma unroll
        for (int k = 0; k < VECTOR; ++k) means[k] = k < left ? a.mean[own.channel + k] : 0;
#pragma unroll 2
        for (i64 i = own.first; i < own.last; i += ROWS) {
            const auto there = read(g + offset_of<RANK>(static_cast<INDEX>(i), a.extents, a.g_strides), left);
            const auto here = read(x + offset_of<RANK>(static_cast<INDEX>(i), a.extents, a.strides), left);
#pragma unroll
            for (int k = 0; k < VECTOR; ++k) {
                found.at[k].first += there.at[k];
                found.at[k].second += there.at[k] * (here.at[k] - means[k]);
            }
        }
    }
    combine<ACROSS, VECTOR>(found, shared);
    if (!own.writes(a)) return;
#pragma unroll
    for (int k = 0; k < VECTOR; ++k)
        if (k < left) {
            a.first[blockIdx.y * a.channels + own.channel + k] = found.at[k].first;
            a.second[blockIdx.y * a.channels + own.channel + k] = found.at[k].second;
        }
}

extern "C" __global__ void __launch_bounds__(THREADS) gradient_of_sums(const Arguments a) {
    __shared__ Pair shared[THREADS];
    const Share<CHANNELS, 1> own(a, a.parts, a.parts);
    Pairs<1> found = {};
#pragma unroll 4
    for (i64 i = own.first; i < own.last; i += LANES) {
        found.at[0].first += a.first[i * a.channels + own.channel];
        found.at[0].second += a.second[i * a.channels + own.channel];
    }
    combine<CHANNELS, 1>(found, shared);
    if (!own.writes(a)) return;
    const Number sum = found.at[0].first, moment = found.at[0].second;
    const Number r = 1 / sqrt(a.variance[own.channel] + static_cast<Number>(a.epsilon));
    const Number count = static_cast<Number>(a.positions);
    a.result_first[own.channel] = moment * r;
    a.result_second[own.channel] = sum;
    a.vectors[own.channel] = moment * r * r / count;
    a.vectors[a.channels + own.channel] = sum / count;
    a.vectors[2 * a.channels + own.channel] = a.scale[own.channel] * r;
}
