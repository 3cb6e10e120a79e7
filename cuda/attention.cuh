// Attention and its gradients work tile by tile: scores exist for ROWS of one side and COLUMNS of the other at a time.
// A block has ROWS queries (keys in `attention_keys`) and goes over the other side's tiles in order. The next tile is on
// its way from memory while the block computes. How threads share a tile's results: attention_threads.cuh, or
// attention_warps.cuh with TENSOR_CORES.
// ELEMENT is the type of queries, keys and values, MASK_ELEMENT that of the mask that is added to scores.
#pragma once
#include "asynchronous.cuh"
#include "scalar.cuh"

constexpr float LOWEST = -3e38f;  // so that a row of -inf alone has exp(-inf) = 0 and not NaN

__device__ constexpr int larger(int a, int b) { return a > b ? a : b; }
// Floats of a row of a tile that are there, of which those behind `width` are zeros; and from one row to the next: an odd
// number of fours, so that neighbouring rows lie in other banks.
__device__ constexpr int full(int width) { return larger((width + 7) / 8, 1) * 8; }
__device__ constexpr int pitch(int width) { return full(width) + 4; }
constexpr int OF_DEPTH = pitch(DEPTH), OF_VALUES = pitch(VALUE_DEPTH);

struct Heads {
    char* start;
    i64 batch, head, position, depth;  // bytes

    __device__ ELEMENT* at(i64 b, i64 h, i64 i, i64 d) const {
        return reinterpret_cast<ELEMENT*>(start + b * batch + h * head + i * position + d * depth);
    }
    // Whether four elements from a multiple of four on can be moved together.
    __device__ bool in_fours() const {
        const i64 all = reinterpret_cast<i64>(start) | batch | head | position;
        return depth == sizeof(ELEMENT) && all % static_cast<i64>(4 * sizeof(ELEMENT)) == 0;
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

struct alignas(16) Four {
    float at[4];
};

__device__ inline const Four& four(const float* from) { return *reinterpret_cast<const Four*>(from); }

// Sends `TALL` rows of a tensor to a tile, with zeros where there are none. They are there after `arrive`.
template <int TALL, int WIDTH>
__device__ inline void send(float* tile, const Heads& from, i64 b, i64 h, i64 first, i64 count) {
    constexpr int FOURS = full(WIDTH) / 4;
    const char* start = reinterpret_cast<const char*>(from.at(b, h, first, 0));
    const int rows = count - first < TALL ? static_cast<int>(count - first) : TALL;
    const bool together = WIDTH % 4 == 0 && from.in_fours();
#pragma unroll 4
    for (int i = threadIdx.x; i < TALL * FOURS; i += THREADS) {
        const int row = i / FOURS, column = i % FOURS * 4;
        float* to = tile + row * pitch(WIDTH) + column;
        const char* place = start + row * from.position;
        if (together) {
            const bool inside = row < rows && column < WIDTH;
            place = inside ? place + column * sizeof(ELEMENT) : start;
            if constexpr (sizeof(ELEMENT) == sizeof(float)) {
                send_16_bytes(to, place, inside);
            } else {
                const auto given = *reinterpret_cast<const Vector<ELEMENT, 4>*>(start == place || inside ? place : start);
#pragma unroll
                for (int e = 0; e < 4; ++e) to[e] = inside ? widened(given.at[e]) : 0.0f;
            }
        } else {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const bool inside = row < rows && column + e < WIDTH;
                to[e] = inside ? widened(*reinterpret_cast<const ELEMENT*>(place + (column + e) * from.depth)) : 0.0f;
            }
        }
    }
}

// Sends a number for each of COLUMNS queries from one of them on, with zeros where there are none.
__device__ inline void send_numbers(float* to, const float* from, i64 count) {
    for (int i = threadIdx.x; i < COLUMNS; i += THREADS) send_4_bytes(to + i, i < count ? from + i : from, i < count);
}

// A tile of queries and a tile of keys, which begin at these.
struct Pairs {
    const char* mask;
    i64 mask_query, mask_key;
    int queries, keys;  // that there are, from the first of a tile on
    int ahead;          // CAUSAL: a query reads keys that are at most so many places further in their tile
    float scale;

    __device__ Pairs(const Arguments& a, i64 b, i64 h, i64 query, i64 key) {
        constexpr i64 MOST = 1 << 20;  // beyond any tile
        mask_query = a.mask_query, mask_key = a.mask_key;
        mask = a.mask + b * a.mask_batch + h * a.mask_head + query * mask_query + key * mask_key;
        queries = static_cast<int>(scalar::minimum(a.queries - query, MOST));
        keys = static_cast<int>(scalar::minimum(a.keys - key, MOST));
        ahead = static_cast<int>(scalar::clip(query - key, -MOST, MOST));
        scale = static_cast<float>(a.scale);
    }

    __device__ float score(float product, int query, int key) const {
        float found = product * scale;
        if constexpr (MASKED)
            if (query < queries && key < keys)
                found += static_cast<float>(
                    widened(*reinterpret_cast<const MASK_ELEMENT*>(mask + query * mask_query + key * mask_key)));
        return found;
    }

    // Whether all of so many keys are read by all queries.
    __device__ bool all_read(int wide) const { return keys >= wide && (!CAUSAL || ahead >= wide - 1); }
    __device__ bool is_read(int query, int key) const { return key < keys && (!CAUSAL || key <= query + ahead); }
};

struct Sum {
    __device__ float operator()(float a, float b) const { return a + b; }
};

struct Largest {
    __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

#if TENSOR_CORES
#include "attention_warps.cuh"
#else
#include "attention_threads.cuh"
#endif

// Scores from products of queries and keys; -inf where a key is not read. ACROSS_QUERIES: columns are queries.
template <bool ACROSS_QUERIES> __device__ inline void scored(Scores& found, const Pairs& pairs) {
#pragma unroll
    for (int i = 0; i < DOWN; ++i)
#pragma unroll
        for (int j = 0; j < ACROSS; ++j) {
            const int row = row_of(i), column = column_of(j);
            found[i][j] = pairs.score(found[i][j], ACROSS_QUERIES ? column : row, ACROSS_QUERIES ? row : column);
        }
    if (pairs.all_read(ACROSS_QUERIES ? ROWS : COLUMNS)) return;
#pragma unroll
    for (int i = 0; i < DOWN; ++i)
#pragma unroll
        for (int j = 0; j < ACROSS; ++j) {
            const int row = row_of(i), column = column_of(j);
            if (!pairs.is_read(ACROSS_QUERIES ? column : row, ACROSS_QUERIES ? row : column)) found[i][j] = -INFINITE;
        }
}
