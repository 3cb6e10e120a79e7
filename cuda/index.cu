// Slices of one axis, read at the places of indices; an index counts modulo the axis.
//
// PLACE is the type of indices, VECTOR how many elements of a slice are read at a time. Tensors are [outer, n, inner].
#include "place.cuh"

constexpr int THREADS = 256;

struct Folded {
    char* start;
    i64 outer_step, step, inner_step;  // bytes
};

struct Arguments {
    i64 outer, count, inner;  // count: of indices
    i64 extent;               // of the axis
    const PLACE* indices;
    Folded table, slices;
};

extern "C" __global__ void __launch_bounds__(THREADS) gather(const Arguments a) {
    const i64 units = (a.inner + VECTOR - 1) / VECTOR;
    const i64 unit = static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x;
    if (unit >= a.outer * a.count * units) return;
    const INDEX slice = static_cast<INDEX>(unit) / static_cast<INDEX>(units);
    const i64 first = (unit - static_cast<i64>(slice) * units) * VECTOR;
    const INDEX outer = slice / static_cast<INDEX>(a.count);
    const i64 i = static_cast<i64>(slice - outer * static_cast<INDEX>(a.count));
    const char* from = a.table.start + outer * a.table.outer_step + place_of(a.indices[i], a.extent) * a.table.step;
    char* to = a.slices.start + outer * a.slices.outer_step + i * a.slices.step;
    const i64 left = a.inner - first;
    from += first * a.table.inner_step;
    to += first * a.slices.inner_step;
    if (a.table.inner_step == sizeof(ELEMENT) && a.slices.inner_step == sizeof(ELEMENT)) {
        store<ELEMENT, VECTOR>(to, load<ELEMENT, VECTOR>(from, left), left);
        return;
    }
#pragma unroll
    for (int k = 0; k < VECTOR; ++k)
        if (k < left)
            *reinterpret_cast<ELEMENT*>(to + k * a.slices.inner_step) =
                *reinterpret_cast<const ELEMENT*>(from + k * a.table.inner_step);
}
