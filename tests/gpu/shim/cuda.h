// Stands in for CUDA: the kernels of cuda/ compiled by a C++ compiler run on the CPU, thread after thread.
//
// A thread that waits (at a barrier, or for its warp) is left on its own stack, and the next one runs; a thread that
// never waits costs no more than a call. Blocks run one after the other; shared memory is poisoned before each.
// Threads of a block run in order or in reverse, so that code which needs one order gives two results. Threads that
// wait at different places, or that wait while others have returned, are an error.
#pragma once
#define FOREPLAN_SHIM

#include <math.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <utility>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __restrict__
#define SHIM_TEXT_OF(x) #x
#define SHIM_TEXT(x) SHIM_TEXT_OF(x)
#define __shared__ static __attribute__((section("shared_" SHIM_TEXT(SHIM_UNIT))))

struct dim3 {
    unsigned x, y, z;
};
struct float4 {
    float x, y, z, w;
};

static dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace shim {

constexpr int WARP = 32, MOST_THREADS = 1024, STACK = 1 << 17;
enum State { FRESH, READY, AT_BARRIER, AT_WARP, DONE };

struct Thread {
    State state;
    int site;          // source line where it waits
    unsigned shuffles;  // so far
    jmp_buf at;
};

static Thread threads[MOST_THREADS];
static uint64_t words[2][MOST_THREADS];  // what shuffles exchange, in turn
static int count, current, next_fresh, fibers;
static bool reverse;
static char* stacks;
static ucontext_t start_of_fiber, scheduler_context;
static jmp_buf scheduler;
static void (*body)(void*);
static void* body_arguments;
static char *shared_memory, *shared_memory_end;
static char failure[200];

inline int nth(int i) { return reverse ? count - 1 - i : i; }

inline void become(int thread) {
    current = thread;
    threadIdx = dim3{thread % blockDim.x, thread / blockDim.x % blockDim.y, thread / (blockDim.x * blockDim.y)};
}

// A fiber runs fresh threads, one after the other, until one of them waits; then the scheduler goes on with another.
// One that has waited goes on when all have begun, and so is the last on its stack.
inline void run_fresh() {
    while (next_fresh < count) {
        become(nth(next_fresh++));
        body(body_arguments);
        threads[current].state = DONE;
    }
    _longjmp(scheduler, 1);
}

inline void wait(State state, int site) {
    Thread& self = threads[current];
    self.state = state;
    self.site = site;
    const int me = current;
    if (_setjmp(self.at) == 0) _longjmp(scheduler, 1);
    become(me);
}

inline void resume_fresh() {
    if (_setjmp(scheduler)) return;
    getcontext(&start_of_fiber);
    start_of_fiber.uc_stack.ss_sp = stacks + static_cast<size_t>(fibers++) * STACK;
    start_of_fiber.uc_stack.ss_size = STACK;
    start_of_fiber.uc_link = &scheduler_context;
    makecontext(&start_of_fiber, run_fresh, 0);
    setcontext(&start_of_fiber);
}

inline void resume(Thread& thread) {
    thread.state = READY;
    if (_setjmp(scheduler)) return;
    _longjmp(thread.at, 1);
}

// Whether all threads of [first, last) wait in one way at one place.
inline bool all_wait(int first, int last, State state) {
    for (int i = first; i < last; ++i)
        if (threads[i].state != state || threads[i].site != threads[first].site) return false;
    return true;
}

inline bool release() {
    bool any = false;
    for (int first = 0; first < count; first += WARP) {
        const int last = first + WARP < count ? first + WARP : count;
        if (!all_wait(first, last, AT_WARP)) continue;
        for (int i = first; i < last; ++i) threads[i].state = READY;
        any = true;
    }
    if (!any && all_wait(0, count, AT_BARRIER)) {
        for (int i = 0; i < count; ++i) threads[i].state = READY;
        any = true;
    }
    return any;
}

inline bool run_block() {
    if (shared_memory) memset(shared_memory, 0xff, shared_memory_end - shared_memory);
    for (int i = 0; i < count; ++i) threads[i].state = FRESH, threads[i].site = 0, threads[i].shuffles = 0;
    next_fresh = fibers = 0;
    while (next_fresh < count) resume_fresh();
    for (;;) {
        int done = 0;
        for (int i = 0; i < count; ++i) done += threads[i].state == DONE;
        if (done == count) return true;
        if (!release()) {
            int waits = 0;
            while (threads[waits].state == DONE) ++waits;
            snprintf(failure, sizeof failure, "block (%u, %u, %u): thread %d waits at line %d, and others do not",
                     blockIdx.x, blockIdx.y, blockIdx.z, waits, threads[waits].site);
            return false;
        }
        for (int i = 0; i < count; ++i)
            if (threads[nth(i)].state == READY) resume(threads[nth(i)]);
    }
}

inline const char* run(const unsigned* grid, const unsigned* block, int reversed, void (*f)(void*), void* arguments) {
    if (!stacks)
        stacks = static_cast<char*>(mmap(nullptr, static_cast<size_t>(MOST_THREADS) * STACK, PROT_READ | PROT_WRITE,
                                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    gridDim = dim3{grid[0], grid[1], grid[2]};
    blockDim = dim3{block[0], block[1], block[2]};
    count = static_cast<int>(block[0] * block[1] * block[2]);
    if (count < 1 || count > MOST_THREADS) return "a block has from 1 to 1024 threads";
    reverse = reversed;
    body = f;
    body_arguments = arguments;
    const uint64_t blocks = static_cast<uint64_t>(grid[0]) * grid[1] * grid[2];
    for (uint64_t i = 0; i < blocks; ++i) {
        const uint64_t b = reverse ? blocks - 1 - i : i;
        blockIdx = dim3{static_cast<unsigned>(b % grid[0]), static_cast<unsigned>(b / grid[0] % grid[1]),
                        static_cast<unsigned>(b / grid[0] / grid[1])};
        if (!run_block()) return failure;
    }
    return nullptr;
}

template <class T> T shuffle(T value, int from, int site) {
    static_assert(sizeof(T) <= 8, "a shuffle takes eight bytes at most");
    Thread& self = threads[current];
    uint64_t* slots = words[self.shuffles++ % 2];
    memcpy(&slots[current], &value, sizeof(T));
    wait(AT_WARP, site);
    const int first = current / WARP * WARP, other = first + from;
    if (from < 0 || from >= WARP || other >= count) return value;
    T found;
    memcpy(&found, &slots[other], sizeof(T));
    return found;
}

inline unsigned ballot(bool predicate, int site) {
    Thread& self = threads[current];
    uint64_t* slots = words[self.shuffles++ % 2];
    slots[current] = predicate;
    wait(AT_WARP, site);
    const int first = current / WARP * WARP;
    unsigned found = 0;
    for (int i = 0; i < WARP && first + i < count; ++i) found |= static_cast<unsigned>(slots[first + i]) << i;
    return found;
}

// A matrix that a warp holds together: what each lane gives of it, side by side; T has eight bytes at most.
template <class T, int N> struct Exchanged {
    T of_lane[WARP][N];
};
static uint64_t given[2][MOST_THREADS][6];

template <class T, int N> Exchanged<T, N> exchanged(const T (&own)[N], int site) {
    static_assert(sizeof(T) <= 8 && N <= 6, "no lane gives more");
    auto& slots = given[threads[current].shuffles++ % 2];
    memcpy(slots[current], own, sizeof own);
    wait(AT_WARP, site);
    Exchanged<T, N> found;
    const int first = current / WARP * WARP;
    for (int i = 0; i < WARP; ++i) memcpy(found.of_lane[i], slots[first + i], sizeof own);
    return found;
}

template <class A> const char* call(void (*kernel)(A), const unsigned* grid, const unsigned* block, int reversed,
                                    const void* arguments) {
    struct Bound {
        void (*kernel)(A);
        const void* arguments;
    } bound{kernel, arguments};
    return run(grid, block, reversed, [](void* b) {
        const Bound& bound = *static_cast<Bound*>(b);
        bound.kernel(*static_cast<const A*>(bound.arguments));
    }, &bound);
}

template <class A> constexpr size_t size_of_arguments(void (*)(A)) { return sizeof(A); }

}  // namespace shim

// What a test calls for a kernel of a unit. A unit is a namespace whose shared memory lies in a section of its own.
#define SHIM_ENTRY(unit, name)                                                                                     \
    extern "C" {                                                                                                   \
    __attribute__((weak, visibility("hidden"))) extern char __start_shared_##unit[], __stop_shared_##unit[];       \
    const char* shim_run_##unit##_##name(const unsigned* grid, const unsigned* block, int reversed, const void* a) { \
        shim::shared_memory = __start_shared_##unit, shim::shared_memory_end = __stop_shared_##unit;               \
        return shim::call(unit::name, grid, block, reversed, a);                                                   \
    }                                                                                                              \
    uint64_t shim_size_##unit##_##name() { return shim::size_of_arguments(unit::name); }                           \
    }

// A clock that has gone on by an hour at each look, for kernels that wait.
inline long long clock64() {
    static long long ticks = 0;
    return ticks += 1LL << 43;
}

#define __syncthreads() shim::wait(shim::AT_BARRIER, __LINE__)
#define __syncwarp(...) shim::wait(shim::AT_WARP, __LINE__)
#define __shfl_xor_sync(mask, value, lanes) shim::shuffle(value, (shim::current % shim::WARP) ^ (lanes), __LINE__)
#define __shfl_down_sync(mask, value, lanes) shim::shuffle(value, shim::current % shim::WARP + (lanes), __LINE__)
#define __shfl_sync(mask, value, lane) shim::shuffle(value, lane, __LINE__)
#define __ballot_sync(mask, predicate) shim::ballot(predicate, __LINE__)

inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
template <class T> inline T __ldg(const T* place) { return *place; }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<uint64_t>(a) * b >> 32; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline float sinpif(float x) { return static_cast<float>(sin(M_PI * x)); }
inline float cospif(float x) { return static_cast<float>(cos(M_PI * x)); }
inline double sinpi(double x) { return sin(M_PI * x); }
inline double cospi(double x) { return cos(M_PI * x); }
inline float __int_as_float(int bits) { float x; memcpy(&x, &bits, 4); return x; }
inline float __uint_as_float(unsigned bits) { float x; memcpy(&x, &bits, 4); return x; }
inline unsigned __float_as_uint(float x) { unsigned bits; memcpy(&bits, &x, 4); return bits; }
template <class T> inline T atomicAdd(T* place, T value) { T old = *place; *place += value; return old; }
template <class T> inline T atomicMin(T* place, T value) { T old = *place; *place = value < old ? value : old; return old; }
template <class T> inline T atomicMax(T* place, T value) { T old = *place; *place = value > old ? value : old; return old; }

inline float fast_exponential(float x) { return exp2f(x * 1.44269504f); }

// Copies that a card makes while a thread computes; here they are made at once.
inline void send_16_bytes(float* to, const void* from, bool inside) { inside ? memcpy(to, from, 16) : memset(to, 0, 16); }
inline void send_4_bytes(float* to, const void* from, bool inside) { inside ? memcpy(to, from, 4) : memset(to, 0, 4); }
inline void wait_for_sent() {}

// Tensor cores: they see no more of a factor than the upper 19 bits.
inline float seen_as_tf32(float x) { return __uint_as_float(__float_as_uint(x) & ~0x1fffu); }
inline float rounded_to_tf32(float x) {
    if (x != x || x - x != 0) return x;
    return __uint_as_float(__float_as_uint(x) + 0x1000u & ~0x1fffu);
}
inline void multiply_tf32(float (&sums)[4], const float (&a)[4], float b0, float b1) {
    const float own[6] = {a[0], a[1], a[2], a[3], b0, b1};
    const auto all = shim::exchanged(own, __LINE__);
    const int lane = shim::current % shim::WARP, g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; ++i)
        for (int k = 0; k < 8; ++k)
            sums[i] += seen_as_tf32(all.of_lane[g * 4 + k % 4][k / 4 * 2 + i / 2]) *
                       seen_as_tf32(all.of_lane[(2 * t + i % 2) * 4 + k % 4][4 + k / 4]);
}
inline void load_matrices(float (&found)[4], const float* row) {
    const float* const own[1] = {row};
    const auto all = shim::exchanged(own, __LINE__);
    const int lane = shim::current % shim::WARP;
    for (int i = 0; i < 4; ++i) found[i] = all.of_lane[i * 8 + lane / 4][0][lane % 4];
}

inline float float_of_half(unsigned short bits) { _Float16 x; memcpy(&x, &bits, 2); return static_cast<float>(x); }
inline unsigned short half_of_double(double value) {
    const _Float16 x = static_cast<_Float16>(value);
    unsigned short bits;
    memcpy(&bits, &x, 2);
    return bits;
}
inline unsigned short half_of_float(float value) { return half_of_double(value); }
inline unsigned short bfloat_of_float(float value) {
    const unsigned bits = __float_as_uint(value);
    if (value != value) return static_cast<unsigned short>(bits >> 16 | 0x40);
    return static_cast<unsigned short>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline float rounded_to_bfloat(float x) { return __uint_as_float(static_cast<unsigned>(bfloat_of_float(x)) << 16); }
