// Gradients of attention to keys and values; `attention_queries` comes before.
#include "attention.cuh"

constexpr int OF_QUERIES = COLUMNS * (OF_DEPTH + 2);  // with the logarithms of their sums, and deltas
constexpr int FLOATS = ROWS * (OF_DEPTH + OF_VALUES) + COLUMNS * OF_VALUES + QUERY_TILES * OF_QUERIES + WEIGHTS_FLOATS;
static_assert(FLOATS <= SHARED_FLOATS, "a launch gives as much shared memory as a block needs");

// dk and dv of a tile of keys: sums over the queries of all heads that share them, in order.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) attention_keys(const Arguments a) {
    DYNAMIC_SHARED(memory);
    float *k = memory, *v = k + ROWS * OF_DEPTH, *g = v + ROWS * OF_VALUES, *queries = g + COLUMNS * OF_VALUES;
    const i64 shared_heads = a.heads / a.group;
    const i64 first = blockIdx.x % a.tiles * ROWS, shared_head = blockIdx.x / a.tiles % shared_heads;
    const i64 b = blockIdx.x / a.tiles / shared_heads;
    const i64 start = CAUSAL ? first : 0, turns = start < a.queries ? (a.queries - start + COLUMNS - 1) / COLUMNS : 0;
    const auto tile_of = [&](i64 left) { return queries + left % QUERY_TILES * OF_QUERIES; };
    const auto send_queries = [&](float* to, i64 h, i64 query) {
        const i64 place = (b * a.heads + h) * a.queries + query;
        send<COLUMNS, DEPTH>(to, a.q, b, h, query, a.queries);
        send_numbers(to + COLUMNS * OF_DEPTH, a.log_sum + place, a.queries - query);
        send_numbers(to + COLUMNS * (OF_DEPTH + 1), a.deltas + place, a.queries - query);
    };
    i64 h = shared_head * a.group, query = start;
    send<ROWS, DEPTH>(k, a.k, b, shared_head, first, a.keys);
    send<ROWS, VALUE_DEPTH>(v, a.v, b, shared_head, first, a.keys);
    if (turns) send_queries(tile_of(turns * a.group), h, query);
    arrive<ROWS, DEPTH>(k);
    arrive<ROWS, VALUE_DEPTH>(v);
    Sums<DEPTH> of_key = {};
    Sums<VALUE_DEPTH> of_value = {};
    for (i64 left = turns * a.group; left > 0; --left) {
        const bool ends = query + COLUMNS >= a.queries;  // this head
        const i64 next_h = h + ends, next_query = ends ? start : query + COLUMNS;
        float* q = tile_of(left);
        const float *log_sums = q + COLUMNS * OF_DEPTH, *deltas = log_sums + COLUMNS;
        Scores scores, slopes;
        arrive<COLUMNS, DEPTH>(q);
        __syncthreads();
        send<COLUMNS, VALUE_DEPTH>(g, a.g, b, h, query, a.queries);
        dots<DEPTH>(k, q, scores);
        scored<true>(scores, Pairs(a, b, h, query, first));
        Weights weights(queries + QUERY_TILES * OF_QUERIES);
#pragma unroll
        for (int j = 0; j < ACROSS; ++j) {
            const float log_sum = log_sums[column_of(j)];
#pragma unroll
            for (int i = 0; i < DOWN; ++i) weights.at(i, j) = fast_exponential(scores[i][j] - log_sum);
        }
        arrive<COLUMNS, VALUE_DEPTH>(g);
        __syncthreads();
        if (QUERY_TILES == 2 && left > 1) send_queries(tile_of(left - 1), next_h, next_query);
        of_value.add(weights, g);
        dots<VALUE_DEPTH>(v, g, slopes);
#pragma unroll
        for (int j = 0; j < ACROSS; ++j) {
            const float delta = deltas[column_of(j)];
#pragma unroll
            for (int i = 0; i < DOWN; ++i) weights.at(i, j) *= slopes[i][j] - delta;
        }
        of_key.add(weights, q);
        if (QUERY_TILES == 1 && left > 1) {
            __syncthreads();
            send_queries(tile_of(left - 1), next_h, next_query);
        }
        h = next_h, query = next_query;
    }
#pragma unroll
    for (int i = 0; i < DOWN; ++i) {
        const i64 key = first + row_of(i);
        if (key >= a.keys) continue;
        of_key.scale(i, static_cast<float>(a.scale));
        of_value.write(i, a.dv, b, shared_head, key);
        of_key.write(i, a.dk, b, shared_head, key);
    }
}
