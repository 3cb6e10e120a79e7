// Softmax, its logarithm, and what pulls their gradients back from results and cotangents, row by row.
//
// LOGARITHM and GRADIENT say which of the four it is. Each thread writes only elements that it alone reads, and after
// the whole row's sums: the result may take the bytes of an input.
#include "rows.cuh"

struct Arguments {
    i64 rows, count;
    Rows first, second, result;  // x, or y and its cotangent
};

extern "C" __global__ void __launch_bounds__(THREADS, 2) softmax(const Arguments a) {
    __shared__ Number shared[THREADS / WARP];
    const i64 row = row_of_team();
    const i64 count = row < a.rows ? a.count : 0;
    const Line x = a.first.line(count ? row : 0), g = a.second.line(count ? row : 0), y = a.result.line(count ? row : 0);
    Number sum = 0, high = 0;
    if constexpr (GRADIENT) {
        for (i64 i = first_of_lane(); i < count; i += STRIDE) {
            const auto here = x.stretch<ELEMENT>(i, count), there = g.stretch<ELEMENT>(i, count);
#pragma unroll
            for (int k = 0; k < VECTOR; ++k) sum += LOGARITHM ? there.at[k] : here.at[k] * there.at[k];
        }
        sum = combined(sum, Sum(), shared);
    } else {
        const Exponentials found = exponentials_of(x, count, shared);
        high = found.high;
        sum = LOGARITHM ? scalar::logarithm(found.sum) : static_cast<Number>(1) / found.sum;
    }
    for (i64 i = first_of_lane(); i < count; i += STRIDE) {
        const auto here = x.stretch<ELEMENT>(i, count), there = g.stretch<ELEMENT>(i, count);
        Vector<Number, VECTOR> found;
#pragma unroll
        for (int k = 0; k < VECTOR; ++k) {
            const Number less = here.at[k] - high;
            if (GRADIENT && LOGARITHM) found.at[k] = there.at[k] - scalar::exponential(here.at[k]) * sum;
            else if (GRADIENT) found.at[k] = here.at[k] * (there.at[k] - sum);
            else found.at[k] = LOGARITHM ? less - sum : scalar::exponential(less) * sum;
        }
        y.write_stretch<ELEMENT>(i, found, count);
    }
}
