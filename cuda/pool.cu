// The largest element or the mean of each window, and what pulls their gradients back.
//
// A thread has one element of the result, channels fastest. Images have three spatial axes, the first ones of extent 1
// where there are fewer. A gradient is gathered: each element looks up the windows that it lies in.
//
// ELEMENT is the images' type, PLACE that of saved numbers of taps, SAVE whether there are any, NEUTRAL what is lowest.
#include "scalar.cuh"

constexpr int THREADS = 256, AXES = 3;
typedef Wide<ELEMENT> Number;

struct Tensor {
    char* start;
    i64 item, channel, axes[AXES];  // bytes

    template <class T> __device__ T* at(i64 n, i64 c, const i32 (&place)[AXES]) const {
        i64 offset = n * item + c * channel;
#pragma unroll
        for (int axis = 0; axis < AXES; ++axis) offset += place[axis] * axes[axis];
        return reinterpret_cast<T*>(start + offset);
    }
};

struct Arguments {
    i64 count, channels;
    i64 extents[AXES], positions[AXES];
    i64 kernel[AXES], strides[AXES], lows[AXES], dilations[AXES];
    i64 firsts[AXES], lasts[AXES];  // of means: elements that count are those from the first up to the last
    Tensor source, target, saved;
};

struct Element {
    i64 n, c;
    i32 place[AXES];

    __device__ Element(const Arguments& a, const i64 (&extents)[AXES], INDEX number) {
        INDEX above = number / static_cast<INDEX>(a.channels);
        c = number - above * static_cast<INDEX>(a.channels);
#pragma unroll
        for (int axis = AXES - 1; axis >= 0; --axis) {
            const INDEX extent = static_cast<INDEX>(extents[axis]), next = above / extent;
            place[axis] = static_cast<i32>(above - next * extent);
            above = next;
        }
        n = above;
    }
};

// Calls f(number of the tap, element) for each tap of a window that falls inside.
template <class F> __device__ inline void taps_inside(const Arguments& a, const i32 (&position)[AXES], F f) {
    i32 at[AXES];
    i64 tap = 0;
    for (i32 i = 0; i < a.kernel[0]; ++i) {
        at[0] = static_cast<i32>(position[0] * a.strides[0] - a.lows[0] + i * a.dilations[0]);
        for (i32 j = 0; j < a.kernel[1]; ++j) {
            at[1] = static_cast<i32>(position[1] * a.strides[1] - a.lows[1] + j * a.dilations[1]);
            for (i32 k = 0; k < a.kernel[2]; ++k, ++tap) {
                at[2] = static_cast<i32>(position[2] * a.strides[2] - a.lows[2] + k * a.dilations[2]);
                if (at[0] >= 0 && at[0] < a.extents[0] && at[1] >= 0 && at[1] < a.extents[1] && at[2] >= 0 &&
                    at[2] < a.extents[2])
                    f(tap, at);
            }
        }
    }
}

// The windows that have a tap on an element, along one axis: from the first up to the last, perhaps others between.
struct Range {
    i32 first, last;

    __device__ Range(const Arguments& a, int axis, i32 place) {
        const i32 stride = static_cast<i32>(a.strides[axis]);
        const i32 high = static_cast<i32>(place + a.lows[axis]);
        const i32 low = static_cast<i32>(high - (a.kernel[axis] - 1) * a.dilations[axis]);
        first = low > 0 ? (low + stride - 1) / stride : 0;
        last = high < 0 ? 0 : high / stride + 1;
        if (last > a.positions[axis]) last = static_cast<i32>(a.positions[axis]);
    }
};

// The tap of a window that lies on an element, along one axis; -1: none does.
__device__ inline i32 tap_on(const Arguments& a, int axis, i32 place, i32 position) {
    const i32 apart = static_cast<i32>(place + a.lows[axis] - position * a.strides[axis]);
    const i32 dilation = static_cast<i32>(a.dilations[axis]), tap = apart / dilation;
    return tap * dilation == apart ? tap : -1;
}

template <class F> __device__ inline void windows_on(const Arguments& a, const i32 (&place)[AXES], F f) {
    const Range outer(a, 0, place[0]), middle(a, 1, place[1]), inner(a, 2, place[2]);
    i32 at[AXES];
    for (at[0] = outer.first; at[0] < outer.last; ++at[0]) {
        const i32 i = tap_on(a, 0, place[0], at[0]);
        if (i < 0) continue;
        for (at[1] = middle.first; at[1] < middle.last; ++at[1]) {
            const i32 j = tap_on(a, 1, place[1], at[1]);
            if (j < 0) continue;
            for (at[2] = inner.first; at[2] < inner.last; ++at[2]) {
                const i32 k = tap_on(a, 2, place[2], at[2]);
                if (k >= 0) f((i * a.kernel[1] + j) * a.kernel[2] + k, at);
            }
        }
    }
}

// How many taps of a window count for its mean, at least 1 along each axis.
__device__ inline Number counted(const Arguments& a, const i32 (&position)[AXES]) {
    i64 product = 1;
#pragma unroll
    for (int axis = 0; axis < AXES; ++axis) {
        const i64 start = position[axis] * a.strides[axis] - a.lows[axis], gap = a.dilations[axis];
        const i64 before = a.firsts[axis] - start, behind = a.lasts[axis] - 1 - start;
        const i64 low = before > 0 ? (before + gap - 1) / gap : 0;
        const i64 most = behind < 0 ? -1 : behind / gap;
        const i64 high = most < a.kernel[axis] - 1 ? most : a.kernel[axis] - 1;
        if (high > low) product *= high - low + 1;
    }
    return static_cast<Number>(product);
}

extern "C" __global__ void __launch_bounds__(THREADS, 3) max_pool(const Arguments a) {
    const INDEX number = static_cast<INDEX>(blockIdx.x) * THREADS + threadIdx.x;
    if (number >= static_cast<INDEX>(a.count)) return;
    const Element own(a, a.positions, number);
    Number best = NEUTRAL;
    i64 won = 0;
    taps_inside(a, own.place, [&](i64 tap, const i32(&at)[AXES]) {
        const Number x = widened(*a.source.at<ELEMENT>(own.n, own.c, at));
        if (x > best || (x != x && best == best)) {
            best = x;
            won = tap;
        }
    });
    *a.target.at<ELEMENT>(own.n, own.c, own.place) = narrowed<ELEMENT>(best);
    if constexpr (SAVE) *a.saved.at<PLACE>(own.n, own.c, own.place) = static_cast<PLACE>(won);
}

extern "C" __global__ void __launch_bounds__(THREADS, 3) max_pool_grad(const Arguments a) {
    const INDEX number = static_cast<INDEX>(blockIdx.x) * THREADS + threadIdx.x;
    if (number >= static_cast<INDEX>(a.count)) return;
    const Element own(a, a.extents, number);
    Number sum = 0;
    windows_on(a, own.place, [&](i64 tap, const i32(&at)[AXES]) {
        if (static_cast<i64>(*a.saved.at<PLACE>(own.n, own.c, at)) == tap)
            sum += widened(*a.source.at<ELEMENT>(own.n, own.c, at));
    });
    *a.target.at<ELEMENT>(own.n, own.c, own.place) = narrowed<ELEMENT>(sum);
}

extern "C" __global__ void __launch_bounds__(THREADS, 3) avg_pool(const Arguments a) {
    const INDEX number = static_cast<INDEX>(blockIdx.x) * THREADS + threadIdx.x;
    if (number >= static_cast<INDEX>(a.count)) return;
    const Element own(a, a.positions, number);
    Number sum = 0;
    taps_inside(a, own.place, [&](i64 tap, const i32(&at)[AXES]) {
        sum += widened(*a.source.at<ELEMENT>(own.n, own.c, at));
    });
    *a.target.at<ELEMENT>(own.n, own.c, own.place) = narrowed<ELEMENT>(sum / counted(a, own.place));
}

extern "C" __global__ void __launch_bounds__(THREADS, 3) avg_pool_grad(const Arguments a) {
    const INDEX number = static_cast<INDEX>(blockIdx.x) * THREADS + threadIdx.x;
    if (number >= static_cast<INDEX>(a.count)) return;
    const Element own(a, a.extents, number);
    Number sum = 0;
    windows_on(a, own.place, [&](i64 tap, const i32(&at)[AXES]) {
        sum += widened(*a.source.at<ELEMENT>(own.n, own.c, at)) / counted(a, at);
    });
    *a.target.at<ELEMENT>(own.n, own.c, own.place) = narrowed<ELEMENT>(sum);
}
