// Softmax, its logarithm, and what pulls their gradients back from results and cotangents, row by row.
//
// LOGARITHM and GRADIENT say which of the four it is. Each thread writes only elements that it alone reads, and after
// the whole row's sums: the result may take the bytes of an input.
#include "rows.cuh"

struct Arguments {
    i64 rows, count;
    Rows first, second, result;  // x, or y and its cotangent
};

extern "C" __global__ void __launch_bounds__(THREADS) softmax(const Arguments a) {
    __shared__ Number shared[THREADS / WARP];
    const i64 row = row_of_team();
    const i64 count = row < a.rows ? a.count : 0;
    const int lane = lane_of_team();
    const Line x = a.first.line(count ? row : 0), g = a.second.line(count ? row : 0), y = a.result.line(count ? row : 0);
    Number sum = 0;
    if constexpr (GRADIENT) {
        for (i64 i = lane; i < count; i += TEAM) {
            const Number there = g.read<ELEMENT>(i);
            sum += LOGARITHM ? there : x.read<ELEMENT>(i) * there;
        }
        sum = combined(sum, Sum(), shared);
        for (i64 i = lane; i < count; i += TEAM) {
            const Number here = x.read<ELEMENT>(i), there = g.read<ELEMENT>(i);
            y.write<ELEMENT>(i, LOGARITHM ? there - scalar::exponential(here) * sum : here * (there - sum));
        }
    } else {
        Number high = -static_cast<Number>(INFINITE);
        for (i64 i = lane; i < count; i += TEAM) high = scalar::maximum(high, x.read<ELEMENT>(i));
        high = combined(high, Largest(), shared);
        for (i64 i = lane; i < count; i += TEAM) sum += scalar::exponential(x.read<ELEMENT>(i) - high);
        sum = combined(sum, Sum(), shared);
        const Number last = LOGARITHM ? scalar::logarithm(sum) : static_cast<Number>(1) / sum;
        for (i64 i = lane; i < count; i += TEAM) {
            const Number less = x.read<ELEMENT>(i) - high;
            y.write<ELEMENT>(i, LOGARITHM ? less - last : scalar::exponential(less) * last);
        }
    }
}
