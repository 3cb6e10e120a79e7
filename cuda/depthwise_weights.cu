// Gradients of the weights of depthwise convolutions: dw[k, t] = Σ over windows p of g[k, p] · x[k / MULTIPLE, tap t of
// window p] (+ added[k, t]).
//
// depthwise.cuh says how the work is divided; neighbours are windows. A thread keeps a sum for every tap of VECTOR
// filters, and goes over the units of its row in a part of all units (grid.y parts). Sums of a block's rows are added in
// pairs. With several parts, each has results of its own, `part_step` bytes apart, to be added up afterwards; the first
// part adds what there is to add (HAS_ADDED, of type ADDED_ELEMENT). RESULT is the type that is written.
#include "depthwise.cuh"

constexpr int VALUES = TAPS * VECTOR, TOGETHER = VALUES < 8 ? VALUES : 8;  // sums of a thread; those shared at a time

__device__ constexpr int half_of(int rows) {
    int half = 1;
    while (2 * half < rows) half *= 2;
    return half;
}

struct Arguments {
    i64 units, units_a_part, channels, extent;  // channels: filters; extent: of g along the last axis
    i64 part_step;
    i64 counts[AXES];   // of units' places along each axis
    i64 extents[AXES];  // of x
    Tensor x, g, result, added;
};

// The sums of a thread's channels over every ROWS-th unit from the first one on.
template <bool ALIGNED>
__device__ inline void sum_up(const Arguments& a, i64 channel, i64 first, i64 last, Number (&sums)[TAPS][VECTOR]) {
    const i32 extent = static_cast<i32>(a.extent);
    const OFFSET step = static_cast<OFFSET>(a.x.axes[LAST]);
#pragma unroll 1
    for (i64 number = first; number < last; number += ROWS) {
        const Unit unit(static_cast<INDEX>(number), a.counts);
        const char* image = a.x.start + unit.item * a.x.item + channel / MULTIPLE * a.x.channel;
        const char* row = a.g.start + unit.row_in(a.g) + channel * a.g.channel;
        Elements g[EACH];
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const i32 place = unit.neighbour(i);
            g[i] = read<ALIGNED>(row + (place < extent ? place : 0) * a.g.axes[LAST]);
        }
#pragma unroll
        for (int taps = 0; taps < ROWS_OF_TAPS; ++taps) {
            OFFSET bytes = 0;
            if (!unit.meets(taps, a.extents, a.x.axes, bytes)) continue;
            Number x[COLUMNS][VECTOR];
            read_columns<ALIGNED>(image + bytes, unit.place[LAST], static_cast<i32>(a.extents[LAST]), step, x);
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                if (unit.neighbour(i) >= extent) continue;  // x, which is there, may be infinite
#pragma unroll
                for (int tap = 0; tap < ROW; ++tap)
#pragma unroll
                    for (int k = 0; k < VECTOR; ++k)
                        sums[taps * ROW + tap][k] += widened(g[i].at[k]) * x[column_of(i, tap)][k];
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) depthwise_weights(const Arguments a) {
    __shared__ Number shared[TOGETHER][THREADS];
    const int thread = threadIdx.x, lane = thread % ACROSS, row = thread / ACROSS;
    const i64 channel = (static_cast<i64>(blockIdx.x) * ACROSS + lane) * VECTOR;
    const i64 first = blockIdx.y * a.units_a_part, end = first + a.units_a_part, last = end < a.units ? end : a.units;
    Number sums[TAPS][VECTOR] = {};
    if (channel < a.channels) {
        if (VECTOR == 1 || (is_aligned<ELEMENT, VECTOR>(a.x.start) && is_aligned<ELEMENT, VECTOR>(a.g.start)))
            sum_up<true>(a, channel, first + row, last, sums);
        else
            sum_up<false>(a, channel, first + row, last, sums);
    }
#pragma unroll
    for (int begin = 0; begin < VALUES; begin += TOGETHER) {
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i)
            if (begin + i < VALUES) shared[i][thread] = sums[(begin + i) / VECTOR][(begin + i) % VECTOR];
        __syncthreads();
#pragma unroll 1
        for (int half = half_of(ROWS); half; half /= 2) {
            if (row < half && row + half < ROWS) {
#pragma unroll
                for (int i = 0; i < TOGETHER; ++i)
                    if (begin + i < VALUES) shared[i][thread] += shared[i][thread + half * ACROSS];
            }
            __syncthreads();
        }
        // Each of the first rows writes some of the sums, as far as there are rows.
        for (int i = row; i < TOGETHER && begin + i < VALUES && channel < a.channels; i += ROWS) {
            const i64 filter = channel + (begin + i) % VECTOR;
            i64 offset = filter * a.result.item, added = filter * a.added.item;
            int rest = (begin + i) / VECTOR;
#pragma unroll
            for (int axis = LAST; axis >= 0; --axis) {
                const int tap = rest % kernel_of(axis);
                rest /= kernel_of(axis);
                offset += tap * a.result.axes[axis];
                added += tap * a.added.axes[axis];
            }
            Number sum = shared[i][lane];
            if (HAS_ADDED && blockIdx.y == 0) sum += static_cast<Number>(widened(a.added.at<ADDED_ELEMENT>(added)));
            a.result.at<RESULT>(blockIdx.y * a.part_step + offset) = narrowed<RESULT>(sum);
        }
        __syncthreads();
    }
}
