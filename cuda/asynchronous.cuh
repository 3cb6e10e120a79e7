// Copies from global to shared memory that go on while a thread computes, on cards that have them.
#pragma once
#include "types.cuh"

// The shared memory that a launch gives.
#ifdef FOREPLAN_SHIM  // which also has the copies
#define DYNAMIC_SHARED(name) alignas(16) __shared__ float name[SHARED_FLOATS]
#else
#define DYNAMIC_SHARED(name) extern __shared__ __align__(16) float name[]

template <int NBYTES> __device__ inline void send_bytes(float* to, const void* from, bool inside) {
#if __CUDA_ARCH__ >= 800
    const u32 place = static_cast<u32>(__cvta_generic_to_shared(to)), count = inside ? NBYTES : 0;
    if constexpr (NBYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(place), "l"(from), "r"(count) : "memory");
    else asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(place), "l"(from), "r"(count) : "memory");
#else
    typedef Vector<float, NBYTES / 4> Several;
    *reinterpret_cast<Several*>(to) = inside ? *static_cast<const Several*>(from) : Several{};
#endif
}

// 16 bytes, or 4, from an aligned place; zeros if they are not inside. The place must be there even so.
__device__ inline void send_16_bytes(float* to, const void* from, bool inside) { send_bytes<16>(to, from, inside); }
__device__ inline void send_4_bytes(float* to, const void* from, bool inside) { send_bytes<4>(to, from, inside); }

// Waits for all that the thread itself has sent.
__device__ inline void wait_for_sent() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}
#endif
