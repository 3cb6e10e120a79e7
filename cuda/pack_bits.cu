// A condition at each element, eight to a byte.
//
// A thread makes one byte. RANK axes in the order of the bits, neighbours merged; ELEMENT is the tensor's type;
// `condition` is generated. INDEX holds the number of elements.
#include "scalar.cuh"

struct Arguments {
    i64 bytes;
    const char* source;
    u8* bits;
    i64 extents[RANK], strides[RANK];  // bytes
};

__device__ inline bool condition(Wide<ELEMENT> a0);

extern "C" __global__ void __launch_bounds__(256) pack_bits(const Arguments a) {
    const INDEX byte = static_cast<INDEX>(blockIdx.x) * 256 + threadIdx.x;
    if (byte >= static_cast<INDEX>(a.bytes)) return;
    Vector<ELEMENT, 8> found;
    if (RANK == 1 && a.strides[0] == sizeof(ELEMENT)) {
        found = load<ELEMENT, 8>(a.source + static_cast<i64>(byte) * 8 * sizeof(ELEMENT));
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            INDEX left = byte * 8 + i;
            i64 offset = 0;
#pragma unroll
            for (int axis = RANK - 1; axis >= 0; --axis) {
                const INDEX extent = static_cast<INDEX>(a.extents[axis]), above = left / extent;
                offset += static_cast<i64>(left - above * extent) * a.strides[axis];
                left = above;
            }
            found.at[i] = *reinterpret_cast<const ELEMENT*>(a.source + offset);
        }
    }
    u32 bits = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) bits |= static_cast<u32>(condition(widened(found.at[i]))) << i;
    a.bits[byte] = static_cast<u8>(bits);
}
