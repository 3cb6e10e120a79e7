// Rows of tensors, each the work of a team of TEAM neighbouring threads: a power of two, at most 32, or whole warps. A
// thread takes VECTOR neighbouring elements at a time.
//
// RANK axes number the rows of every tensor; ELEMENT is the type of rows, unless said otherwise. If VECTOR is more than
// 1, elements of these rows lie side by side.
#pragma once
#include "packed.cuh"
#include "place.cuh"
#include "scalar.cuh"

constexpr int THREADS = 256, TEAMS = THREADS / TEAM, WARP = 32, STRIDE = TEAM * VECTOR;
constexpr int GROUP = 4;  // vectors that a thread reads before it uses the first, in long rows
typedef Wide<ELEMENT> Number;
constexpr int BLOCKS = sizeof(Number) > 4 ? 2 : 3;  // for which a multiprocessor has registers
typedef Vector<Number, VECTOR> Numbers;

template <class T> __device__ inline Vector<Wide<T>, VECTOR> widened(const Vector<T, VECTOR>& narrow) {
    Vector<Wide<T>, VECTOR> found;
#pragma unroll
    for (int k = 0; k < VECTOR; ++k) found.at[k] = widened(narrow.at[k]);
    return found;
}

struct Line {
    char* start;
    i64 step;  // bytes

    // VECTOR elements from the i-th on, those from `count` on zero.
    template <class T> __device__ Vector<T, VECTOR> elements(i64 i, i64 count) const {
        if constexpr (VECTOR > 1) return load<T, VECTOR>(start + i * sizeof(T), count - i);
        Vector<T, VECTOR> found = {};
        if (i < count) found.at[0] = *reinterpret_cast<const T*>(start + i * step);
        return found;
    }
    template <class T> __device__ Vector<Wide<T>, VECTOR> stretch(i64 i, i64 count) const {
        return widened(elements<T>(i, count));
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

    // The line from the i-th element on.
    template <class T> __device__ Line behind(i64 i) const {
        return Line{start + i * (VECTOR > 1 ? static_cast<i64>(sizeof(T)) : step), step};
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
    // Elements of a line, of `count`, before the first one that has the alignment of the tensor's first element. The
    // number depends only on extents and strides.
    template <class T> __device__ i64 head(const Line& line, i64 count) const {
        if constexpr (VECTOR == 1) return 0;
        const i64 found = (-(line.start - start) & (VECTOR * sizeof(T) - 1)) / sizeof(T);
        return found < count ? found : count;
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
// The first element that a thread takes.
__device__ inline i64 first_of_lane() { return threadIdx.x % TEAM * VECTOR; }

// The combination of the team's numbers, the same for each of its threads; all threads of the block take part.
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

// Calls `use` with some vectors of a line at a time, after reading them all, and with the first element; vectors are
// STRIDE elements apart. Returns the first element that is left.
template <class Use> __device__ inline i64 use_groups(const Line& x, i64 count, Use use) {
    i64 i = first_of_lane();
    if (!is_aligned<ELEMENT, VECTOR>(x.start)) return i;
    for (; i + (GROUP - 1) * STRIDE + VECTOR <= count; i += GROUP * STRIDE) {
        Packed<ELEMENT, VECTOR> found[GROUP];
#pragma unroll
        for (int n = 0; n < GROUP; ++n) found[n].load(x.behind<ELEMENT>(i + n * STRIDE).start);
        use(found, i);
    }
    return i;
}

// Calls `use` with all vectors of a line, and with the element that each of them begins at.
template <class Use> __device__ inline void use_vectors(const Line& x, i64 count, Use use) {
    i64 i = use_groups(x, count, [&](const Packed<ELEMENT, VECTOR> (&found)[GROUP], i64 i) {
#pragma unroll
        for (int n = 0; n < GROUP; ++n) use(widened(found[n].elements), i + n * STRIDE);
    });
    for (; i < count; i += STRIDE) use(x.stretch<ELEMENT>(i, count), i);
}

// The largest element of a row, and the sum of the exponentials of all elements less it.
struct Exponentials {
    Number high, sum;

    // Further elements.
    template <int MANY> __device__ void add(const Number (&numbers)[MANY]) {
        Number higher = high;
#pragma unroll
        for (int k = 0; k < MANY; ++k) higher = scalar::maximum(higher, numbers[k]);
        if (higher == -static_cast<Number>(INFINITE)) return;  // all exponentials are 0
        if (higher != high) sum *= scalar::exponential(high - higher);
        high = higher;
#pragma unroll
        for (int k = 0; k < MANY; ++k) sum += scalar::exponential(numbers[k] - high);
    }
};

// For the whole team. A row is read once: a thread's sum is of exponentials less the largest that it has seen, and is
// scaled whenever that grows (Milakov and Gimelshein 2018). The first `head` elements are taken one by one.
__device__ inline Exponentials exponentials_of(const Line& x, i64 head, i64 count, Number* shared) {
    Exponentials own = {-static_cast<Number>(INFINITE), 0};
    for (i64 i = lane_of_team(); i < head; i += TEAM) own.add<1>({x.read<ELEMENT>(i)});
    const Line rest = x.behind<ELEMENT>(head);
    i64 i = use_groups(rest, count - head, [&](const Packed<ELEMENT, VECTOR> (&found)[GROUP], i64) {
        Number numbers[GROUP * VECTOR];
#pragma unroll
        for (int k = 0; k < GROUP * VECTOR; ++k) numbers[k] = widened(found[k / VECTOR].elements.at[k % VECTOR]);
        own.add(numbers);
    });
    for (; i < count - head; i += STRIDE) {
        auto here = rest.stretch<ELEMENT>(i, count - head);
#pragma unroll
        for (int k = 0; k < VECTOR; ++k)
            if (i + k >= count - head) here.at[k] = -static_cast<Number>(INFINITE);
        own.add(here.at);
    }
    const Number highest = combined(own.high, Largest(), shared);
    return {highest, combined(own.sum * scalar::exponential(own.high - highest), Sum(), shared)};
}
