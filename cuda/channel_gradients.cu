// What batch normalisation's gradient needs of channels: sums of g and of g · (x − mean), and what they come to.
//
// g is a function of OPERANDS tensors, `gradient`, which is generated; with KEEPS it is written, too.
#include "channels.cuh"
#include "scalar.cuh"

struct Pair {
    Number first, second;
};

__device__ inline Pair together(Pair a, Pair b) { return Pair{a.first + b.first, a.second + b.second}; }

struct Arguments {
    i64 channels, positions, positions_a_part, parts;
    i64 extents[RANK];
    Images x, kept, operands[OPERANDS];
    double epsilon;
    const Number* scale;
    const Number* mean;
    const Number* variance;
    Number* sums;     // of parts: [parts, channels]
    Number* moments;
    Number* dscale;
    Number* dbias;
    Number* vectors;  // [3, channels]: slope, shift and factor of dx = (g - (x - mean) · slope - shift) · factor
};

// VECTOR channels of g at a position.
__device__ inline Vector<Number, VECTOR> gradient(const Arguments& a, i64 position, i64 channel, i64 left);

extern "C" __global__ void __launch_bounds__(THREADS) gradient_sums(const Arguments a) {
    __shared__ Pair shared[THREADS];
    const Share<ACROSS, VECTOR> own(a.channels, a.positions, a.positions_a_part);
    Pair found[VECTOR] = {};
    if (own.count()) {
        Number means[VECTOR];
#pragma unroll
        for (int k = 0; k < VECTOR; ++k) means[k] = k < own.left ? a.mean[own.channel + k] : 0;
#pragma unroll 2
        for (i64 i = own.first; i < own.last; i += ROWS) {
            const auto there = gradient(a, i, own.channel, own.left);
            const auto here = read<ELEMENT>(a.x.start + a.x.offset(i, a.extents, own.channel), own.left);
            if constexpr (KEEPS) {
                Vector<ELEMENT, VECTOR> narrow;
#pragma unroll
                for (int k = 0; k < VECTOR; ++k) narrow.at[k] = narrowed<ELEMENT>(there.at[k]);
                store<ELEMENT, VECTOR>(a.kept.start + a.kept.offset(i, a.extents, own.channel), narrow, own.left);
            }
#pragma unroll
            for (int k = 0; k < VECTOR; ++k) {
                found[k].first += there.at[k];
                found[k].second += there.at[k] * (here.at[k] - means[k]);
            }
        }
    }
    combine<ACROSS, VECTOR>(found, shared);
    if (!own.writes()) return;
#pragma unroll
    for (int k = 0; k < VECTOR; ++k)
        if (k < own.left) {
            a.sums[blockIdx.y * a.channels + own.channel + k] = found[k].first;
            a.moments[blockIdx.y * a.channels + own.channel + k] = found[k].second;
        }
}

extern "C" __global__ void __launch_bounds__(THREADS) gradient_of_sums(const Arguments a) {
    __shared__ Pair shared[THREADS];
    const Share<CHANNELS, 1> own(a.channels, a.parts, a.parts);
    Pair found[1] = {};
#pragma unroll 4
    for (i64 i = own.first; i < own.last; i += LANES)
        found[0] = together(found[0], Pair{a.sums[i * a.channels + own.channel], a.moments[i * a.channels + own.channel]});
    combine<CHANNELS, 1>(found, shared);
    if (!own.writes()) return;
    const Number sum = found[0].first, moment = found[0].second;
    const Number r = 1 / sqrt(a.variance[own.channel] + static_cast<Number>(a.epsilon));
    const Number count = static_cast<Number>(a.positions);
    a.dscale[own.channel] = moment * r;
    a.dbias[own.channel] = sum;
    a.vectors[own.channel] = moment * r * r / count;
    a.vectors[a.channels + own.channel] = sum / count;
    a.vectors[2 * a.channels + own.channel] = a.scale[own.channel] * r;
}
