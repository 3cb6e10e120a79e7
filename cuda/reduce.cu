// Reductions: of each output's terms, which may lie in any way.
//
// A block has 256 / LANES outputs and LANES threads for each; where it has a part of the terms alone (grid.y parts), what
// it writes is reduced once more. Every thread adds up runs of eight terms before they join its total, and totals are
// added in pairs: the order never depends on what runs first.
//
// ELEMENT and RESULT are stored types; COMBINE takes two numbers to one, NEUTRAL changes nothing. TERMS_SIDE_BY_SIDE: of
// neighbouring threads the terms are neighbours, else the outputs. KEPT and REDUCED axes.
#include "place.cuh"
#include "scalar.cuh"

constexpr int THREADS = 256, OUTPUTS = THREADS / LANES, RUN = 8;
typedef Wide<ELEMENT> Number;

struct Arguments {
    const char* source;
    RESULT* target;
    i64 outputs, terms, terms_a_part;
    double factor;
    i64 kept_extents[KEPT], kept_strides[KEPT];          // bytes
    i64 reduced_extents[REDUCED], reduced_strides[REDUCED];
};

extern "C" __global__ void __launch_bounds__(THREADS) reduce(const Arguments a) {
    __shared__ Number totals[THREADS];
    const int lane = TERMS_SIDE_BY_SIDE ? threadIdx.x % LANES : threadIdx.x / OUTPUTS;
    const int which = TERMS_SIDE_BY_SIDE ? threadIdx.x / LANES : threadIdx.x % OUTPUTS;
    const i64 output = static_cast<i64>(blockIdx.x) * OUTPUTS + which;
    Number total = NEUTRAL;
    if (output < a.outputs) {
        const char* source = a.source + offset_of<KEPT>(static_cast<INDEX>(output), a.kept_extents, a.kept_strides);
        const i64 first = blockIdx.y * a.terms_a_part;
        const i64 last = first + a.terms_a_part < a.terms ? first + a.terms_a_part : a.terms;
        for (i64 begin = first + lane; begin < last; begin += RUN * LANES) {
            Number run = NEUTRAL;
#pragma unroll
            for (int i = 0; i < RUN; ++i) {
                const i64 term = begin + i * LANES;
                if (term < last) {
                    const i64 at = offset_of<REDUCED>(static_cast<INDEX>(term), a.reduced_extents, a.reduced_strides);
                    run = COMBINE(run, widened(*reinterpret_cast<const ELEMENT*>(source + at)));
                }
            }
            total = COMBINE(total, run);
        }
    }
    totals[threadIdx.x] = total;
    __syncthreads();
    constexpr int STEP = TERMS_SIDE_BY_SIDE ? 1 : OUTPUTS;
    for (int half = LANES / 2; half; half /= 2) {
        if (lane < half) totals[threadIdx.x] = COMBINE(totals[threadIdx.x], totals[threadIdx.x + half * STEP]);
        __syncthreads();
    }
    if (lane == 0 && output < a.outputs) {
        total = totals[threadIdx.x];
        if constexpr (SCALED) total = scalar::multiply(total, static_cast<Number>(a.factor));
        a.target[blockIdx.y * a.outputs + output] = narrowed<RESULT>(total);
    }
}
