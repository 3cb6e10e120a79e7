// Products: y[m, n] = Σ_k a[m, k] · b[n, k] (+ added[m, n]), for each place of some batch axes.
//
// The plain kernel for every shape and order of axes, and the oracle of faster ones. A block makes TILE x TILE results,
// each of its threads 4 x 4 of them, from DEPTH terms at a time in shared memory. With several parts of the terms
// (grid.y), each part has results of its own, to be added up afterwards.
//
// A and B are operands of operand.cuh, RESULTS and ADDED plain ones (along m and n); A_INNER and B_INNER say whether
// neighbouring threads read neighbouring terms. A_ELEMENT and B_ELEMENT are the types that are read, RESULT the type
// that is written.
#include "operand.cuh"

constexpr int EACH = 4, SIDE = TILE / EACH, THREADS = SIDE * SIDE, DEPTH = 16, LOADS = TILE * DEPTH / THREADS;
typedef Wide<A_ELEMENT> Number;

struct Arguments {
    i64 rows, columns, terms, terms_a_part;
    i64 tiles_down, tiles_across;
    i64 part_stride;  // bytes from the results of one part to the next
    i64 batch_extents[BATCH], a_strides[BATCH], b_strides[BATCH], result_strides[BATCH], added_strides[BATCH];
    A a;
    B b;
    RESULTS results;
    ADDED added;
};

// The part of an operand that one thread moves into shared memory, tile after tile.
template <class Operand, class T, bool INNER> struct Loader {
    typename Operand::Outer outer[LOADS];
    bool inside[LOADS];

    static __device__ int place(int i) {
        return INNER ? (threadIdx.x + i * THREADS) / DEPTH : (threadIdx.x + i * THREADS) % TILE;
    }
    static __device__ int depth(int i) {
        return INNER ? (threadIdx.x + i * THREADS) % DEPTH : (threadIdx.x + i * THREADS) / TILE;
    }

    __device__ Loader(const Operand& operand, i64 first, i64 count) {
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            inside[i] = first + place(i) < count;
            outer[i] = operand.outer(static_cast<INDEX>(inside[i] ? first + place(i) : 0));
        }
    }

    __device__ void load(const Operand& operand, i64 before, i64 term, i64 last, Number (&tile)[DEPTH][TILE + 1]) const {
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            const i64 k = term + depth(i);
            Number x = 0;
            if (inside[i] && k < last)
                x = operand.template at<T>(before, outer[i], operand.inner(static_cast<INDEX>(k)));
            tile[depth(i)][place(i)] = x;
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) product(const Arguments arguments) {
    __shared__ Number a_tile[DEPTH][TILE + 1], b_tile[DEPTH][TILE + 1];
    u32 block = blockIdx.x;
    const u32 tiles_across = static_cast<u32>(arguments.tiles_across), tiles_down = static_cast<u32>(arguments.tiles_down);
    const i64 column = static_cast<i64>(block % tiles_across) * TILE;
    block /= tiles_across;
    const i64 row = static_cast<i64>(block % tiles_down) * TILE;
    block /= tiles_down;
    i64 a_before = 0, b_before = 0, result_before = 0, added_before = 0;
#pragma unroll
    for (int axis = BATCH - 1; axis >= 0; --axis) {
        const u32 extent = static_cast<u32>(arguments.batch_extents[axis]), above = block / extent;
        const i64 here = block - above * extent;
        a_before += here * arguments.a_strides[axis];
        b_before += here * arguments.b_strides[axis];
        result_before += here * arguments.result_strides[axis];
        added_before += here * arguments.added_strides[axis];
        block = above;
    }
    const Loader<A, A_ELEMENT, A_INNER> a(arguments.a, row, arguments.rows);
    const Loader<B, B_ELEMENT, B_INNER> b(arguments.b, column, arguments.columns);
    const i64 first = blockIdx.y * arguments.terms_a_part;
    const i64 end = first + arguments.terms_a_part, last = end < arguments.terms ? end : arguments.terms;
    const int x = threadIdx.x % SIDE, y = threadIdx.x / SIDE;
    Number sums[EACH][EACH] = {};
    for (i64 term = first; term < last; term += DEPTH) {
        a.load(arguments.a, a_before, term, last, a_tile);
        b.load(arguments.b, b_before, term, last, b_tile);
        __syncthreads();
#pragma unroll
        for (int k = 0; k < DEPTH; ++k) {
            Number left[EACH], right[EACH];
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                left[i] = a_tile[k][y + i * SIDE];
                right[i] = b_tile[k][x + i * SIDE];
            }
#pragma unroll
            for (int i = 0; i < EACH; ++i)
#pragma unroll
                for (int j = 0; j < EACH; ++j) sums[i][j] += left[i] * right[j];
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const i64 m = row + y + i * SIDE;
        if (m >= arguments.rows) continue;
#pragma unroll
        for (int j = 0; j < EACH; ++j) {
            const i64 n = column + x + j * SIDE;
            if (n >= arguments.columns) continue;
            const INDEX down = static_cast<INDEX>(m), across = static_cast<INDEX>(n);
            Number sum = sums[i][j];
            if (HAS_ADDED && blockIdx.y == 0) {
                const ADDED& added = arguments.added;
                sum += static_cast<Number>(added.template at<ADDED_ELEMENT>(added_before, added.outer(down), added.inner(across)));
            }
            const i64 at = blockIdx.y * arguments.part_stride + result_before + arguments.results.outer(down) +
                           arguments.results.inner(across);
            *reinterpret_cast<RESULT*>(const_cast<char*>(arguments.results.start) + at) = narrowed<RESULT>(sum);
        }
    }
}
