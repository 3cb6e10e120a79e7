// Statistics of the channels of images, and what batch normalisation's gradient needs of them.
//
// A block has 32 channels and eight threads for each, which go over the positions of a part of the images (grid.y
// parts). What threads have, and then what parts have, is put together in a fixed order. RANK axes number the positions.
#include "place.cuh"

constexpr int CHANNELS = 32, LANES = 8, THREADS = CHANNELS * LANES;
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

struct Share {
    i64 channel, first, last;
    int lane;
    bool inside;

    __device__ Share(const Arguments& a, i64 count, i64 count_a_part) {
        channel = static_cast<i64>(blockIdx.x) * CHANNELS + threadIdx.x % CHANNELS;
        lane = threadIdx.x / CHANNELS;
        inside = channel < a.channels;
        const i64 begin = blockIdx.y * count_a_part, end = begin + count_a_part;
        first = begin + lane;
        last = inside ? (end < count ? end : count) : 0;
    }
};

__device__ inline Number read(const char* start, i64 offset) {
    return widened(*reinterpret_cast<const ELEMENT*>(start + offset));
}

// What the eight threads of a channel have, in their order; for the first of them.
__device__ inline Moments of_channel(Moments own, Moments (&shared)[THREADS]) {
    shared[threadIdx.x] = own;
    __syncthreads();
    if (threadIdx.x < CHANNELS)
        for (int i = 1; i < LANES; ++i) own = together(own, shared[threadIdx.x + i * CHANNELS]);
    return own;
}

struct Pair {
    Number first, second;
};

__device__ inline Pair of_channel(Pair own, Pair (&shared)[THREADS]) {
    shared[threadIdx.x] = own;
    __syncthreads();
    if (threadIdx.x < CHANNELS)
        for (int i = 1; i < LANES; ++i) {
            own.first += shared[threadIdx.x + i * CHANNELS].first;
            own.second += shared[threadIdx.x + i * CHANNELS].second;
        }
    return own;
}

extern "C" __global__ void __launch_bounds__(THREADS) moments(const Arguments a) {
    __shared__ Moments shared[THREADS];
    const Share own(a, a.positions, a.positions_a_part);
    Moments found = {0, 0, 0};
    if (own.first < own.last) {
        // Differences from one of the numbers are as small as those from their mean, but for chance.
        const char* x = a.x + own.channel * a.channel_step;
        const Number near = read(x, offset_of<RANK>(static_cast<INDEX>(own.first), a.extents, a.strides));
        Number sum = 0, squares = 0;
#pragma unroll 4
        for (i64 i = own.first; i < own.last; i += LANES) {
            const Number apart = read(x, offset_of<RANK>(static_cast<INDEX>(i), a.extents, a.strides)) - near;
            sum += apart;
            squares += apart * apart;
        }
        const Number count = static_cast<Number>((own.last - own.first + LANES - 1) / LANES);
        found = Moments{count, near + sum / count, squares - sum / count * sum};
    }
    found = of_channel(found, shared);
    if (own.lane || !own.inside) return;
    a.first[blockIdx.y * a.channels + own.channel] = found.mean;
    a.second[blockIdx.y * a.channels + own.channel] = found.squares;
}

extern "C" __global__ void __launch_bounds__(THREADS) moments_of_parts(const Arguments a) {
    __shared__ Moments shared[THREADS];
    const Share own(a, a.parts, a.parts);
    Moments found = {0, 0, 0};
#pragma unroll 4
    for (i64 i = own.first; i < own.last; i += LANES) {
        const i64 left = a.positions - i * a.positions_a_part;
        const Number count = static_cast<Number>(left < a.positions_a_part ? left : a.positions_a_part);
        const i64 at = i * a.channels + own.channel;
        found = together(found, Moments{count, a.first[at], a.second[at]});
    }
    found = of_channel(found, shared);
    if (own.lane || !own.inside) return;
    a.result_first[own.channel] = found.mean;
    a.result_second[own.channel] = (found.squares > 0 || found.squares != found.squares ? found.squares : 0) / found.count;
}

extern "C" __global__ void __launch_bounds__(THREADS) gradient_sums(const Arguments a) {
    __shared__ Pair shared[THREADS];
    const Share own(a, a.positions, a.positions_a_part);
    Pair found = {0, 0};
    if (own.inside) {
        const char* x = a.x + own.channel * a.channel_step;
        const char* g = a.g + own.channel * a.g_channel_step;
        const Number mean = a.mean[own.channel];
#pragma unroll 4
        for (i64 i = own.first; i < own.last; i += LANES) {
            const Number there = read(g, offset_of<RANK>(static_cast<INDEX>(i), a.extents, a.g_strides));
            const Number here = read(x, offset_of<RANK>(static_cast<INDEX>(i), a.extents, a.strides));
            found.first += there;
            found.second += there * (here - mean);
        }
    }
    found = of_channel(found, shared);
    if (own.lane || !own.inside) return;
    a.first[blockIdx.y * a.channels + own.channel] = found.first;
    a.second[blockIdx.y * a.channels + own.channel] = found.second;
}

extern "C" __global__ void __launch_bounds__(THREADS) gradient_of_sums(const Arguments a) {
    __shared__ Pair shared[THREADS];
    const Share own(a, a.parts, a.parts);
    Pair found = {0, 0};
#pragma unroll 4
    for (i64 i = own.first; i < own.last; i += LANES) {
        found.first += a.first[i * a.channels + own.channel];
        found.second += a.second[i * a.channels + own.channel];
    }
    found = of_channel(found, shared);
    if (own.lane || !own.inside) return;
    const Number r = 1 / sqrt(a.variance[own.channel] + static_cast<Number>(a.epsilon));
    const Number count = static_cast<Number>(a.positions);
    a.result_first[own.channel] = found.second * r;
    a.result_second[own.channel] = found.first;
    a.vectors[own.channel] = found.second * r * r / count;
    a.vectors[a.channels + own.channel] = found.first / count;
    a.vectors[2 * a.channels + own.channel] = a.scale[own.channel] * r;
}
