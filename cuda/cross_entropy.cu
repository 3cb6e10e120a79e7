// Cross-entropy of logits against classes, an item a row, and its gradient.
//
// TARGET is the type of classes, STATISTIC that of losses, of the logarithms of sums and of cotangents.
#include "rows.cuh"

struct Arguments {
    i64 rows, count, ignored;
    Rows logits, target;
    Rows loss, log_sum;       // log_sum and cotangent of the gradient
    Rows gradient;
};

// 0 for ignored items, NaN for items whose target is no class.
__device__ inline Number marked(Number x, i64 target, const Arguments& a) {
    if (target == a.ignored) return 0;
    return target < 0 || target >= a.count ? static_cast<Number>(NOT_A_NUMBER) : x;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) cross_entropy(const Arguments a) {
    __shared__ Number shared[THREADS / WARP];
    const i64 row = row_of_team();
    const i64 count = row < a.rows ? a.count : 0;
    const Line x = a.logits.line(count ? row : 0);
    const Exponentials found = exponentials_of(x, a.logits.head<ELEMENT>(x, count), count, shared);
    if (first_of_lane() || !count) return;
    const i64 target = static_cast<i64>(a.target.line(row).read<TARGET>(0));
    const Number logarithm = scalar::logarithm(found.sum);
    const Number picked = target >= 0 && target < count ? x.read<ELEMENT>(target) : static_cast<Number>(0);
    // Close to 0 without cancellation where the target is the largest.
    a.loss.line(row).write<STATISTIC>(0, marked((found.high - picked) + logarithm, target, a));
    a.log_sum.line(row).write<STATISTIC>(0, found.high + logarithm);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) cross_entropy_grad(const Arguments a) {
    const i64 row = row_of_team();
    if (row >= a.rows) return;
    const Line x = a.logits.line(row), y = a.gradient.line(row);
    const i64 target = static_cast<i64>(a.target.line(row).read<TARGET>(0));
    const Number log_sum = a.log_sum.line(row).read<STATISTIC>(0);
    const Number g = marked(a.loss.line(row).read<STATISTIC>(0), target, a);
    const auto result = [&](Number number, i64 i) {
        const Number found = scalar::exponential(number - log_sum) * g;
        return i == target ? found - g : found;
    };
    const i64 head = a.logits.head<ELEMENT>(x, a.count);
    for (i64 i = lane_of_team(); i < head; i += TEAM) y.write<ELEMENT>(i, result(x.read<ELEMENT>(i), i));
    const Line behind = y.behind<ELEMENT>(head);
    use_vectors(x.behind<ELEMENT>(head), a.count - head, [&](Numbers found, i64 i) {
#pragma unroll
        for (int k = 0; k < VECTOR; ++k) found.at[k] = result(found.at[k], head + i + k);
        behind.write_stretch<ELEMENT>(i, found, a.count - head);
    });
}
