// Softmax, its logarithm, and their gradients from results and cotangents, row by row.
//
// LOGARITHM and GRADIENT say which of the four it is. Each thread writes only elements that no other thread reads,
// after the whole row's sums: the result may take the bytes of an input.
#include "rows.cuh"

struct Arguments {
    i64 rows, count;
    Rows first, second, result;  // x, or y and its cotangent
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) softmax(const Arguments a) {
    __shared__ Number shared[THREADS / WARP];
    const i64 row = row_of_team();
    const i64 count = row < a.rows ? a.count : 0;
    const Line x = a.first.line(count ? row : 0), g = a.second.line(count ? row : 0), y = a.result.line(count ? row : 0);
    Number sum = 0;
    if constexpr (GRADIENT) {
        for (i64 i = first_of_lane(); i < count; i += STRIDE) {
            const auto here = x.stretch<ELEMENT>(i, count), there = g.stretch<ELEMENT>(i, count);
#pragma unroll
            for (int k = 0; k < VECTOR; ++k) sum += LOGARITHM ? there.at[k] : here.at[k] * there.at[k];
        }
        sum = combined(sum, Sum(), shared);
    } else {
        const i64 head = a.first.head<ELEMENT>(x, count);
        const Exponentials all = exponentials_of(x, head, count, shared);
        const Number part = LOGARITHM ? scalar::logarithm(all.sum) : static_cast<Number>(1) / all.sum;
        const auto result = [&](Number number) {
            return LOGARITHM ? number - all.high - part : scalar::exponential(number - all.high) * part;
        };
        for (i64 i = lane_of_team(); i < head; i += TEAM) y.write<ELEMENT>(i, result(x.read<ELEMENT>(i)));
        const Line behind = y.behind<ELEMENT>(head);
        use_vectors(x.behind<ELEMENT>(head), count - head, [&](Numbers found, i64 i) {
#pragma unroll
            for (int k = 0; k < VECTOR; ++k) found.at[k] = result(found.at[k]);
            behind.write_stretch<ELEMENT>(i, found, count - head);
        });
        return;
    }
    for (i64 i = first_of_lane(); i < count; i += STRIDE) {
        const auto here = x.stretch<ELEMENT>(i, count), there = g.stretch<ELEMENT>(i, count);
        Vector<Number, VECTOR> found;
#pragma unroll
        for (int k = 0; k < VECTOR; ++k) {
            if (LOGARITHM) found.at[k] = there.at[k] - scalar::exponential(here.at[k]) * sum;
            else found.at[k] = here.at[k] * (there.at[k] - sum);
        }
        y.write_stretch<ELEMENT>(i, found, count);
    }
}
