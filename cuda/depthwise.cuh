// The work of convolutions that take each channel by itself: rows of windows, and the columns of elements they share.
//
// A unit of work is an item, a place along every axis but the last, and a block of EACH neighbours along the last axis.
// A block of threads has ACROSS threads for neighbouring channels, VECTOR of them each, and ROWS units at a time. For
// every row of taps (one tap along every axis but the last) a thread reads the COLUMNS elements on which the taps of its
// neighbours lie, once, and before it works on the first. What lies in the padding is read at the first element of its
// row: with a branch, each read would wait for the one before.
//
// The windows lie on the source. Without GRADIENT, neighbours are windows: window p has its tap t at element
// p · stride - low + t · dilation. With it, neighbours are elements, and the windows that have tap t on element p are
// read: (p + low - t · dilation) / stride, where this is a whole number. A block then begins at a multiple of the
// stride, so that the taps that meet each neighbour are known when this is compiled.
//
// Sizes of windows are those of windows.cuh. Along the last axis, a block's first column is place BEGIN + block · STEP of
// the source, further ones are GAP apart, and its first neighbour is place block · EACH - SHIFT. ELEMENT is the type of
// images and weights. MULTIPLE filters have the same input channel. INDEX holds numbers of units, OFFSET bytes within an
// item's channel.
#pragma once
#include "types.cuh"
#include "windows.cuh"

constexpr int THREADS = ACROSS * ROWS, LAST = AXES - 1;
typedef Wide<ELEMENT> Number;
typedef Vector<ELEMENT, VECTOR> Elements;

__device__ constexpr int rows_of_taps() {
    int rows = 1;
    for (int axis = 0; axis < LAST; ++axis) rows *= kernel_of(axis);
    return rows;
}

constexpr int ROW = kernel_of(LAST), ROWS_OF_TAPS = rows_of_taps(), TAPS = ROW * ROWS_OF_TAPS;
// The first window with a tap on the first neighbour, counted from the one that begins there.
constexpr int LOWEST = -((ROW - 1) * dilation_of(LAST) / stride_of(LAST));

// The column that a neighbour reads for a tap of its row; -1: none.
__device__ constexpr int column_of(int neighbour, int tap) {
    const int stride = stride_of(LAST), reach = tap * dilation_of(LAST);
    if (!GRADIENT) return (neighbour * stride + reach) / GAP;
    return (neighbour - reach) % stride ? -1 : ((neighbour - reach) / stride - LOWEST) / GAP;
}

// Images or weights: bytes from one item (filter) to the next, and along the other axes.
struct Tensor {
    char* start;
    i64 item, channel, axes[AXES];

    template <class T> __device__ T& at(i64 offset) const { return *reinterpret_cast<T*>(start + offset); }
};

// VECTOR channels side by side, in one piece if they are ALIGNED.
template <bool ALIGNED> __device__ inline Elements read(const char* from) {
    if constexpr (ALIGNED) return load_vector<ELEMENT, VECTOR>(from);
    else return load_each<ELEMENT, VECTOR>(from, VECTOR);
}

struct Unit {
    INDEX item;
    i32 place[AXES];  // along the last axis the number of the block

    __device__ Unit(INDEX number, const i64 (&counts)[AXES]) {
#pragma unroll
        for (int axis = LAST; axis >= 0; --axis) {
            const INDEX count = static_cast<INDEX>(counts[axis]), above = number / count;
            place[axis] = static_cast<i32>(number - above * count);
            number = above;
        }
        item = number;
    }
    // Bytes to the first neighbour's row in a tensor whose places they are.
    __device__ i64 row_in(const Tensor& x) const {
        i64 offset = item * x.item;
#pragma unroll
        for (int axis = 0; axis < LAST; ++axis) offset += place[axis] * x.axes[axis];
        return offset;
    }
    __device__ i32 neighbour(int which) const { return place[LAST] * EACH - SHIFT + which; }
    // Whether a row of taps lies on the source; and adds the bytes to there.
    __device__ bool meets(int row_of_taps, const i64 (&extents)[AXES], const i64 (&strides)[AXES], OFFSET& bytes) const {
        int row = row_of_taps;
#pragma unroll
        for (int axis = LAST - 1; axis >= 0; --axis) {
            const int tap = row % kernel_of(axis) * dilation_of(axis), stride = stride_of(axis);
            row /= kernel_of(axis);
            i32 at = place[axis] * stride - low_of(axis) + tap;
            if constexpr (GRADIENT) {
                at = place[axis] + low_of(axis) - tap;
                if (at < 0 || at % stride) return false;
                at /= stride;
            }
            if (at < 0 || at >= static_cast<i32>(extents[axis])) return false;
            bytes += at * static_cast<OFFSET>(strides[axis]);
        }
        return true;
    }
};

// What a block's windows read of a row, in columns; zero in the padding.
template <bool ALIGNED>
__device__ inline void read_columns(const char* row, i32 block, i32 extent, OFFSET step, Number (&found)[COLUMNS][VECTOR]) {
    const i32 first = block * (STEP) + (BEGIN);
    Elements elements[COLUMNS];
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) {
        const i32 place = first + i * GAP;
        elements[i] = read<ALIGNED>(row + (place >= 0 && place < extent ? place * step : 0));
    }
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) {
        const i32 place = first + i * GAP;
        const bool inside = place >= 0 && place < extent;
#pragma unroll
        for (int k = 0; k < VECTOR; ++k) found[i][k] = inside ? widened(elements[i].at[k]) : Number(0);
    }
}
