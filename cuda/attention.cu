// Attention: each row's maximum and sum are kept as tiles of keys go by (Milakov and Gimelshein 2018; Dao et al. 2022).
#include "attention.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 2) attention(const Arguments a) {
    alignas(16) __shared__ float q[ROWS * OF_DEPTH], other[OTHER], p[ROWS * OF_SCORES];
    const i64 first = blockIdx.x % a.tiles * ROWS, h = blockIdx.x / a.tiles % a.heads, b = blockIdx.x / a.tiles / a.heads;
    const i64 shared_head = h / a.group, seen = CAUSAL && first + ROWS < a.keys ? first + ROWS : a.keys;
    load_tile<ROWS, DEPTH>(q, a.q, b, h, first, a.queries, static_cast<float>(a.scale));
    Sums<VALUE_DEPTH> out = {};
    float high[DOWN], total[DOWN] = {};
#pragma unroll
    for (int i = 0; i < DOWN; ++i) high[i] = LOWEST;
    for (i64 key = 0; key < seen; key += COLUMNS) {
        __syncthreads();
        load_tile<COLUMNS, DEPTH>(other, a.k, b, shared_head, key, a.keys, 1.0f);
        __syncthreads();
        Scores scores;
        dots<DEPTH>(q, other, scores);
#pragma unroll
        for (int i = 0; i < DOWN; ++i) {
            const int row = down() + i * SIDE;
            float tile_high = LOWEST, tile_total = 0;
#pragma unroll
            for (int j = 0; j < ACROSS; ++j) {
                scores[i][j] = masked(scores[i][j], a, b, h, first + row, key + across() + j * SIDE);
                tile_high = scalar::maximum(tile_high, scores[i][j]);
            }
            tile_high = scalar::maximum(high[i], of_row(tile_high, Largest()));
            const float before = expf(high[i] - tile_high);
            high[i] = tile_high;
#pragma unroll
            for (int j = 0; j < ACROSS; ++j) {
                const float probability = expf(scores[i][j] - tile_high);
                p[row * OF_SCORES + across() + j * SIDE] = probability;
                tile_total += probability;
            }
            total[i] = total[i] * before + of_row(tile_total, Sum());
            out.scale(i, before);
        }
        __syncthreads();
        load_tile<COLUMNS, VALUE_DEPTH>(other, a.v, b, shared_head, key, a.keys, 1.0f);
        __syncthreads();
        out.add(p, other);
    }
#pragma unroll
    for (int i = 0; i < DOWN; ++i) {
        const i64 query = first + down() + i * SIDE;
        if (query >= a.queries) continue;
        const float sum = scalar::maximum(total[i], 1.0f);
        out.scale(i, 1 / sum);
        out.write(i, a.o, b, h, query);
        if (across() == 0) a.log_sum[(b * a.heads + h) * a.queries + query] = high[i] + logf(sum);
    }
}
