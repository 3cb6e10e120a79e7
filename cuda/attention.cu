// Attention and its gradients, tile by tile: scores exist for SIDE queries and SIDE keys at a time.
//
// A block has SIDE rows (queries, or keys in `attention_keys`) and LANES neighbouring threads for each; it goes over the
// other side's tiles in order. The forward pass keeps each row's maximum and sum as it goes (Milakov and Gimelshein
// 2018; Dao et al. 2022); the gradients make probabilities again from the logarithm of the sum.
//
// ELEMENT is the type of queries, keys and values, MASK_ELEMENT that of what is added to scores.
#include "scalar.cuh"

constexpr int THREADS = 256, LANES = THREADS / SIDE, EACH = (SIDE + LANES - 1) / LANES;
constexpr int OF_DEPTH = (DEPTH + LANES - 1) / LANES, OF_VALUES = (VALUE_DEPTH + LANES - 1) / LANES;
constexpr float LOWEST = -3e38f;  // so that a row of -inf alone has exp(-inf) = 0 and not NaN

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

typedef float KeyTile[SIDE][DEPTH + 1];
typedef float ValueTile[SIDE][VALUE_DEPTH + 1];
typedef float ScoreTile[SIDE][SIDE + 1];

template <int WIDTH>
__device__ inline void load_tile(float (&tile)[SIDE][WIDTH + 1], const Heads& from, i64 b, i64 h, i64 first, i64 count,
                                 float factor) {
    for (int i = threadIdx.x; i < SIDE * WIDTH; i += THREADS) {
        const int row = i / WIDTH, column = i % WIDTH;
        tile[row][column] = first + row < count ? widened(*from.at(b, h, first + row, column)) * factor : 0.0f;
    }
}

template <int WIDTH>
__device__ inline float dot(const float (&a)[SIDE][WIDTH + 1], int i, const float (&b)[SIDE][WIDTH + 1], int j) {
    float sum = 0;
#pragma unroll 8
    for (int d = 0; d < WIDTH; ++d) sum += a[i][d] * b[j][d];
    return sum;
}

// The score of a pair with the mask added; -inf where the key is not read.
__device__ inline float masked(float score, const Arguments& a, i64 b, i64 h, i64 query, i64 key) {
    if (query >= a.queries || key >= a.keys || (CAUSAL && key > query)) return -INFINITE;
    if constexpr (MASKED)
        score += static_cast<float>(widened(*reinterpret_cast<const MASK_ELEMENT*>(
            a.mask + b * a.mask_batch + h * a.mask_head + query * a.mask_query + key * a.mask_key)));
    return score;
}

template <class Combine> __device__ inline float of_row(float x, Combine combine) {
#pragma unroll
    for (int lanes = LANES / 2; lanes; lanes /= 2) x = combine(x, __shfl_xor_sync(0xffffffffu, x, lanes));
    return x;
}

struct Sum {
    __device__ float operator()(float a, float b) const { return a + b; }
};

struct Largest {
    __device__ float operator()(float a, float b) const { return scalar::maximum(a, b); }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention(const Arguments a) {
    __shared__ KeyTile q, k;
    __shared__ ValueTile v;
    __shared__ ScoreTile p;
    const i64 first = blockIdx.x % a.tiles * SIDE, h = blockIdx.x / a.tiles % a.heads, b = blockIdx.x / a.tiles / a.heads;
    const int row = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    const i64 query = first + row, shared_head = h / a.group;
    const i64 seen = CAUSAL && first + SIDE < a.keys ? first + SIDE : a.keys;
    load_tile<DEPTH>(q, a.q, b, h, first, a.queries, static_cast<float>(a.scale));
    float out[OF_VALUES] = {}, high = LOWEST, total = 0;
    for (i64 key = 0; key < seen; key += SIDE) {
        __syncthreads();
        load_tile<DEPTH>(k, a.k, b, shared_head, key, a.keys, 1.0f);
        load_tile<VALUE_DEPTH>(v, a.v, b, shared_head, key, a.keys, 1.0f);
        __syncthreads();
        float scores[EACH], tile_high = LOWEST, tile_total = 0;
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int j = lane + i * LANES;
            scores[i] = j < SIDE ? masked(dot<DEPTH>(q, row, k, j), a, b, h, query, key + j) : -INFINITE;
            tile_high = scalar::maximum(tile_high, scores[i]);
        }
        tile_high = scalar::maximum(high, of_row(tile_high, Largest()));
        const float before = expf(high - tile_high);
        high = tile_high;
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int j = lane + i * LANES;
            const float probability = expf(scores[i] - high);
            if (j < SIDE) p[row][j] = probability;
            tile_total += probability;
        }
        total = total * before + of_row(tile_total, Sum());
        __syncthreads();
#pragma unroll
        for (int i = 0; i < OF_VALUES; ++i) {
            const int e = lane + i * LANES;
            if (e >= VALUE_DEPTH) continue;
            float sum = 0;
#pragma unroll 8
            for (int j = 0; j < SIDE; ++j) sum += p[row][j] * v[j][e];
            out[i] = out[i] * before + sum;
        }
    }
    if (query >= a.queries) return;
    total = scalar::maximum(total, 1.0f);
#pragma unroll
    for (int i = 0; i < OF_VALUES; ++i)
        if (lane + i * LANES < VALUE_DEPTH) *a.o.at(b, h, query, lane + i * LANES) = narrowed<ELEMENT>(out[i] / total);
    if (lane == 0) a.log_sum[(b * a.heads + h) * a.queries + query] = high + logf(total);
}

// dq of a tile of queries; and g · o, and gradients of scores if they are asked for.
extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_queries(const Arguments a) {
    __shared__ KeyTile q, k;
    __shared__ ValueTile g, v;
    __shared__ ScoreTile ds;
    const i64 first = blockIdx.x % a.tiles * SIDE, h = blockIdx.x / a.tiles % a.heads, b = blockIdx.x / a.tiles / a.heads;
    const int row = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    const i64 query = first + row, shared_head = h / a.group, number = (b * a.heads + h) * a.queries + query;
    const bool inside = query < a.queries;
    const i64 seen = CAUSAL && first + SIDE < a.keys ? first + SIDE : a.keys;
    load_tile<DEPTH>(q, a.q, b, h, first, a.queries, static_cast<float>(a.scale));
    load_tile<VALUE_DEPTH>(g, a.g, b, h, first, a.queries, 1.0f);
    __syncthreads();
    float delta = 0, out[OF_DEPTH] = {};
    for (int e = lane; e < VALUE_DEPTH; e += LANES)
        if (inside) delta += widened(*a.o.at(b, h, query, e)) * g[row][e];
    delta = of_row(delta, Sum());
    const float log_sum = inside ? a.log_sum[number] : 0.0f;
    if (inside && lane == 0) a.deltas[number] = delta;
    for (i64 key = 0; key < seen; key += SIDE) {
        __syncthreads();
        load_tile<DEPTH>(k, a.k, b, shared_head, key, a.keys, 1.0f);
        load_tile<VALUE_DEPTH>(v, a.v, b, shared_head, key, a.keys, 1.0f);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int j = lane + i * LANES;
            if (j >= SIDE) continue;
            const float score = masked(dot<DEPTH>(q, row, k, j), a, b, h, query, key + j);
            const float found = expf(score - log_sum) * (dot<VALUE_DEPTH>(g, row, v, j) - delta);
            ds[row][j] = found;
            if (SCORE_GRADIENTS && inside && key + j < a.keys) a.gradients[number * a.keys + key + j] = found;
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < OF_DEPTH; ++i) {
            const int d = lane + i * LANES;
            if (d >= DEPTH) continue;
#pragma unroll 8
            for (int j = 0; j < SIDE; ++j) out[i] += ds[row][j] * k[j][d];
        }
    }
    if (!inside) return;
#pragma unroll
    for (int i = 0; i < OF_DEPTH; ++i)
        if (lane + i * LANES < DEPTH)
            *a.dq.at(b, h, query, lane + i * LANES) = narrowed<ELEMENT>(out[i] * static_cast<float>(a.scale));
}

// dk and dv of a tile of keys: sums over the queries of all heads that share them, in order.
extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_keys(const Arguments a) {
    __shared__ KeyTile q, k;
    __shared__ ValueTile g, v;
    __shared__ ScoreTile p, ds;
    __shared__ float log_sums[SIDE], deltas[SIDE];
    const i64 shared_heads = a.heads / a.group;
    const i64 first = blockIdx.x % a.tiles * SIDE, shared_head = blockIdx.x / a.tiles % shared_heads;
    const i64 b = blockIdx.x / a.tiles / shared_heads;
    const int row = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    const i64 key = first + row;
    load_tile<DEPTH>(k, a.k, b, shared_head, first, a.keys, 1.0f);
    load_tile<VALUE_DEPTH>(v, a.v, b, shared_head, first, a.keys, 1.0f);
    float of_key[OF_DEPTH] = {}, of_value[OF_VALUES] = {};
    for (i64 h = shared_head * a.group; h < (shared_head + 1) * a.group; ++h)
        for (i64 query = CAUSAL ? first : 0; query < a.queries; query += SIDE) {
            __syncthreads();
            load_tile<DEPTH>(q, a.q, b, h, query, a.queries, static_cast<float>(a.scale));
            load_tile<VALUE_DEPTH>(g, a.g, b, h, query, a.queries, 1.0f);
            if (threadIdx.x < SIDE) {
                const bool inside = query + threadIdx.x < a.queries;
                const i64 number = (b * a.heads + h) * a.queries + query + threadIdx.x;
                log_sums[threadIdx.x] = inside ? a.log_sum[number] : 0.0f;
                deltas[threadIdx.x] = inside ? a.deltas[number] : 0.0f;
            }
            __syncthreads();
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                const int j = lane + i * LANES;
                if (j >= SIDE) continue;
                const float score = masked(dot<DEPTH>(q, j, k, row), a, b, h, query + j, key);
                const float probability = expf(score - log_sums[j]);
                p[row][j] = probability;
                ds[row][j] = probability * (dot<VALUE_DEPTH>(g, j, v, row) - deltas[j]);
            }
            __syncthreads();
#pragma unroll
            for (int i = 0; i < OF_VALUES; ++i) {
                const int e = lane + i * LANES;
                if (e >= VALUE_DEPTH) continue;
#pragma unroll 8
                for (int j = 0; j < SIDE; ++j) of_value[i] += p[row][j] * g[j][e];
            }
#pragma unroll
            for (int i = 0; i < OF_DEPTH; ++i) {
                const int d = lane + i * LANES;
                if (d >= DEPTH) continue;
#pragma unroll 8
                for (int j = 0; j < SIDE; ++j) of_key[i] += ds[row][j] * q[j][d];
            }
        }
    if (key >= a.keys) return;
#pragma unroll
    for (int i = 0; i < OF_VALUES; ++i)
        if (lane + i * LANES < VALUE_DEPTH)
            *a.dv.at(b, shared_head, key, lane + i * LANES) = narrowed<ELEMENT>(of_value[i]);
#pragma unroll
    for (int i = 0; i < OF_DEPTH; ++i)
        if (lane + i * LANES < DEPTH) *a.dk.at(b, shared_head, key, lane + i * LANES) = narrowed<ELEMENT>(of_key[i]);
}
