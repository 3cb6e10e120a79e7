// The operands of products: tensors that are read at a pair of places, one along the rows or columns of the result
// (outer) and one along the sum (inner).
#pragma once
#include "place.cuh"

// A tensor whose places are independent of each other.
template <int OUTER_RANK, int INNER_RANK> struct Plain {
    typedef i64 Outer, Inner;

    const char* start;
    i64 outer_extents[OUTER_RANK], outer_strides[OUTER_RANK];  // bytes
    i64 inner_extents[INNER_RANK], inner_strides[INNER_RANK];

    __device__ Outer outer(INDEX place) const { return offset_of<OUTER_RANK>(place, outer_extents, outer_strides); }
    __device__ Inner inner(INDEX place) const { return offset_of<INNER_RANK>(place, inner_extents, inner_strides); }

    template <class T> __device__ Wide<T> at(i64 before, Outer outer, Inner inner) const {
        return widened(*reinterpret_cast<const T*>(start + before + outer + inner));
    }
};

// Images that windows slide over: a position (item and window) and a tap (place in the window and channel) read the
// element at (position · position_steps + tap · tap_steps + shifts) / divisors along each axis, and zero if that is no
// whole number or outside.
template <int AXES, bool DIVIDED> struct Images {
    struct Part {
        i64 offset;
        i32 at[AXES];
    };

    const char* start;
    i64 item_stride, channel_stride, strides[AXES];  // bytes
    i64 extents[AXES], divisors[AXES], shifts[AXES];
    i64 positions[AXES], position_steps[AXES];
    i64 taps[AXES], tap_steps[AXES], channels;

    __device__ Part position(INDEX place) const {
        Part found;
#pragma unroll
        for (int axis = AXES - 1; axis >= 0; --axis) {
            const INDEX extent = static_cast<INDEX>(positions[axis]), above = place / extent;
            found.at[axis] = static_cast<i32>((place - above * extent) * position_steps[axis] + shifts[axis]);
            place = above;
        }
        found.offset = static_cast<i64>(place) * item_stride;
        return found;
    }

    __device__ Part tap(INDEX place) const {
        Part found;
        const INDEX above_channels = place / static_cast<INDEX>(channels);
        found.offset = static_cast<i64>(place - above_channels * static_cast<INDEX>(channels)) * channel_stride;
        place = above_channels;
#pragma unroll
        for (int axis = AXES - 1; axis >= 0; --axis) {
            const INDEX extent = static_cast<INDEX>(taps[axis]), above = place / extent;
            found.at[axis] = static_cast<i32>(static_cast<i64>(place - above * extent) * tap_steps[axis]);
            place = above;
        }
        return found;
    }

    template <class T> __device__ Wide<T> read(i64 before, const Part& position, const Part& tap) const {
        i64 offset = before + position.offset + tap.offset;
#pragma unroll
        for (int axis = 0; axis < AXES; ++axis) {
            i32 place = position.at[axis] + tap.at[axis];
            if constexpr (DIVIDED) {
                const i32 divisor = static_cast<i32>(divisors[axis]), whole = place / divisor;
                if (place < 0 || whole * divisor != place) return Wide<T>(0);
                place = whole;
            }
            if (place < 0 || place >= extents[axis]) return Wide<T>(0);
            offset += place * strides[axis];
        }
        return widened(*reinterpret_cast<const T*>(start + offset));
    }
};

// Positions along the result, taps summed over.
template <int AXES, bool DIVIDED> struct Windows : Images<AXES, DIVIDED> {
    typedef typename Images<AXES, DIVIDED>::Part Outer, Inner;

    __device__ Outer outer(INDEX place) const { return this->position(place); }
    __device__ Inner inner(INDEX place) const { return this->tap(place); }
    template <class T> __device__ Wide<T> at(i64 before, const Outer& outer, const Inner& inner) const {
        return this->template read<T>(before, outer, inner);
    }
};

// Taps along the result, positions summed over.
template <int AXES, bool DIVIDED> struct Taps : Images<AXES, DIVIDED> {
    typedef typename Images<AXES, DIVIDED>::Part Outer, Inner;

    __device__ Outer outer(INDEX place) const { return this->tap(place); }
    __device__ Inner inner(INDEX place) const { return this->position(place); }
    template <class T> __device__ Wide<T> at(i64 before, const Outer& outer, const Inner& inner) const {
        return this->template read<T>(before, inner, outer);
    }
};
