// Attention and its gradients work tile by tile: scores exist for ROWS of one side and COLUMNS of the other at a time.
// A block has ROWS queries (keys in `attention_keys`) and goes over the other side's tiles in order. Its SIDE x SIDE
// threads share every tile of results: a thread has every SIDE-th row from its own on, and in scores every SIDE-th
// column. So it uses each read of shared memory, four neighbours at a time, for several results.
// ELEMENT is the type of queries, keys and values, MASK_ELEMENT that of the mask that is added to scores.
#pragma once
#include "scalar.cuh"

constexpr int THREADS = SIDE * SIDE, DOWN = ROWS / SIDE, ACROSS = COLUMNS / SIDE;
// Unrolling of inner loops: with many results a thread, more would spill registers.
constexpr int TURNS = MASKED || DOWN * ACROSS >= 8 ? 1 : 2;
constexpr float LOWEST = -3e38f;  // so that a row of -inf alone has exp(-inf) = 0 and not NaN

// Floats from one row of a tile to the next: an odd number of fours, so that neighbouring rows lie in other banks.
__device__ constexpr int pitch(int width) { return (width + 3) / 4 * 4 + ((width + 3) / 4 % 2 ? 0 : 4); }
__device__ constexpr int larger(int a, int b) { return a > b ? a : b; }
constexpr int OF_DEPTH = pitch(DEPTH), OF_VALUES = pitch(VALUE_DEPTH), OF_SCORES = COLUMNS + 4;
constexpr int OTHER = COLUMNS * larger(OF_DEPTH, OF_VALUES);  // of a tile of the other side

struct Heads {
    char* start;
    i64 batch, head, position, depth;  // bytes

    __device__ ELEMENT* at(i64 b, i64 h, i64 i, i64 d) const {
        return reinterpret_cast<ELEMENT*>(start + b * batch + h * head + i * position + d * depth);
    }
};

struct Arguments {
    i64 heads, group, queries, keys, tiles;  // group: query heads that share a key head
    double scale;
    Heads q, k, v, o, g, dq, dk, dv;
    const char* mask;
    i64 mask_batch, mask_head, mask_query, mask_key;
    float* log_sum;    // [batch, heads, queries]
    float* deltas;     // likewise: g · o of each query
    float* gradients;  // of scores, [batch, heads, queries, keys]
};

// The first of a thread's rows, and of its columns.
__device__ inline int down() { return threadIdx.x / SIDE; }
__device__ inline int across() { return threadIdx.x % SIDE; }

struct alignas(16) Four {
    float at[4];
};

__device__ inline const Four& four(const float* from) { return *reinterpret_cast<const Four*>(from); }

// `TALL` rows of a tensor, with zeros where there are none.
template <int TALL, int WIDTH>
__device__ inline void load_tile(float* tile, const Heads& from, i64 b, i64 h, i64 first, i64 count, float factor) {
    constexpr int FULL = larger(WIDTH + 3, 4) / 4 * 4;  // of nothing, a row has zeros too
    for (int i = threadIdx.x; i < TALL * FULL; i += THREADS) {
        const int row = i / FULL, column = i % FULL;
        const bool inside = first + row < count && column < WIDTH;
        tile[row * pitch(WIDTH) + column] = inside ? widened(*from.at(b, h, first + row, column)) * factor : 0.0f;
    }
}

typedef float Scores[DOWN][ACROSS];

// Products of rows of `a` with rows of `b`.
template <int WIDTH> __device__ inline void dots(const float* a, const float* b, Scores& found) {
    constexpr int PITCH = pitch(WIDTH);
#pragma unroll
    for (int i = 0; i < DOWN; ++i)
#pragma unroll
        for (int j = 0; j < ACROSS; ++j) found[i][j] = 0;
    a += down() * PITCH;
    b += across() * PITCH;
#pragma unroll TURNS
    for (int d = 0; d < WIDTH; d += 4) {
        Four x[DOWN], y[ACROSS];
#pragma unroll
        for (int i = 0; i < DOWN; ++i) x[i] = four(a + i * SIDE * PITCH + d);
#pragma unroll
        for (int j = 0; j < ACROSS; ++j) y[j] = four(b + j * SIDE * PITCH + d);
#pragma unroll
        for (int k = 0; k < 4; ++k)
#pragma unroll
            for (int i = 0; i < DOWN; ++i)
#pragma unroll
                for (int j = 0; j < ACROSS; ++j) found[i][j] += x[i].at[k] * y[j].at[k];
    }
}

// A thread's results that are WIDTH wide: VECTOR neighbouring columns, and those as many threads further.
template <int WIDTH> struct Sums {
    static constexpr int VECTOR = WIDTH >= 4 * SIDE ? 4 : WIDTH >= 2 * SIDE ? 2 : 1;
    static constexpr int EACH = larger((WIDTH + VECTOR * SIDE - 1) / (VECTOR * SIDE), 1);
    static constexpr int FEWER = EACH > 2 ? TURNS : 2;
    float at[DOWN][EACH][VECTOR];

    static __device__ int column(int i) { return (i * SIDE + across()) * VECTOR; }

    // Adds rows of `scores` times columns of `tile`.
    __device__ void add(const float* scores, const float* tile) {
        scores += down() * OF_SCORES;
#pragma unroll FEWER
        for (int j = 0; j < COLUMNS; j += 4) {
            Four x[DOWN];
#pragma unroll
            for (int i = 0; i < DOWN; ++i) x[i] = four(scores + i * SIDE * OF_SCORES + j);
#pragma unroll
            for (int k = 0; k < 4; ++k)
#pragma unroll
                for (int c = 0; c < EACH; ++c) {
                    if (column(c) >= WIDTH) continue;
                    const auto y = *reinterpret_cast<const Vector<float, VECTOR>*>(tile + (j + k) * pitch(WIDTH) + column(c));
#pragma unroll
                    for (int i = 0; i < DOWN; ++i)
#pragma unroll
                        for (int e = 0; e < VECTOR; ++e) at[i][c][e] += x[i].at[k] * y.at[e];
                }
        }
    }

    __device__ void scale(int i, float factor) {
#pragma unroll
        for (int c = 0; c < EACH; ++c)
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) at[i][c][e] *= factor;
    }

    // The i-th of the thread's rows.
    __device__ void write(int i, const Heads& to, i64 b, i64 h, i64 row) const {
#pragma unroll
        for (int c = 0; c < EACH; ++c)
#pragma unroll
            for (int e = 0; e < VECTOR; ++e)
                if (column(c) + e < WIDTH) *to.at(b, h, row, column(c) + e) = narrowed<ELEMENT>(at[i][c][e]);
    }
};

// The score of a pair with the mask added; -inf where the key is not read.
__device__ inline float masked(float score, const Arguments& a, i64 b, i64 h, i64 query, i64 key) {
    if (query >= a.queries || key >= a.keys || (CAUSAL && key > query)) return -INFINITE;
    if constexpr (MASKED)
        score += static_cast<float>(widened(*reinterpret_cast<const MASK_ELEMENT*>(
            a.mask + b * a.mask_batch + h * a.mask_head + query * a.mask_query + key * a.mask_key)));
    return score;
}

// The combined value of the threads of a row.
template <class Combine> __device__ inline float of_row(float x, Combine combine) {
#pragma unroll
    for (int lanes = SIDE / 2; lanes; lanes /= 2) x = combine(x, __shfl_xor_sync(0xffffffffu, x, lanes));
    return x;
}

struct Sum {
    __device__ float operator()(float a, float b) const { return a + b; }
};

struct Largest {
    __device__ float operator()(float a, float b) const { return scalar::maximum(a, b); }
};
