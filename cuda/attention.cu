// Attention: each row's maximum and sum are kept as tiles of keys go by (Milakov and Gimelshein 2018; Dao et al. 2022).
#include "attention.cuh"

constexpr int FLOATS = ROWS * OF_DEPTH + COLUMNS * (OF_DEPTH + OF_VALUES) + WEIGHTS_FLOATS;
static_assert(FLOATS <= SHARED_FLOATS, "a launch gives as much shared memory as a block needs");

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) attention(const Arguments a) {
    DYNAMIC_SHARED(memory);
    float *q = memory, *k = q + ROWS * OF_DEPTH, *v = k + COLUMNS * OF_DEPTH;
    const i64 tile = a.tiles - 1 - blockIdx.x % a.tiles, first = tile * ROWS;  // of a causal one, the longest first
    const i64 h = blockIdx.x / a.tiles % a.heads, b = blockIdx.x / a.tiles / a.heads;
    const i64 shared_head = h / a.group, seen = CAUSAL && first + ROWS < a.keys ? first + ROWS : a.keys;
    send<ROWS, DEPTH>(q, a.q, b, h, first, a.queries);
    send<COLUMNS, DEPTH>(k, a.k, b, shared_head, 0, a.keys);
    arrive<ROWS, DEPTH>(q);
    Sums<VALUE_DEPTH> out = {};
    float high[DOWN], total[DOWN] = {};
#pragma unroll
    for (int i = 0; i < DOWN; ++i) high[i] = LOWEST;
    for (i64 key = 0; key < seen; key += COLUMNS) {
        arrive<COLUMNS, DEPTH>(k);
        __syncthreads();
        send<COLUMNS, VALUE_DEPTH>(v, a.v, b, shared_head, key, a.keys);
        Scores scores;
        dots<DEPTH>(q, k, scores);
        scored<false>(scores, Pairs(a, b, h, first, key));
        Weights weights(v + COLUMNS * OF_VALUES);
#pragma unroll
        for (int i = 0; i < DOWN; ++i) {
            float tile_high = LOWEST, tile_total = 0;
#pragma unroll
            for (int j = 0; j < ACROSS; ++j) tile_high = fmaxf(tile_high, scores[i][j]);
            tile_high = fmaxf(high[i], of_row(tile_high, Largest()));
            const float before = fast_exponential(high[i] - tile_high);
            high[i] = tile_high;
#pragma unroll
            for (int j = 0; j < ACROSS; ++j) {
                const float probability = fast_exponential(scores[i][j] - tile_high);
                weights.at(i, j) = probability;
                tile_total += probability;
            }
            total[i] = total[i] * before + tile_total;
            out.scale(i, before);
        }
        arrive<COLUMNS, VALUE_DEPTH>(v);
        __syncthreads();
        if (key + COLUMNS < seen) send<COLUMNS, DEPTH>(k, a.k, b, shared_head, key + COLUMNS, a.keys);
        out.add(weights, v);
    }
#pragma unroll
    for (int i = 0; i < DOWN; ++i) {
        const i64 query = first + row_of(i);
        const float sum = scalar::maximum(of_row(total[i], Sum()), 1.0f);
        if (query >= a.queries) continue;
        out.scale(i, 1 / sum);
        out.write(i, a.o, b, h, query);
        if (first_of_row()) a.log_sum[(b * a.heads + h) * a.queries + query] = high[i] + logf(sum);
    }
}
