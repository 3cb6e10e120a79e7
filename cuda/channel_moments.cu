// Mean and variance of the channels of images.
#include "channels.cuh"

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
    i64 channels, positions, positions_a_part, parts;
    i64 extents[RANK];
    Images x;
    Number* means;    // of parts: [parts, channels], and sums of squares
    Number* squares;
    Number* mean;
    Number* variance;
};

extern "C" __global__ void __launch_bounds__(THREADS) moments(const Arguments a) {
    __shared__ Moments shared[THREADS];
    const Share<ACROSS, VECTOR> own(a.channels, a.positions, a.positions_a_part);
    Moments found[VECTOR] = {};
    if (own.count()) {
        // Differences from one of the numbers are as small as those from their mean, but for chance.
        const auto near = read<ELEMENT>(a.x.start + a.x.offset(own.first, a.extents, own.channel), own.left);
        Number sums[VECTOR] = {}, squares[VECTOR] = {};
#pragma unroll 2
        for (i64 i = own.first; i < own.last; i += ROWS) {
            const auto here = read<ELEMENT>(a.x.start + a.x.offset(i, a.extents, own.channel), own.left);
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
            found[k] = Moments{count, near.at[k] + mean, squares[k] - mean * sums[k]};
        }
    }
    combine<ACROSS, VECTOR>(found, shared);
    if (!own.writes()) return;
#pragma unroll
    for (int k = 0; k < VECTOR; ++k)
        if (k < own.left) {
            a.means[blockIdx.y * a.channels + own.channel + k] = found[k].mean;
            a.squares[blockIdx.y * a.channels + own.channel + k] = found[k].squares;
        }
}

extern "C" __global__ void __launch_bounds__(THREADS) moments_of_parts(const Arguments a) {
    __shared__ Moments shared[THREADS];
    const Share<CHANNELS, 1> own(a.channels, a.parts, a.parts);
    Moments found[1] = {};
#pragma unroll 4
    for (i64 i = own.first; i < own.last; i += LANES) {
        const i64 left = a.positions - i * a.positions_a_part;
        const Number count = static_cast<Number>(left < a.positions_a_part ? left : a.positions_a_part);
        const i64 at = i * a.channels + own.channel;
        found[0] = together(found[0], Moments{count, a.means[at], a.squares[at]});
    }
    combine<CHANNELS, 1>(found, shared);
    if (!own.writes()) return;
    const Moments all = found[0];
    a.mean[own.channel] = all.mean;
    a.variance[own.channel] = (all.squares > 0 || all.squares != all.squares ? all.squares : 0) / all.count;
}
