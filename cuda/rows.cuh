// Rows of tensors, each the work of a team of TEAM neighbouring threads: a power of two, at most 32, or whole warps. A
// thread takes VECTOR neighbouring elements at a time.
//
// RANK axes number the rows of every tensor; ELEMENT is what rows hold, unless said otherwise. If VECTOR is more than 1,
// elements of every row that is taken so lie side by side.
#pragma once
#include "place.cuh"
#include "scalar.cuh"

constexpr int THREADS = 256, TEAMS = THREADS / TEAM, WARP = 32, STRIDE = TEAM * VECTOR;
typedef Wide<ELEMENT> Number;

struct Line {
    char* start;
    i64 step;  // bytes

    // VECTOR elements from the i-th on, those from `count` on zero.
    template <class T> __device__ Vector<Wide<T>, VECTOR> stretch(i64 i, i64 count) const {
        Vector<Wide<T>, VECTOR> found = {};
        if constexpr (VECTOR > 1) {
            const Vector<T, VECTOR> narrow = load<T, VECTOR>(start + i * sizeof(T), count - i);
#pragma unroll
            for (int k = 0; k < VECTOR; ++k) found.at[k] = widened(narrow.at[k]);
        } else if (i < count) {
            found.at[0] = read<T>(i);
        }
        return found;
    }
    template <class T> __device__ void write_stretch(i64 i, const Vector<Wide<T>, VECTOR>& numbers, i64 count) const {
        if constexpr (VECTOR > 1) {
            Vector<T, VECTOR> narrow;
#pragma unroll
            for (int k = 0; k < VECTOR; ++k) narrow.at[k] = narrowed<T>(numbers.at[k]);
            store<T, VECTOR>(start + i * sizeof(T), narrow, count - i);
        } else if (i < count) {
            write<T>(i, numbers.at[0]);
        }
    }

    template <class T> __device__ Wide<T> read(i64 i) const {
        return widened(*reinterpret_cast<const T*>(start + i * step));
    }
    template <class T, class S> __device__ void write(i64 i, S x) const {
        *reinterpret_cast<T*>(start + i * step) = narrowed<T>(x);
    }
};

struct Rows {
    char* start;
    i64 step;  // from one element of a row to the next
    i64 extents[RANK], strides[RANK];

    __device__ Line line(i64 row) const {
        return Line{start + offset_of<RANK>(static_cast<INDEX>(row), extents, strides), step};
    }
};

struct Sum {
    template <class T> __device__ T operator()(T a, T b) const { return a + b; }
};

struct Largest {
    template <class T> __device__ T operator()(T a, T b) const { return scalar::maximum(a, b); }
};

__device__ inline i64 row_of_team() { return static_cast<i64>(blockIdx.x) * TEAMS + threadIdx.x / TEAM; }
// The first element that a thread takes.
__device__ inline i64 first_of_lane() { return threadIdx.x % TEAM * VECTOR; }

// What the team's numbers come to, the same for each of its threads; all threads of the block take part.
template <class Combine> __device__ inline Number combined(Number x, Combine combine, Number* shared) {
#pragma unroll
    for (int lanes = (TEAM < WARP ? TEAM : WARP) / 2; lanes; lanes /= 2)
        x = combine(x, __shfl_xor_sync(0xffffffffu, x, lanes));
    if constexpr (TEAM > WARP) {
        constexpr int WARPS = TEAM / WARP;
        __syncthreads();  // what was combined before has been read
        if (threadIdx.x % WARP == 0) shared[threadIdx.x / WARP] = x;
        __syncthreads();
        const Number* first = shared + threadIdx.x / TEAM * WARPS;
        x = first[0];
#pragma unroll
        for (int i = 1; i < WARPS; ++i) x = combine(x, first[i]);
    }
    return x;
}

// The largest element of a row, and the sum of the exponentials of all elements less it.
struct Exponentials {
    Number high, sum;
};

// For the whole team. A row is read once: a thread's sum is of exponentials less the largest that it has seen, and is
// scaled whenever that grows (Milakov and Gimelshein 2018).
__device__ inline Exponentials exponentials_of(const Line& x, i64 count, Number* shared) {
    Number high = -static_cast<Number>(INFINITE), sum = 0;
    for (i64 i = first_of_lane(); i < count; i += STRIDE) {
        const auto here = x.stretch<ELEMENT>(i, count);
        Number higher = high;
#pragma unroll
        for (int k = 0; k < VECTOR; ++k)
            if (i + k < count) higher = scalar::maximum(higher, here.at[k]);
        if (higher == -static_cast<Number>(INFINITE)) continue;  // all exponentials are 0
        if (higher != high) sum *= scalar::exponential(high - higher);
        high = higher;
#pragma unroll
        for (int k = 0; k < VECTOR; ++k)
            if (i + k < count) sum += scalar::exponential(here.at[k] - high);
    }
    const Number highest = combined(high, Largest(), shared);
    return {highest, combined(sum * scalar::exponential(high - highest), Sum(), shared)};
}
