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

// 0 for items to be ignored, NaN for those whose target is no class.
__device__ inline Number marked(Number x, i64 target, const Arguments& a) {
    if (target == a.ignored) return 0;
    return target < 0 || target >= a.count ? static_cast<Number>(NOT_A_NUMBER) : x;
}

extern "C" __global__ void __launch_bounds__(THREADS) cross_entropy(const Arguments a) {
    __shared__ Number shared[THREADS / WARP];
    const i64 row = row_of_team();
    const i64 count = row < a.rows ? a.count : 0;
    const int lane = lane_of_team();
    const Line x = a.logits.line(count ? row : 0);
    Number high = -static_cast<Number>(INFINITE), sum = 0;
    for (i64 i = lane; i < count; i += TEAM) high = scalar::maximum(high, x.read<ELEMENT>(i));
    high = combined(high, Largest(), shared);
    for (i64 i = lane; i < count; i += TEAM) sum += scalar::exponential(x.read<ELEMENT>(i) - high);
    sum = combined(sum, Sum(), shared);
    if (lane || !count) return;
    const i64 target = static_cast<i64>(a.target.line(row).read<TARGET>(0));
    const Number logarithm = scalar::logarithm(sum);
    const Number picked = target >= 0 && target < count ? x.read<ELEMENT>(target) : static_cast<Number>(0);
    // Close to 0 without cancellation where the target is the largest.
    a.loss.line(row).write<STATISTIC>(0, marked((high - picked) + logarithm, target, a));
    a.log_sum.line(row).write<STATISTIC>(0, high + logarithm);
}

extern "C" __global__ void __launch_bounds__(THREADS) cross_entropy_grad(const Arguments a) {
    const i64 row = row_of_team();
    if (row >= a.rows) return;
    const Line x = a.logits.line(row), y = a.gradient.line(row);
    const i64 target = static_cast<i64>(a.target.line(row).read<TARGET>(0));
    const Number log_sum = a.log_sum.line(row).read<STATISTIC>(0);
    const Number g = marked(a.loss.line(row).read<STATISTIC>(0), target, a);
    for (i64 i = lane_of_team(); i < a.count; i += TEAM) {
        const Number probability = scalar::exponential(x.read<ELEMENT>(i) - log_sum);
        y.write<ELEMENT>(i, probability * g - (i == target ? g : static_cast<Number>(0)));
    }
}
