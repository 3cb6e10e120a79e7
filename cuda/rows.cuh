// Rows of tensors, each the work of a team of TEAM neighbouring threads: a power of two, at most 32, or whole warps.
//
// RANK axes number the rows of every tensor; ELEMENT is what rows hold, unless said otherwise.
#pragma once
#include "place.cuh"
#include "scalar.cuh"

constexpr int THREADS = 256, TEAMS = THREADS / TEAM, WARP = 32;
typedef Wide<ELEMENT> Number;

struct Line {
    char* start;
    i64 step;  // bytes

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
__device__ inline int lane_of_team() { return threadIdx.x % TEAM; }

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
