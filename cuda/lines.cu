// Kernels on lines of a tensor along one axis, or on their elements: cumulative sums, the places of extremes, the
// largest elements in order, and elements that are read or added at the places of indices.
//
// A thread has a line, or an element of one. RANK axes number the lines; PLACE is the type of indices.
#include "place.cuh"
#include "scalar.cuh"

constexpr int THREADS = 256;
typedef Wide<ELEMENT> Number;

struct Lines {
    char* start;
    i64 step;  // bytes, from one element of a line to the next
    i64 extents[RANK], strides[RANK];

    __device__ char* line(INDEX number) const { return start + offset_of<RANK>(number, extents, strides); }
};

struct Arguments {
    i64 lines, count, taken;  // count: elements of a line; taken: of a line of indices, or of results
    Lines source, places, target;
};

__device__ inline Number number_at(const char* line, i64 offset) {
    return widened(*reinterpret_cast<const ELEMENT*>(line + offset));
}

__device__ inline i64 place_at(const char* line, i64 offset, i64 count) {
    return place_of(*reinterpret_cast<const PLACE*>(line + offset), count);
}

__device__ inline bool is_none(Number x) { return x != x; }

extern "C" __global__ void __launch_bounds__(THREADS) cumsum(const Arguments a) {
    const INDEX number = static_cast<INDEX>(blockIdx.x) * THREADS + threadIdx.x;
    if (number >= static_cast<INDEX>(a.lines)) return;
    const char* x = a.source.line(number);
    char* y = a.target.line(number);
    Number sum = 0;
    for (i64 i = 0; i < a.count; ++i) {
        const i64 at = REVERSE ? a.count - 1 - i : i;
        const Number here = number_at(x, at * a.source.step), next = scalar::add(sum, here);
        *reinterpret_cast<ELEMENT*>(y + at * a.target.step) = narrowed<ELEMENT>(EXCLUSIVE ? sum : next);
        sum = next;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) arg_reduce(const Arguments a) {
    const INDEX number = static_cast<INDEX>(blockIdx.x) * THREADS + threadIdx.x;
    if (number >= static_cast<INDEX>(a.lines)) return;
    const char* x = a.source.line(number);
    Number best = number_at(x, 0);
    i64 place = 0;
    for (i64 i = 1; i < a.count; ++i) {
        const Number here = number_at(x, i * a.source.step);
        const bool better = LARGEST ? here > best : here < best, equal = here == best || (is_none(here) && is_none(best));
        if ((LAST && equal) || (!is_none(best) && (better || is_none(here)))) {
            best = here;
            place = i;
        }
    }
    *reinterpret_cast<i64*>(a.places.line(number)) = place;
}

// An element's rank is the number of elements before it: larger ones, and equal ones at lower places; NaN is last. A
// thread has one element.
extern "C" __global__ void __launch_bounds__(THREADS) top_k(const Arguments a) {
    const INDEX number = static_cast<INDEX>(blockIdx.x) * THREADS + threadIdx.x;
    const INDEX line = number / static_cast<INDEX>(a.count);
    if (line >= static_cast<INDEX>(a.lines)) return;
    const i64 own = static_cast<i64>(number - line * static_cast<INDEX>(a.count));
    const char* x = a.source.line(line);
    const Number value = number_at(x, own * a.source.step);
    i64 rank = 0;
    for (i64 i = 0; i < a.count; ++i) {
        const Number here = number_at(x, i * a.source.step);
        const bool first = LARGEST ? here > value : here < value;
        const bool equal = here == value || (is_none(here) && is_none(value));
        rank += first || (equal && i < own) || (is_none(value) && !is_none(here));
    }
    if (rank >= a.taken) return;
    *reinterpret_cast<ELEMENT*>(a.target.line(line) + rank * a.target.step) =
        *reinterpret_cast<const ELEMENT*>(x + own * a.source.step);
    *reinterpret_cast<i64*>(a.places.line(line) + rank * a.places.step) = own;
}

extern "C" __global__ void __launch_bounds__(THREADS) gather_elements(const Arguments a) {
    const INDEX number = static_cast<INDEX>(blockIdx.x) * THREADS + threadIdx.x;
    const INDEX line = number / static_cast<INDEX>(a.taken);
    if (line >= static_cast<INDEX>(a.lines)) return;
    const i64 own = static_cast<i64>(number - line * static_cast<INDEX>(a.taken));
    const i64 place = place_at(a.places.line(line), own * a.places.step, a.count);
    *reinterpret_cast<ELEMENT*>(a.target.line(line) + own * a.target.step) =
        *reinterpret_cast<const ELEMENT*>(a.source.line(line) + place * a.source.step);
}

// In the order of the indices of a line; the result is zero at first.
extern "C" __global__ void __launch_bounds__(THREADS) scatter_elements_add(const Arguments a) {
    const INDEX line = static_cast<INDEX>(blockIdx.x) * THREADS + threadIdx.x;
    if (line >= static_cast<INDEX>(a.lines)) return;
    const char *x = a.source.line(line), *places = a.places.line(line);
    char* y = a.target.line(line);
    for (i64 i = 0; i < a.taken; ++i) {
        ELEMENT* to = reinterpret_cast<ELEMENT*>(y + place_at(places, i * a.places.step, a.count) * a.target.step);
        *to = narrowed<ELEMENT>(scalar::add(widened(*to), number_at(x, i * a.source.step)));
    }
}
