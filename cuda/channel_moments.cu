// Mean and variance of the channels of images.
#include "channels.cuh"

// Count, mean and sum of squared differences from it.
struct Moments {
    Number count, mean, squares;
};

// Of all at once: their mean first, and then differences from that (Chan, Golub and LeVeque 1983). If the first is of
// no number, all are.
template <int N> __device__ inline Moments together(const Moments (&parts)[N]) {
    Moments all = parts[0];
    if (N == 1) return all;
    Number apart[N], sum = 0;
#pragma unroll
    for (int i = 1; i < N; ++i) {
        apart[i] = parts[i].mean - parts[0].mean;
        sum += parts[i].count * apart[i];
        all.count += parts[i].count;
        all.squares += parts[i].squares;
    }
    const Number shift = all.count > 0 ? sum / all.count : 0;
    all.mean += shift;
    all.squares += parts[0].count * shift * shift;
#pragma unroll
    for (int i = 1; i < N; ++i) all.squares += parts[i].count * (apart[i] - shift) * (apart[i] - shift);
    return all;
}

struct Arguments {
    i64 channels, positions, positions_a_part, parts;
    i64 extents[RANK];
    Images x;
    Number* means;    // of parts: [parts, channels], and sums of squares
    Number* squares;
    Number* mean;
    Number* variance;
};

template <bool WHOLE> __device__ inline void sum_up(const Arguments& a, const Own& own, Moments (&found)[VECTOR]) {
    constexpr int AHEAD = WHOLE ? 4 : 1;
    Number near[VECTOR] = {}, sums[VECTOR] = {}, squares[VECTOR] = {};
#pragma unroll 1
    for (i64 i = own.first; i < own.last; i += AHEAD * ROWS) {
        Vector<ELEMENT, VECTOR> here[AHEAD];
#pragma unroll
        for (int j = 0; j < AHEAD; ++j)
            here[j] = read<ELEMENT, WHOLE>(a.x.start + a.x.offset(own.ahead(i, j), a.extents, own.channel), own.left);
        if (i == own.first) {  // differences from one of the numbers are as small as from their mean, but for chance
#pragma unroll
            for (int k = 0; k < VECTOR; ++k) near[k] = widened(here[0].at[k]);
        }
#pragma unroll
        for (int j = 0; j < AHEAD; ++j)
#pragma unroll
            for (int k = 0; k < VECTOR; ++k) {
                const Number apart = own.there(i, j) ? widened(here[j].at[k]) - near[k] : 0;
                sums[k] += apart;
                squares[k] += apart * apart;
            }
    }
    const Number count = static_cast<Number>(own.count());
#pragma unroll
    for (int k = 0; k < VECTOR; ++k) {
        const Number mean = sums[k] / count;
        found[k] = Moments{count, near[k] + mean, squares[k] - mean * sums[k]};
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) moments(const Arguments a) {
    __shared__ Moments shared[VECTOR][THREADS];
    const Own own(a.channels, a.positions, a.positions_a_part);
    Moments found[VECTOR] = {};
    if (own.count()) {
        if (own.left >= VECTOR && a.x.is_whole<ELEMENT>()) sum_up<true>(a, own, found);
        else sum_up<false>(a, own, found);
    }
    const Moments all = combine<ACROSS>(found, shared);
    const i64 channel = own.combined(a.channels);
    if (channel < 0) return;
    a.means[blockIdx.y * a.channels + channel] = all.mean;
    a.squares[blockIdx.y * a.channels + channel] = all.squares;
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) moments_of_parts(const Arguments a) {
    __shared__ Moments shared[1][THREADS];
    constexpr int AHEAD = 8;
    const Share<CHANNELS, 1> own(a.channels, a.parts, a.parts);
    Moments found[1] = {};
#pragma unroll 1
    for (i64 i = own.first; i < own.last; i += AHEAD * LANES) {
        Moments parts[AHEAD];
#pragma unroll
        for (int j = 0; j < AHEAD; ++j) {
            const i64 part = own.ahead(i, j), left = a.positions - part * a.positions_a_part;
            const i64 count = left < a.positions_a_part ? left : a.positions_a_part;
            const i64 at = part * a.channels + own.channel;
            const bool there = own.there(i, j);
            parts[j] = Moments{static_cast<Number>(there ? count : 0), a.means[at], there ? a.squares[at] : 0};
        }
        const Moments more = together(parts);
        found[0] = i == own.first ? more : together({found[0], more});
    }
    const Moments all = combine<CHANNELS>(found, shared);
    if (own.combined(a.channels) < 0) return;
    a.mean[own.channel] = all.mean;
    a.variance[own.channel] = (all.squares > 0 || all.squares != all.squares ? all.squares : 0) / all.count;
}
