// The largest element or the mean of each window, and their gradients.
//
// A thread has VECTOR neighbouring channels of a window, channels fastest. A gradient is gathered: a thread has a block
// of elements, along each axis as many as the stride. These lie in the same windows, which the thread looks up. Reads
// of several taps or windows come before their first use.
//
// Windows are those of windows.cuh. ELEMENT is the images' type, PLACE that of saved numbers of taps, SAVE whether there
// are any, NEUTRAL the lowest number, ENTRY the kernel. INDEX holds numbers of elements, OFFSET bytes within a tensor.
#include "scalar.cuh"
#include "windows.cuh"

constexpr int THREADS = 256, MOST_TAPS = 9, MOST_WINDOWS = 5;  // read at a time
typedef Wide<ELEMENT> Number;

// Elements from the first tap of a window to the last.
__device__ constexpr int reach_of(int axis) { return (kernel_of(axis) - 1) * dilation_of(axis); }

// The number of windows that may have a tap on an element, along one axis.
__device__ constexpr int windows_of(int axis) { return reach_of(axis) / stride_of(axis) + 1; }

// The last window that begins at or before the first element, along one axis.
__device__ constexpr int first_of(int axis) {
    return (low_of(axis) - (low_of(axis) < 0 ? stride_of(axis) - 1 : 0)) / stride_of(axis);
}

__device__ constexpr int product_of(int (*of)(int)) {
    int product = 1;
    for (int axis = 0; axis < AXES; ++axis) product *= of(axis);
    return product;
}

// The number of items that are read at a time: up to a limit, and about as many each time.
__device__ constexpr int shared_out(int count, int most) {
    const int times = (count + most - 1) / most;
    return (count + times - 1) / times;
}

constexpr int TAPS = product_of(kernel_of), WINDOWS = product_of(windows_of), BLOCK = product_of(stride_of);
constexpr int TOGETHER = BLOCK <= 4 ? BLOCK : 1;  // elements of a block whose taps are found when this is compiled

struct Tensor {
    char* start;
    i64 item, channel, axes[AXES];  // bytes

    __device__ OFFSET at(OFFSET n, OFFSET c, const i32 (&place)[AXES]) const {
        OFFSET offset = n * static_cast<OFFSET>(item) + c * static_cast<OFFSET>(channel);
#pragma unroll
        for (int axis = 0; axis < AXES; ++axis) offset += place[axis] * static_cast<OFFSET>(axes[axis]);
        return offset;
    }
};

struct Arguments {
    i64 count, channels;  // count: of threads
    i64 extents[AXES], positions[AXES], blocks[AXES];
    i64 firsts[AXES], lasts[AXES];  // of means: elements that count are those from the first up to the last
    Tensor source, target, saved;
};

// VECTOR channels side by side, in one piece if they are ALIGNED. Elements outside are not skipped, but read at the
// first element: with a branch, each read would wait for the one before.
template <bool ALIGNED, class T>
__device__ inline Vector<T, VECTOR> read(const Tensor& x, bool inside, OFFSET offset) {
    const char* from = x.start + (inside ? offset : 0);
    if constexpr (ALIGNED) return *reinterpret_cast<const Vector<T, VECTOR>*>(from);
    Vector<T, VECTOR> found;
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) found.at[i] = reinterpret_cast<const T*>(from)[i];
    return found;
}

template <bool ALIGNED, class T>
__device__ inline void write(const Tensor& y, OFFSET offset, const Vector<T, VECTOR>& x) {
    char* to = y.start + offset;
    if constexpr (ALIGNED)
        *reinterpret_cast<Vector<T, VECTOR>*>(to) = x;
    else
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) reinterpret_cast<T*>(to)[i] = x.at[i];
}

template <bool ALIGNED>
__device__ inline void write_numbers(const Tensor& y, OFFSET offset, const Number (&x)[VECTOR]) {
    Vector<ELEMENT, VECTOR> rounded;
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) rounded.at[i] = narrowed<ELEMENT>(x[i]);
    write<ALIGNED>(y, offset, rounded);
}

// The part of a thread: an item, its first channel, and the place of an element or a block along each axis.
struct Element {
    OFFSET n, c;
    i32 place[AXES];

    __device__ Element(const Arguments& a, const i64 (&extents)[AXES], INDEX number) {
        const INDEX parts = static_cast<INDEX>(a.channels) / VECTOR;
        INDEX above = number / parts;
        c = static_cast<OFFSET>(number - above * parts) * VECTOR;
#pragma unroll
        for (int axis = AXES - 1; axis >= 0; --axis) {
            const INDEX extent = static_cast<INDEX>(extents[axis]), next = above / extent;
            place[axis] = static_cast<i32>(above - next * extent);
            above = next;
        }
        n = static_cast<OFFSET>(above);
    }
};

// A tap of the window at a position: its place, and whether that is inside.
struct Tap {
    i32 at[AXES];
    bool inside;

    __device__ Tap(const Arguments& a, const i32 (&position)[AXES], int number) : inside(number < TAPS) {
#pragma unroll
        for (int axis = AXES - 1; axis >= 0; --axis) {
            const int tap = number % kernel_of(axis);
            number /= kernel_of(axis);
            at[axis] = position[axis] * stride_of(axis) - low_of(axis) + tap * dilation_of(axis);
            inside = inside && at[axis] >= 0 && at[axis] < static_cast<i32>(a.extents[axis]);
        }
    }
};

// A window that may have taps on a block of elements: in the order of positions, `before` windows before the last.
struct Over {
    i32 at[AXES], before[AXES];
    bool inside;

    __device__ Over(const Arguments& a, const Element& block, int number) : inside(number < WINDOWS) {
#pragma unroll
        for (int axis = AXES - 1; axis >= 0; --axis) {
            before[axis] = windows_of(axis) - 1 - number % windows_of(axis);
            number /= windows_of(axis);
            at[axis] = block.place[axis] + first_of(axis) - before[axis];
            inside = inside && at[axis] >= 0 && at[axis] < static_cast<i32>(a.positions[axis]);
        }
    }
};

// An element of a block: its place, and whether that is inside.
struct Member {
    i32 at[AXES], behind[AXES];  // behind: from the block's first one
    bool inside;

    __device__ Member(const Arguments& a, const Element& block, int number) : inside(true) {
#pragma unroll
        for (int axis = AXES - 1; axis >= 0; --axis) {
            behind[axis] = number % stride_of(axis);
            number /= stride_of(axis);
            at[axis] = (block.place[axis] + first_of(axis)) * stride_of(axis) + behind[axis] - low_of(axis);
            inside = inside && at[axis] >= 0 && at[axis] < static_cast<i32>(a.extents[axis]);
        }
    }

    // The number of the tap that a window has on it; -1: none.
    __device__ int tap_of(const Over& window) const {
        int tap = 0;
        bool found = true;
#pragma unroll
        for (int axis = 0; axis < AXES; ++axis) {
            const int apart = behind[axis] + window.before[axis] * stride_of(axis);
            tap = tap * kernel_of(axis) + apart / dilation_of(axis);
            found = found && apart <= reach_of(axis) && apart % dilation_of(axis) == 0;
        }
        return found ? tap : -1;
    }
};

// The number of taps of a window that count for its mean, at least 1 along each axis.
__device__ inline Number counted(const Arguments& a, const i32 (&position)[AXES]) {
    i32 product = 1;
#pragma unroll
    for (int axis = 0; axis < AXES; ++axis) {
        const i32 start = position[axis] * stride_of(axis) - low_of(axis);
        const i32 before = static_cast<i32>(a.firsts[axis]) - start;
        const i32 behind = static_cast<i32>(a.lasts[axis]) - 1 - start;
        const i32 low = before > 0 ? (before + dilation_of(axis) - 1) / dilation_of(axis) : 0;
        const i32 most = behind < 0 ? -1 : behind / dilation_of(axis);
        const i32 high = most < kernel_of(axis) - 1 ? most : kernel_of(axis) - 1;
        if (high > low) product *= high - low + 1;
    }
    return static_cast<Number>(product);
}

// Calls use(number of the tap, whether it is inside, elements) for each tap of a window.
template <bool ALIGNED, class Use> __device__ inline void over_taps(const Arguments& a, const Element& own, Use use) {
    constexpr int READ = ALIGNED ? shared_out(TAPS, MOST_TAPS) : 1;
#pragma unroll 1
    for (int first = 0; first < TAPS; first += READ) {
        Vector<ELEMENT, VECTOR> found[READ];
        bool inside[READ];
#pragma unroll
        for (int k = 0; k < READ; ++k) {
            const Tap tap(a, own.place, first + k);
            inside[k] = tap.inside;
            found[k] = read<ALIGNED, ELEMENT>(a.source, tap.inside, a.source.at(own.n, own.c, tap.at));
        }
#pragma unroll
        for (int k = 0; k < READ; ++k) use(first + k, inside[k], found[k]);
    }
}

// The share of elements in a window's gradient: the largest element gets all of it.
template <bool ALIGNED> struct Won {
    static constexpr bool aligned = ALIGNED;
    Vector<ELEMENT, VECTOR> found;
    Vector<PLACE, VECTOR> places;
    bool inside;

    __device__ void read_of(const Arguments& a, const Element& block, const Over& window) {
        inside = window.inside;
        found = read<ALIGNED, ELEMENT>(a.source, inside, a.source.at(block.n, block.c, window.at));
        places = read<ALIGNED, PLACE>(a.saved, inside, a.saved.at(block.n, block.c, window.at));
    }

    __device__ void add_to(Number (&sums)[VECTOR], int tap) const {
#pragma unroll
        for (int i = 0; i < VECTOR; ++i)
            if (inside && static_cast<i32>(places.at[i]) == tap) sums[i] += widened(found.at[i]);
    }
};

// The gradient is shared among all taps that count.
template <bool ALIGNED> struct Share {
    static constexpr bool aligned = ALIGNED;
    Vector<ELEMENT, VECTOR> found;
    Number part;
    bool inside;

    __device__ void read_of(const Arguments& a, const Element& block, const Over& window) {
        inside = window.inside;
        found = read<ALIGNED, ELEMENT>(a.source, inside, a.source.at(block.n, block.c, window.at));
        part = 1 / counted(a, window.at);
    }

    __device__ void add_to(Number (&sums)[VECTOR], int) const {
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) sums[i] += inside ? widened(found.at[i]) * part : 0;
    }
};

// Writes a block's elements: for each, the sum of its shares of windows, in the order of their positions.
template <class Gift> __device__ inline void gather_gradients(const Arguments& a, const Element& block) {
    constexpr int READ = Gift::aligned ? shared_out(WINDOWS, MOST_WINDOWS) : 1;
    Gift found[READ];
    auto read_from = [&](int first) {
#pragma unroll
        for (int k = 0; k < READ; ++k) found[k].read_of(a, block, Over(a, block, first + k));
    };
    if constexpr (READ == WINDOWS) read_from(0);
#pragma unroll TOGETHER
    for (int i = 0; i < BLOCK; ++i) {
        const Member member(a, block, i);
        Number sums[VECTOR] = {};
#pragma unroll 1
        for (int first = 0; first < WINDOWS; first += READ) {
            if constexpr (READ < WINDOWS) read_from(first);
#pragma unroll
            for (int k = 0; k < READ; ++k) {
                const int tap = member.tap_of(Over(a, block, first + k));
                if (tap >= 0) found[k].add_to(sums, tap);
            }
        }
        if (member.inside) write_numbers<Gift::aligned>(a.target, a.target.at(block.n, block.c, member.at), sums);
    }
}

namespace thread {  // what one does

template <bool ALIGNED> __device__ inline void max_pool(const Arguments& a, INDEX number) {
    const Element own(a, a.positions, number);
    Number best[VECTOR];
    i32 won[VECTOR];
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) best[i] = NEUTRAL, won[i] = 0;
    over_taps<ALIGNED>(a, own, [&](int tap, bool inside, const Vector<ELEMENT, VECTOR>& elements) {
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) {
            const Number x = widened(elements.at[i]);
            const bool wins = inside && !(x <= best[i]) && best[i] == best[i];  // x is larger, or no number
            best[i] = wins ? x : best[i];
            won[i] = wins ? tap : won[i];
        }
    });
    write_numbers<ALIGNED>(a.target, a.target.at(own.n, own.c, own.place), best);
    if constexpr (SAVE) {
        Vector<PLACE, VECTOR> places;
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) places.at[i] = static_cast<PLACE>(won[i]);
        write<ALIGNED>(a.saved, a.saved.at(own.n, own.c, own.place), places);
    }
}

template <bool ALIGNED> __device__ inline void max_pool_grad(const Arguments& a, INDEX number) {
    const Element block(a, a.blocks, number);
    gather_gradients<Won<ALIGNED>>(a, block);
}

template <bool ALIGNED> __device__ inline void avg_pool(const Arguments& a, INDEX number) {
    const Element own(a, a.positions, number);
    Number sums[VECTOR] = {};
    over_taps<ALIGNED>(a, own, [&](int, bool inside, const Vector<ELEMENT, VECTOR>& elements) {
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) sums[i] += inside ? widened(elements.at[i]) : 0;
    });
    const Number taps = counted(a, own.place);
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) sums[i] /= taps;
    write_numbers<ALIGNED>(a.target, a.target.at(own.n, own.c, own.place), sums);
}

template <bool ALIGNED> __device__ inline void avg_pool_grad(const Arguments& a, INDEX number) {
    const Element block(a, a.blocks, number);
    gather_gradients<Share<ALIGNED>>(a, block);
}

}  // namespace thread

__device__ inline bool are_aligned(const Arguments& a) {
    return VECTOR == 1 || (is_aligned<ELEMENT, VECTOR>(a.source.start) && is_aligned<ELEMENT, VECTOR>(a.target.start) &&
                           is_aligned<PLACE, VECTOR>(a.saved.start));
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) ENTRY(const Arguments a) {
    const INDEX number = static_cast<INDEX>(blockIdx.x) * THREADS + threadIdx.x;
    if (number >= static_cast<INDEX>(a.count)) return;
    if (are_aligned(a))
        thread::ENTRY<true>(a, number);
    else
        thread::ENTRY<false>(a, number);
}
