// Reductions of each output's terms, in any layout.
//
// A block has 256 / LANES threads with VECTOR outputs each and LANES threads for each of these; if it has only a part
// of the terms (grid.y parts), its results are reduced once more. Every thread adds up runs of eight terms before they
// join its total, and totals are added in pairs: the order never depends on what runs first.
//
// ELEMENT and RESULT are stored types; COMBINE makes one number of two; NEUTRAL is its neutral element.
// TERMS_SIDE_BY_SIDE: neighbouring threads have neighbouring terms; else they have neighbouring outputs, and so has
// each thread if VECTOR is more than 1. KEPT and REDUCED axes.
#include "packed.cuh"
#include "place.cuh"
#include "scalar.cuh"

constexpr int THREADS = 256, ACROSS = THREADS / LANES, RUN = 8;
typedef Wide<ELEMENT> Number;
typedef Packed<ELEMENT, VECTOR> Elements;

struct Arguments {
    const char* source;
    RESULT* target;
    i64 outputs, terms, terms_a_part;
    double factor;
    i64 kept_extents[KEPT], kept_strides[KEPT];          // bytes
    i64 reduced_extents[REDUCED], reduced_strides[REDUCED];

    __device__ const char* term(const char* first, i64 which) const {
        return first + offset_of<REDUCED>(static_cast<INDEX>(which), reduced_extents, reduced_strides);
    }
};

// The terms of a thread's outputs, every LANES-th from the first one on. ALIGNED: vectors may begin where they do.
template <bool ALIGNED> struct Totals {
    Number at[VECTOR];

    __device__ static void read(Elements& found, const char* place) {
        if constexpr (ALIGNED) found.load(place);
        else found.elements = load<ELEMENT, VECTOR>(place);
    }
    __device__ void add(const Arguments& a, const char* first, i64 term, i64 last) {
#pragma unroll
        for (int k = 0; k < VECTOR; ++k) at[k] = NEUTRAL;
        for (; term + (RUN - 1) * LANES < last; term += RUN * LANES) {
            Elements found[RUN];
            const char* place = a.term(first, term);
#pragma unroll
            for (int i = 0; i < RUN; ++i) {
                if (REDUCED > 1 && i) place = a.term(first, term + i * LANES);
                read(found[i], place);
                if (REDUCED == 1) place += LANES * a.reduced_strides[0];
            }
            join(found, RUN);
        }
        if (term >= last) return;
        Elements found[RUN];
        int count = 0;
#pragma unroll
        for (int i = 0; i < RUN; ++i) {
            if (term + i * LANES >= last) continue;
            read(found[i], a.term(first, term + i * LANES));
            count = i + 1;
        }
        join(found, count);
    }
    __device__ void join(const Elements (&found)[RUN], int count) {
#pragma unroll
        for (int k = 0; k < VECTOR; ++k) {
            Number run = NEUTRAL;
#pragma unroll
            for (int i = 0; i < RUN; ++i)
                if (i < count) run = COMBINE(run, widened(found[i].elements.at[k]));
            at[k] = COMBINE(at[k], run);
        }
    }
};

template <bool ALIGNED> __device__ inline void write_totals(const Arguments& a, Number (&shared)[VECTOR][THREADS]) {
    const int lane = TERMS_SIDE_BY_SIDE ? threadIdx.x % LANES : threadIdx.x / ACROSS;
    const int which = TERMS_SIDE_BY_SIDE ? threadIdx.x / LANES : threadIdx.x % ACROSS;
    const i64 output = (static_cast<i64>(blockIdx.x) * ACROSS + which) * VECTOR;
    Totals<ALIGNED> totals;
    if (output < a.outputs) {
        const i64 first = blockIdx.y * a.terms_a_part;
        const i64 last = first + a.terms_a_part < a.terms ? first + a.terms_a_part : a.terms;
        const char* source = a.source + offset_of<KEPT>(static_cast<INDEX>(output), a.kept_extents, a.kept_strides);
        totals.add(a, source, first + lane, last);
    }
    if constexpr (LANES > 1) {
#pragma unroll
        for (int k = 0; k < VECTOR; ++k) shared[k][threadIdx.x] = totals.at[k];
        __syncthreads();
        constexpr int STEP = TERMS_SIDE_BY_SIDE ? 1 : ACROSS;
        for (int half = LANES / 2; half; half /= 2) {
            if (lane < half) {
#pragma unroll
                for (int k = 0; k < VECTOR; ++k) {
                    totals.at[k] = COMBINE(totals.at[k], shared[k][threadIdx.x + half * STEP]);
                    shared[k][threadIdx.x] = totals.at[k];
                }
            }
            __syncthreads();
        }
    }
    if (lane || output >= a.outputs) return;
    Vector<RESULT, VECTOR> results;
#pragma unroll
    for (int k = 0; k < VECTOR; ++k) {
        if constexpr (SCALED) totals.at[k] = scalar::multiply(totals.at[k], static_cast<Number>(a.factor));
        results.at[k] = narrowed<RESULT>(totals.at[k]);
    }
    store<RESULT, VECTOR>(a.target + blockIdx.y * a.outputs + output, results);
}

extern "C" __global__ void __launch_bounds__(THREADS) reduce(const Arguments a) {
    __shared__ Number shared[VECTOR][THREADS];
    if (is_aligned<ELEMENT, VECTOR>(a.source)) write_totals<true>(a, shared);
    else write_totals<false>(a, shared);
}
