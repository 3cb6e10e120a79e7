// The gradient of batch normalisation by channels: sums of g and of g · (x − mean), and their totals.
//
// `sums_of_parts` gives these totals themselves, as dbias and dscale.
//
// g is a function of OPERANDS tensors, `gradient`, which is generated; with KEEPS it is written, too. SCALE, MEAN and
// VARIANCE are the element types of these vectors, which may be narrow where sums are not.
#include "channels.cuh"
#include "scalar.cuh"

struct Pair {
    Number first, second;
};

template <int N> __device__ inline Pair together(const Pair (&parts)[N]) {
    Pair all = parts[0];
#pragma unroll
    for (int i = 1; i < N; ++i) {
        all.first += parts[i].first;
        all.second += parts[i].second;
    }
    return all;
}

struct Arguments {
    i64 channels, positions, positions_a_part, parts;
    i64 extents[RANK];
    Images x, kept, operands[OPERANDS];
    double epsilon;
    const SCALE* scale;
    const MEAN* mean;
    const VARIANCE* variance;
    Number* sums;     // of parts: [parts, channels]
    Number* moments;
    Number* dscale;
    Number* dbias;
    Number* vectors;  // [3, channels]: slope, shift and factor of dx = (g - (x - mean) · slope - shift) · factor
};

// VECTOR channels of g at a few positions: all operands are read first.
template <bool WHOLE, int AHEAD>
__device__ inline void gradients(const Arguments& a, const Own& own, const i64 (&positions)[AHEAD],
                                 Vector<Number, VECTOR> (&g)[AHEAD]);

// Whether all these channels can move together.
__device__ inline bool are_whole(const Arguments& a);

template <bool WHOLE> __device__ inline void sum_up(const Arguments& a, const Own& own, Pair (&found)[VECTOR]) {
    constexpr int AHEAD = WHOLE ? 2 : 1;
    Number means[VECTOR];
#pragma unroll
    for (int k = 0; k < VECTOR; ++k) means[k] = k < own.left ? widened(a.mean[own.channel + k]) : 0;
#pragma unroll 1
    for (i64 i = own.first; i < own.last; i += AHEAD * ROWS) {
        i64 positions[AHEAD];
        Vector<ELEMENT, VECTOR> here[AHEAD];
        Vector<Number, VECTOR> there[AHEAD];
#pragma unroll
        for (int j = 0; j < AHEAD; ++j) {
            positions[j] = own.ahead(i, j);
            here[j] = read<ELEMENT, WHOLE>(a.x.start + a.x.offset(positions[j], a.extents, own.channel), own.left);
        }
        gradients<WHOLE>(a, own, positions, there);
#pragma unroll
        for (int j = 0; j < AHEAD; ++j) {
            const bool counts = own.there(i, j);
            if (KEEPS && counts) {
                Vector<ELEMENT, VECTOR> narrow;
#pragma unroll
                for (int k = 0; k < VECTOR; ++k) narrow.at[k] = narrowed<ELEMENT>(there[j].at[k]);
                char* const place = a.kept.start + a.kept.offset(positions[j], a.extents, own.channel);
                if constexpr (WHOLE) store_vector<ELEMENT, VECTOR>(place, narrow);
                else store_each<ELEMENT, VECTOR>(place, narrow, own.left);
            }
#pragma unroll
            for (int k = 0; k < VECTOR; ++k) {
                const Number g = counts ? there[j].at[k] : 0;
                found[k].first += g;
                found[k].second += g * (widened(here[j].at[k]) - means[k]);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) gradient_sums(const Arguments a) {
    __shared__ Pair shared[VECTOR][THREADS];
    const Own own(a.channels, a.positions, a.positions_a_part);
    Pair found[VECTOR] = {};
    if (own.count()) {
        const bool whole = own.left >= VECTOR && a.x.is_whole<ELEMENT>() && a.kept.is_whole<ELEMENT>() && are_whole(a);
        if (whole) sum_up<true>(a, own, found);
        else sum_up<false>(a, own, found);
    }
    const Pair all = combine<ACROSS>(found, shared);
    const i64 channel = own.combined(a.channels);
    if (channel < 0) return;
    a.sums[blockIdx.y * a.channels + channel] = all.first;
    a.moments[blockIdx.y * a.channels + channel] = all.second;
}

// The totals of all parts, for the thread that combines them.
__device__ inline Pair total_of(const Arguments& a, const Share<CHANNELS, 1>& own, Pair (&shared)[1][THREADS]) {
    constexpr int AHEAD = 8;
    Pair found[1] = {};
#pragma unroll 1
    for (i64 i = own.first; i < own.last; i += AHEAD * LANES) {
        Pair parts[AHEAD];
#pragma unroll
        for (int j = 0; j < AHEAD; ++j) {
            const i64 at = own.ahead(i, j) * a.channels + own.channel;
            const Pair part{a.sums[at], a.moments[at]};
            parts[j] = own.there(i, j) ? part : Pair{};
        }
        found[0] = together({found[0], together(parts)});
    }
    return combine<CHANNELS>(found, shared);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) sums_of_parts(const Arguments a) {
    __shared__ Pair shared[1][THREADS];
    const Share<CHANNELS, 1> own(a.channels, a.parts, a.parts);
    const Pair total = total_of(a, own, shared);
    if (own.combined(a.channels) < 0) return;
    a.dbias[own.channel] = total.first;
    a.dscale[own.channel] = total.second;
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) gradient_of_sums(const Arguments a) {
    __shared__ Pair shared[1][THREADS];
    const Share<CHANNELS, 1> own(a.channels, a.parts, a.parts);
    const i64 channel = own.left > 0 ? own.channel : 0;
    const Number variance = widened(a.variance[channel]), scale = widened(a.scale[channel]);
    const Pair total = total_of(a, own, shared);
    if (own.combined(a.channels) < 0) return;
    const Number sum = total.first, moment = total.second;
    const Number r = 1 / sqrt(variance + static_cast<Number>(a.epsilon));
    const Number count = static_cast<Number>(a.positions);
    a.dscale[channel] = moment * r;
    a.dbias[channel] = sum;
    a.vectors[channel] = moment * r * r / count;
    a.vectors[a.channels + channel] = sum / count;
    a.vectors[2 * a.channels + channel] = scale * r;
}
