// The work on a chunk of logits between the products that make them and the products that use their gradient.
//
// ELEMENT is the logits' type, GRADIENT that of their gradient, TARGET that of classes; MEAN: the weight of losses is
// one over the number of items that count.
#include "rows.cuh"

struct Arguments {
    i64 rows, count, ignored;
    Rows logits, gradient;
    const TARGET* target;
    Number* losses;
    Number* weight;  // of each item that counts
};

// The weight, computed by one block: `rows` targets; `count` is not used.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) weight_of_items(const Arguments a) {
    __shared__ i64 counts[THREADS];
    i64 own = 0;
    for (i64 i = threadIdx.x; i < a.rows; i += THREADS) own += static_cast<i64>(a.target[i]) != a.ignored;
    counts[threadIdx.x] = own;
    __syncthreads();
    for (int half = THREADS / 2; half; half /= 2) {
        if (threadIdx.x < half) counts[threadIdx.x] += counts[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x == 0) *a.weight = MEAN && counts[0] > 1 ? 1 / static_cast<Number>(counts[0]) : static_cast<Number>(1);
}

// Logits → the gradient of their weighted loss, which may lie in their place; and each item's weighted loss.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) logits_to_gradient(const Arguments a) {
    __shared__ Number shared[THREADS / WARP];
    const i64 row = row_of_team();
    const i64 count = row < a.rows ? a.count : 0;
    const Line x = a.logits.line(count ? row : 0), gradient = a.gradient.line(count ? row : 0);
    const i64 target = count ? static_cast<i64>(a.target[row]) : a.ignored;
    const Number picked = target >= 0 && target < count ? x.read<ELEMENT>(target) : static_cast<Number>(0);
    const i64 head = a.logits.head<ELEMENT>(x, count);
    const Exponentials all = exponentials_of(x, head, count, shared);  // by then all have read what they pick
    Number weight = *a.weight;
    if (target == a.ignored) weight = 0;
    else if (target < 0 || target >= a.count) weight = static_cast<Number>(NOT_A_NUMBER);
    const Number factor = weight / all.sum;
    const auto result = [&](Number number, i64 i) {
        const Number found = scalar::exponential(number - all.high) * factor;
        return i == target ? found - weight : found;
    };
    for (i64 i = lane_of_team(); i < head; i += TEAM) gradient.write<GRADIENT>(i, result(x.read<ELEMENT>(i), i));
    const Line behind = gradient.behind<GRADIENT>(head);
    use_vectors(x.behind<ELEMENT>(head), count - head, [&](Numbers found, i64 i) {
#pragma unroll
        for (int k = 0; k < VECTOR; ++k) found.at[k] = result(found.at[k], head + i + k);
        behind.write_stretch<GRADIENT>(i, found, count - head);
    });
    if (first_of_lane() || !count) return;
    a.losses[row] = target == a.ignored ? 0 : (scalar::logarithm(all.sum) - (picked - all.high)) * weight;
}
