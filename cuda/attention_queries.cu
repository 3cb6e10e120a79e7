// Gradients of attention to queries: probabilities are recomputed from the logarithms of their sums (Dao et al. 2022).
#include "attention.cuh"

constexpr int FLOATS = (ROWS + COLUMNS) * (OF_DEPTH + OF_VALUES) + WEIGHTS_FLOATS;
static_assert(FLOATS <= SHARED_FLOATS, "a launch gives as much shared memory as a block needs");

// dq of a tile of queries; also g · o, and gradients of scores if they are wanted.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) attention_queries(const Arguments a) {
    DYNAMIC_SHARED(memory);
    float *q = memory, *g = q + ROWS * OF_DEPTH, *k = g + ROWS * OF_VALUES, *v = k + COLUMNS * OF_DEPTH;
    const i64 tile = a.tiles - 1 - blockIdx.x % a.tiles, first = tile * ROWS;  // of a causal one, the longest first
    const i64 h = blockIdx.x / a.tiles % a.heads, b = blockIdx.x / a.tiles / a.heads;
    const i64 shared_head = h / a.group, before = (b * a.heads + h) * a.queries;
    const i64 seen = CAUSAL && first + ROWS < a.keys ? first + ROWS : a.keys;
    send<ROWS, DEPTH>(q, a.q, b, h, first, a.queries);
    send<ROWS, VALUE_DEPTH>(g, a.g, b, h, first, a.queries);
    send<COLUMNS, VALUE_DEPTH>(v, a.v, b, shared_head, 0, a.keys);
    float delta[DOWN], log_sum[DOWN];
#pragma unroll
    for (int i = 0; i < DOWN; ++i) {
        const i64 query = first + row_of(i);
        const bool inside = query < a.queries;
        float sum = 0;
        if (inside)
            for (int e = place_in_row(); e < VALUE_DEPTH; e += OF_A_ROW)
                sum += static_cast<float>(widened(*a.o.at(b, h, query, e))) * widened(*a.g.at(b, h, query, e));
        delta[i] = of_row(sum, Sum());
        log_sum[i] = inside ? a.log_sum[before + query] : 0.0f;
        if (inside && first_of_row()) a.deltas[before + query] = delta[i];
    }
    arrive<ROWS, DEPTH>(q);
    arrive<ROWS, VALUE_DEPTH>(g);
    Sums<DEPTH> out = {};
    for (i64 key = 0; key < seen; key += COLUMNS) {
        Scores scores, slopes;
        arrive<COLUMNS, VALUE_DEPTH>(v);
        __syncthreads();
        send<COLUMNS, DEPTH>(k, a.k, b, shared_head, key, a.keys);
        dots<VALUE_DEPTH>(g, v, slopes);
        arrive<COLUMNS, DEPTH>(k);
        __syncthreads();
        if (key + COLUMNS < seen) send<COLUMNS, VALUE_DEPTH>(v, a.v, b, shared_head, key + COLUMNS, a.keys);
        dots<DEPTH>(q, k, scores);
        scored<false>(scores, Pairs(a, b, h, first, key));
        Weights weights(v + COLUMNS * OF_VALUES);
#pragma unroll
        for (int i = 0; i < DOWN; ++i)
#pragma unroll
            for (int j = 0; j < ACROSS; ++j)
                weights.at(i, j) = fast_exponential(scores[i][j] - log_sum[i]) * (slopes[i][j] - delta[i]);
        out.add(weights, k);
        if (SCORE_GRADIENTS)
#pragma unroll WEIGHTS_AT_ONCE
            for (int i = 0; i < DOWN; ++i)
#pragma unroll WEIGHTS_AT_ONCE
                for (int j = 0; j < ACROSS; ++j) {
                    const i64 query = first + row_of(i), here = key + column_of(j);
                    if (query < a.queries && here < a.keys)
                        a.gradients[(before + query) * a.keys + here] = weights.at(i, j);
                }
    }
#pragma unroll
    for (int i = 0; i < DOWN; ++i) {
        const i64 query = first + row_of(i);
        out.scale(i, static_cast<float>(a.scale));
        if (query < a.queries) out.write(i, a.dq, b, h, query);
    }
}
