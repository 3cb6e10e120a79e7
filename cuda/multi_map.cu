// One map of many small tensors, whose elements lie side by side: a thread has an element of one of them.
// TENSORS tensors, each with OWN operands and RESULTS; all share SCALARS. A thread reads all its elements before it
// writes: a result may take the bytes of an operand of the same tensor. `compute` is generated.
#include "scalar.cuh"

struct Arguments {
    i64 blocks[TENSORS];  // of the tensors up to here
    i64 elements[TENSORS];
    char* own[TENSORS][OWN];
    char* results[TENSORS][RESULTS];
    char* scalars[SCALARS ? SCALARS : 1];
};

template <class T> __device__ inline T& element(char* of, i64 i) { return reinterpret_cast<T*>(of)[i]; }

__device__ inline void compute(const Arguments& a, int t, i64 i);

extern "C" __global__ void __launch_bounds__(128) multi_map(const __grid_constant__ Arguments a) {
    int t = 0;
    while (t < TENSORS - 1 && blockIdx.x >= a.blocks[t]) ++t;
    const i64 before = t ? a.blocks[t - 1] : 0, i = (blockIdx.x - before) * 128 + threadIdx.x;
    if (i < a.elements[t]) compute(a, t, i);
}
