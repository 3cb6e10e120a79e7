// Gradients of attention: probabilities are recomputed from the logarithms of their sums (Dao et al. 2022).
#include "attention.cuh"

// dq of a tile of queries; also g · o, and gradients of scores if they are wanted.
extern "C" __global__ void __launch_bounds__(THREADS, 2) attention_queries(const Arguments a) {
    alignas(16) __shared__ float q[ROWS * OF_DEPTH], g[ROWS * OF_VALUES], other[OTHER], ds[ROWS * OF_SCORES];
    const i64 first = blockIdx.x % a.tiles * ROWS, h = blockIdx.x / a.tiles % a.heads, b = blockIdx.x / a.tiles / a.heads;
    const i64 shared_head = h / a.group, before = (b * a.heads + h) * a.queries;
    const i64 seen = CAUSAL && first + ROWS < a.keys ? first + ROWS : a.keys;
    load_tile<ROWS, DEPTH>(q, a.q, b, h, first, a.queries, static_cast<float>(a.scale));
    load_tile<ROWS, VALUE_DEPTH>(g, a.g, b, h, first, a.queries, 1.0f);
    __syncthreads();
    Sums<DEPTH> out = {};
    float delta[DOWN], log_sum[DOWN];
#pragma unroll
    for (int i = 0; i < DOWN; ++i) {
        const int row = down() + i * SIDE;
        const i64 query = first + row;
        const bool inside = query < a.queries;
        float sum = 0;
        for (int e = across(); e < VALUE_DEPTH; e += SIDE)
            if (inside) sum += widened(*a.o.at(b, h, query, e)) * g[row * OF_VALUES + e];
        delta[i] = of_row(sum, Sum());
        log_sum[i] = inside ? a.log_sum[before + query] : 0.0f;
        if (inside && across() == 0) a.deltas[before + query] = delta[i];
    }
    for (i64 key = 0; key < seen; key += COLUMNS) {
        Scores scores, slopes;
        __syncthreads();
        load_tile<COLUMNS, VALUE_DEPTH>(other, a.v, b, shared_head, key, a.keys, 1.0f);
        __syncthreads();
        dots<VALUE_DEPTH>(g, other, slopes);
        __syncthreads();
        load_tile<COLUMNS, DEPTH>(other, a.k, b, shared_head, key, a.keys, 1.0f);
        __syncthreads();
        dots<DEPTH>(q, other, scores);
#pragma unroll
        for (int i = 0; i < DOWN; ++i) {
            const int row = down() + i * SIDE;
            const i64 query = first + row;
#pragma unroll
            for (int j = 0; j < ACROSS; ++j) {
                const i64 here = key + across() + j * SIDE;
                const float score = masked(scores[i][j], a, b, h, query, here);
                const float found = expf(score - log_sum[i]) * (slopes[i][j] - delta[i]);
                ds[row * OF_SCORES + across() + j * SIDE] = found;
                if (SCORE_GRADIENTS && query < a.queries && here < a.keys)
                    a.gradients[(before + query) * a.keys + here] = found;
            }
        }
        __syncthreads();
        out.add(ds, other);
    }
#pragma unroll
    for (int i = 0; i < DOWN; ++i) {
        const i64 query = first + down() + i * SIDE;
        out.scale(i, static_cast<float>(a.scale));
        if (query < a.queries) out.write(i, a.dq, b, h, query);
    }
}

// dk and dv of a tile of keys: sums over the queries of all heads that share them, in order.
extern "C" __global__ void __launch_bounds__(THREADS, 2) attention_keys(const Arguments a) {
    alignas(16) __shared__ float k[ROWS * OF_DEPTH], v[ROWS * OF_VALUES], other[OTHER], p[ROWS * OF_SCORES];
    __shared__ float log_sums[COLUMNS], deltas[COLUMNS];
    const i64 shared_heads = a.heads / a.group;
    const i64 first = blockIdx.x % a.tiles * ROWS, shared_head = blockIdx.x / a.tiles % shared_heads;
    const i64 b = blockIdx.x / a.tiles / shared_heads;
    const float scale = static_cast<float>(a.scale);
    load_tile<ROWS, DEPTH>(k, a.k, b, shared_head, first, a.keys, 1.0f);
    load_tile<ROWS, VALUE_DEPTH>(v, a.v, b, shared_head, first, a.keys, 1.0f);
    Sums<DEPTH> of_key = {};
    Sums<VALUE_DEPTH> of_value = {};
    for (i64 h = shared_head * a.group; h < (shared_head + 1) * a.group; ++h)
        for (i64 query = CAUSAL ? first : 0; query < a.queries; query += COLUMNS) {
            Scores scores, slopes;
            __syncthreads();
            load_tile<COLUMNS, DEPTH>(other, a.q, b, h, query, a.queries, scale);
            if (threadIdx.x < COLUMNS) {
                const bool inside = query + threadIdx.x < a.queries;
                const i64 number = (b * a.heads + h) * a.queries + query + threadIdx.x;
                log_sums[threadIdx.x] = inside ? a.log_sum[number] : 0.0f;
                deltas[threadIdx.x] = inside ? a.deltas[number] : 0.0f;
            }
            __syncthreads();
            dots<DEPTH>(k, other, scores);
#pragma unroll
            for (int i = 0; i < DOWN; ++i)
#pragma unroll
                for (int j = 0; j < ACROSS; ++j) {
                    const int row = down() + i * SIDE, column = across() + j * SIDE;
                    const float score = masked(scores[i][j], a, b, h, query + column, first + row);
                    p[row * OF_SCORES + column] = expf(score - log_sums[column]);
                }
            __syncthreads();
            load_tile<COLUMNS, VALUE_DEPTH>(other, a.g, b, h, query, a.queries, 1.0f);
            __syncthreads();
            dots<VALUE_DEPTH>(v, other, slopes);
            of_value.add(p, other);
            __syncthreads();
#pragma unroll
            for (int i = 0; i < DOWN; ++i)
#pragma unroll
                for (int j = 0; j < ACROSS; ++j) {
                    const int row = down() + i * SIDE, column = across() + j * SIDE;
                    p[row * OF_SCORES + column] *= slopes[i][j] - deltas[column];  // its own: registers are short
                }
            load_tile<COLUMNS, DEPTH>(other, a.q, b, h, query, a.queries, scale);  // once more
            __syncthreads();
            of_key.add(p, other);
        }
#pragma unroll
    for (int i = 0; i < DOWN; ++i) {
        const i64 key = first + down() + i * SIDE;
        if (key >= a.keys) continue;
        of_value.write(i, a.dv, b, shared_head, key);
        of_key.write(i, a.dk, b, shared_head, key);
    }
}
