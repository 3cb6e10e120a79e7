// Element types as they lie in memory, the types that arithmetic on them has, and rows of elements moved at a time.
#pragma once

typedef signed char i8;
typedef unsigned char u8;
typedef short i16;
typedef unsigned short u16;
typedef int i32;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

struct bfloat16 {
    u16 bits;
};

struct float16 {
    u16 bits;
};

#define INFINITE __int_as_float(0x7f800000)
#define NOT_A_NUMBER __int_as_float(0x7fc00000)

#ifndef FOREPLAN_SHIM  // which has these for a processor
__device__ inline float float_of_half(u16 bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}

__device__ inline u16 half_of_float(float x) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}

__device__ inline u16 half_of_double(double x) {
    u16 bits;
    asm("cvt.rn.f16.f64 %0, %1;" : "=h"(bits) : "d"(x));
    return bits;
}

__device__ inline u16 bfloat_of_float(float x) {
#if __CUDA_ARCH__ >= 800
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
#else
    const u32 bits = __float_as_uint(x);
    return static_cast<u16>((x != x ? bits | 0x400000 : bits + 0x7fff + (bits >> 16 & 1)) >> 16);
#endif
}

// A number rounded to bfloat16: the upper half of a pair of them is the bits of a float.
__device__ inline float rounded_to_bfloat(float x) {
#if __CUDA_ARCH__ >= 800
    u32 bits;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(x), "f"(0.0f));
    return __uint_as_float(bits);
#else
    return __uint_as_float(static_cast<u32>(bfloat_of_float(x)) << 16);
#endif
}

// e^x, within three units of the last digit near 0; what is less than any normal number is 0.
__device__ inline float fast_exponential(float x) {
    float found;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(found) : "f"(x * 1.44269504f));
    return found;
}
#endif

// The type of arithmetic on elements of type T: float for narrower ones.
template <class T> struct Wider { typedef T type; };
template <> struct Wider<bfloat16> { typedef float type; };
template <> struct Wider<float16> { typedef float type; };
template <class T> using Wide = typename Wider<T>::type;

template <class T> __device__ inline T widened(T x) { return x; }
__device__ inline float widened(bfloat16 x) { return __uint_as_float(static_cast<u32>(x.bits) << 16); }
__device__ inline float widened(float16 x) { return float_of_half(x.bits); }

// A number as an element of type T, rounded to nearest even.
template <class T> struct Narrow {
    template <class S> __device__ static T of(S x) { return static_cast<T>(x); }
};
template <> struct Narrow<bfloat16> {
    template <class S> __device__ static bfloat16 of(S x) { return bfloat16{bfloat_of_float(static_cast<float>(x))}; }
};
template <> struct Narrow<float16> {
    template <class S> __device__ static float16 of(S x) { return float16{half_of_float(static_cast<float>(x))}; }
    __device__ static float16 of(double x) { return float16{half_of_double(x)}; }  // through a float: rounded twice
};
template <class T, class S> __device__ inline T narrowed(S x) { return Narrow<T>::of(x); }

// N elements side by side, N a power of two; aligned so that they are moved 16 bytes at a time.
template <class T, int N> struct alignas(N * sizeof(T) < 16 ? N * sizeof(T) : 16) Vector {
    T at[N];
};

template <class T, int N> __device__ inline bool is_aligned(const void* place) {
    return reinterpret_cast<u64>(place) % alignof(Vector<T, N>) == 0;
}

// N elements, from an aligned place on.
template <class T, int N> __device__ inline Vector<T, N> load_vector(const void* from) {
    return *static_cast<const Vector<T, N>*>(from);
}

template <class T, int N> __device__ inline void store_vector(void* to, const Vector<T, N>& elements) {
    *static_cast<Vector<T, N>*>(to) = elements;
}

// The first `count` elements from a place on, at most N, one by one.
template <class T, int N> __device__ inline Vector<T, N> load_each(const void* from, i64 count) {
    Vector<T, N> found = {};
#pragma unroll
    for (int i = 0; i < N; ++i)
        if (i < count) found.at[i] = static_cast<const T*>(from)[i];
    return found;
}

template <class T, int N> __device__ inline void store_each(void* to, const Vector<T, N>& elements, i64 count) {
#pragma unroll
    for (int i = 0; i < N; ++i)
        if (i < count) static_cast<T*>(to)[i] = elements.at[i];
}

// Together if that is possible. A thread with several operands should check this once for all of them: else the next
// load waits for the computation on this one, before the branches meet.
template <class T, int N> __device__ inline Vector<T, N> load(const void* from, i64 count = N) {
    return count >= N && is_aligned<T, N>(from) ? load_vector<T, N>(from) : load_each<T, N>(from, count);
}

template <class T, int N> __device__ inline void store(void* to, const Vector<T, N>& elements, i64 count = N) {
    if (count >= N && is_aligned<T, N>(to)) store_vector<T, N>(to, elements);
    else store_each<T, N>(to, elements, count);
}

// N of packed bits, `step` from one to the next; of these the first `count` are there.
template <int N> __device__ inline Vector<bool, N> load_bits(const char* from, i64 first, i64 step, i64 count) {
    Vector<bool, N> found = {};
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const i64 bit = first + i * step;
        if (i < count) found.at[i] = static_cast<u8>(from[bit >> 3]) >> (bit & 7) & 1;
    }
    return found;
}

// N packed bits side by side must begin at a multiple of this to be whole bytes, or a part of one byte.
template <int N> constexpr u32 BITS_APART = N < 8 ? N : 8;

template <int N> __device__ inline Vector<bool, N> load_bits(const char* from, i64 first) {
    Vector<bool, N> found;
#pragma unroll
    for (int i = 0; i < N; i += 8) {
        const u32 bits = static_cast<u8>(from[(first + i) >> 3]) >> (first & 7);
#pragma unroll
        for (int k = i; k < N && k < i + 8; ++k) found.at[k] = bits >> (k - i) & 1;
    }
    return found;
}
