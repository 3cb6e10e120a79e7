// Tensors put into larger ones: each element of the result is read from its source, or is `fill`.
//
// RANK axes in the order in which the result lies. Along each, the source's element i lies at first + i · step of the
// result. MODE says how other elements are made: filled (CONSTANT), from the nearest end (EDGE), mirrored at it
// (REFLECT) or from the other end (WRAP).
#include "place.cuh"

enum Mode { CONSTANT, EDGE, REFLECT, WRAP };

struct Arguments {
    i64 count;
    const char* source;
    char* target;
    double fill;
    i64 extents[RANK], target_strides[RANK];  // bytes
    i64 source_extents[RANK], source_strides[RANK], firsts[RANK], steps[RANK];
};

extern "C" __global__ void __launch_bounds__(256) pad(const Arguments a) {
    const INDEX number = static_cast<INDEX>(blockIdx.x) * 256 + threadIdx.x;
    if (number >= static_cast<INDEX>(a.count)) return;
    INDEX left = number;
    i64 from = 0, to = 0;
    bool inside = true;
#pragma unroll
    for (int axis = RANK - 1; axis >= 0; --axis) {
        const INDEX extent = static_cast<INDEX>(a.extents[axis]), above = left / extent;
        const i64 here = static_cast<i64>(left - above * extent), count = a.source_extents[axis];
        to += here * a.target_strides[axis];
        i64 place = here - a.firsts[axis];
        if (MODE == CONSTANT) {
            const i64 step = a.steps[axis], whole = step == 1 ? place : place / step;
            inside = inside && whole * step == place && whole >= 0 && whole < count;
            place = whole;
        } else if (MODE == EDGE) {
            place = place < 0 ? 0 : place < count ? place : count - 1;
        } else if (MODE == REFLECT) {
            place = place < 0 ? -place : place < count ? place : 2 * (count - 1) - place;
        } else {
            place = place < 0 ? place + count : place < count ? place : place - count;
        }
        from += place * a.source_strides[axis];
        left = above;
    }
    *reinterpret_cast<ELEMENT*>(a.target + to) =
        inside ? *reinterpret_cast<const ELEMENT*>(a.source + from) : narrowed<ELEMENT>(a.fill);
}
