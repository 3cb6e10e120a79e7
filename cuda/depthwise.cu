// Depthwise convolutions, y[k, p] = Σ over taps of w[k, t] · x[k / MULTIPLE, tap t of window p] (+ added[k, p]), and
// their data gradients, dx[c, p] = Σ over filters of c, and windows with a tap on p, of w · g (+ added[c, p]).
//
// depthwise.cuh says how the work is divided. A thread has EACH results of VECTOR channels of the result. The weights of
// a block's channels are in shared memory; a block goes over units, grid.y blocks apart, so that they are read seldom.
// HAS_ADDED says whether there is something to add, of type ADDED_ELEMENT.
#include "depthwise.cuh"

constexpr int FILTERS = GRADIENT ? MULTIPLE : 1;  // of a channel, whose taps are summed over
constexpr int SIDE_BY_SIDE = ACROSS * VECTOR;     // channels of a block

struct Arguments {
    i64 units, channels, extent;  // extent: of the result along the last axis
    i64 counts[AXES];             // of units' places along each axis
    i64 extents[AXES];            // of the source
    Tensor source, weights, result, added;
};

struct Shared {
    Elements weights[FILTERS * TAPS][ACROSS];
};

__device__ inline void stage(const Arguments& a, Shared& shared) {
    const i64 first = static_cast<i64>(blockIdx.x) * SIDE_BY_SIDE;
    for (int i = threadIdx.x; i < SIDE_BY_SIDE * FILTERS * TAPS; i += THREADS) {
        const int filter = i / TAPS, tap = i % TAPS;  // filters of a channel are neighbours
        if (first * FILTERS + filter >= a.channels * FILTERS) break;
        i64 offset = (first * FILTERS + filter) * a.weights.item;
        int rest = tap;
#pragma unroll
        for (int axis = LAST; axis >= 0; --axis) {
            offset += rest % kernel_of(axis) * a.weights.axes[axis];
            rest /= kernel_of(axis);
        }
        const int channel = filter / FILTERS, term = filter % FILTERS * TAPS + tap;
        shared.weights[term][channel / VECTOR].at[channel % VECTOR] = a.weights.at<ELEMENT>(offset);
    }
}

template <bool ALIGNED>
__device__ inline void convolve(const Arguments& a, const Shared& shared, const Unit& unit, i64 channel,
                                Number (&sums)[EACH][VECTOR]) {
    const int lane = threadIdx.x % ACROSS;
    const i64 from = GRADIENT ? channel * MULTIPLE : channel / MULTIPLE;
    const char* image = a.source.start + unit.item * a.source.item + from * a.source.channel;
#pragma unroll 1
    for (int filter = 0; filter < FILTERS; ++filter, image += a.source.channel)
#pragma unroll 1
        for (int row = 0; row < ROWS_OF_TAPS; ++row) {
            OFFSET bytes = 0;
            if (!unit.meets(row, a.extents, a.source.axes, bytes)) continue;
            Number x[COLUMNS][VECTOR];
            const OFFSET step = static_cast<OFFSET>(a.source.axes[LAST]);
            read_columns<ALIGNED>(image + bytes, unit.place[LAST], static_cast<i32>(a.extents[LAST]), step, x);
            const int term = (filter * ROWS_OF_TAPS + row) * ROW;
#pragma unroll
            for (int tap = 0; tap < ROW; ++tap) {
                const Elements weights = shared.weights[term + tap][lane];
#pragma unroll
                for (int i = 0; i < EACH; ++i) {
                    const int column = column_of(i, tap);
                    if (column < 0) continue;
#pragma unroll
                    for (int k = 0; k < VECTOR; ++k) sums[i][k] += x[column][k] * widened(weights.at[k]);
                }
            }
        }
}

template <bool ALIGNED> __device__ inline void convolve_all(const Arguments& a, const Shared& shared) {
    const i64 channel = (static_cast<i64>(blockIdx.x) * ACROSS + threadIdx.x % ACROSS) * VECTOR;
    if (channel >= a.channels) return;
    const INDEX units = static_cast<INDEX>(a.units);
#pragma unroll 1
    for (INDEX number = blockIdx.y * ROWS + threadIdx.x / ACROSS; number < units; number += gridDim.y * ROWS) {
        const Unit unit(number, a.counts);
        Number sums[EACH][VECTOR] = {};
        convolve<ALIGNED>(a, shared, unit, channel, sums);
        char* to = a.result.start + unit.row_in(a.result) + channel * a.result.channel;
        const i64 added = HAS_ADDED ? unit.row_in(a.added) + channel * a.added.channel : 0;
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const i32 place = unit.neighbour(i);
            if (place < 0 || place >= static_cast<i32>(a.extent)) continue;
            Elements results;
#pragma unroll
            for (int k = 0; k < VECTOR; ++k) {
                if constexpr (HAS_ADDED) {
                    const i64 offset = added + place * a.added.axes[LAST] + k * a.added.channel;
                    sums[i][k] += static_cast<Number>(widened(a.added.at<ADDED_ELEMENT>(offset)));
                }
                results.at[k] = narrowed<ELEMENT>(sums[i][k]);
            }
            char* const target = to + place * a.result.axes[LAST];
            if constexpr (ALIGNED) store_vector<ELEMENT, VECTOR>(target, results);
            else store_each<ELEMENT, VECTOR>(target, results, VECTOR);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) depthwise(const Arguments a) {
    __shared__ Shared shared;
    stage(a, shared);
    __syncthreads();
    if (VECTOR == 1 || (is_aligned<ELEMENT, VECTOR>(a.source.start) && is_aligned<ELEMENT, VECTOR>(a.result.start)))
        convolve_all<true>(a, shared);
    else
        convolve_all<false>(a, shared);
}
