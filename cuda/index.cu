// Slices of one axis read at, and added at, the places that indices name; an index counts modulo the axis.
//
// PLACE is the type of indices, VECTOR how many elements of a slice are read at a time. Tensors are [outer, n, inner].
#include "types.cuh"

constexpr int THREADS = 256, WARP = 32;

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

__device__ inline i64 place_of(PLACE index, i64 extent) {
    const i64 rest = static_cast<i64>(index) % extent;
    return rest < 0 ? rest + extent : rest;
}

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

// The block of the first index of each place adds all slices that have that place, in the order of indices.
extern "C" __global__ void __launch_bounds__(THREADS) scatter_add(const Arguments a) {
    __shared__ u32 matches[THREADS / WARP];
    __shared__ int taken;
    const i64 own = blockIdx.x, place = place_of(a.indices[own], a.extent);
    if (threadIdx.x == 0) taken = 0;
    __syncthreads();
    for (i64 i = threadIdx.x; i < own; i += THREADS)
        if (place_of(a.indices[i], a.extent) == place) taken = 1;
    __syncthreads();
    if (taken) return;
    const i64 column = static_cast<i64>(blockIdx.y) * THREADS + threadIdx.x;
    const bool inside = column < a.inner;
    char* to = a.table.start + blockIdx.z * a.table.outer_step + place * a.table.step + column * a.table.inner_step;
    const char* from = a.slices.start + blockIdx.z * a.slices.outer_step + column * a.slices.inner_step;
    Wide<ELEMENT> sum = 0;
    if (inside) sum = widened(*reinterpret_cast<const ELEMENT*>(to));
    for (i64 first = own; first < a.count; first += THREADS) {
        const i64 i = first + threadIdx.x;
        const u32 found = __ballot_sync(0xffffffffu, i < a.count && place_of(a.indices[i], a.extent) == place);
        if (threadIdx.x % WARP == 0) matches[threadIdx.x / WARP] = found;
        __syncthreads();
        for (int warp = 0; warp < THREADS / WARP; ++warp)
            for (u32 left = matches[warp]; left; left &= left - 1) {
                const i64 match = first + warp * WARP + __ffs(static_cast<int>(left)) - 1;
                if (inside) sum += widened(*reinterpret_cast<const ELEMENT*>(from + match * a.slices.step));
            }
        __syncthreads();
    }
    if (inside) *reinterpret_cast<ELEMENT*>(to) = narrowed<ELEMENT>(sum);
}
