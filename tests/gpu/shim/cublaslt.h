// cuBLASLt's header without what else of CUDA it includes: a C++ compiler needs the headers of its wheel alone.
#pragma once
#include <cstddef>
#define __DRIVER_TYPES_H__
#define CU_COMPLEX_H_
#define __CUDA_FP16_H__
#define __CUDA_BF16_H__
typedef struct CUstream_st *cudaStream_t;
struct cuComplex;
struct cuDoubleComplex;
struct __half;
struct __nv_bfloat16;
#include <cublasLt.h>
