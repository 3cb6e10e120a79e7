// Places in tensors, counted in C order. INDEX is a type that holds them.
#pragma once
#include "types.cuh"

// The address of a place's element; the last axis runs fastest.
template <int AXES>
__device__ inline i64 offset_of(INDEX place, const i64 (&extents)[AXES], const i64 (&strides)[AXES]) {
    i64 offset = 0;
#pragma unroll
    for (int axis = AXES - 1; axis > 0; --axis) {
        const INDEX extent = static_cast<INDEX>(extents[axis]), above = place / extent;
        offset += static_cast<i64>(place - above * extent) * strides[axis];
        place = above;
    }
    return offset + static_cast<i64>(place) * strides[0];
}

// The place of an index on an axis: it counts modulo the axis, with a division only beyond either end.
template <class T> __device__ inline i64 place_of(T index, i64 extent) {
    i64 place = static_cast<i64>(index);
    if (place < 0 && static_cast<T>(-1) > static_cast<T>(0)) return static_cast<i64>(index % static_cast<u64>(extent));
    if (place < 0) place += extent;
    if (place >= 0 && place < extent) return place;
    place %= extent;
    return place < 0 ? place + extent : place;
}
