// Products of small matrices on tensor cores, in TensorFloat-32: factors have 10 bits of mantissa, sums are float32.
// A warp holds a matrix together. Lane 4 g + t has of a factor A (16 x 8) the elements [g][t], [g + 8][t], [g][t + 4] and
// [g + 8][t + 4]; of B (8 x 8) [t][g] and [t + 4][g]; of sums (16 x 8) [g][2 t], [g][2 t + 1], and the same of row g + 8.
// (PTX ISA, mma.m16n8k8 and ldmatrix.)
#pragma once
#include "types.cuh"

#ifndef FOREPLAN_SHIM  // which has these for a processor
__device__ inline float rounded_to_tf32(float x) {
    u32 bits;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
    return __uint_as_float(bits);
}

// sums += A B. Factors must be rounded.
__device__ inline void multiply_tf32(float (&sums)[4], const float (&a)[4], float b0, float b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])), "r"(__float_as_uint(a[3])),
          "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}

// Four matrices of 8 rows of four floats from shared memory: lane 8 m + r says where row r of matrix m begins, a multiple
// of 16 bytes, and lane 4 g + t gets [g][t] of each.
__device__ inline void load_matrices(float (&found)[4], const float* row) {
    u32 bits[4];
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(bits[0]), "=r"(bits[1]), "=r"(bits[2]), "=r"(bits[3])
                 : "r"(static_cast<u32>(__cvta_generic_to_shared(row))) : "memory");
#pragma unroll
    for (int i = 0; i < 4; ++i) found[i] = __uint_as_float(bits[i]);
}
#endif
