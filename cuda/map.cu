// Element-wise expressions over tensors of one shape and any layout.
//
// A thread computes VECTOR neighbours along the innermost axis of the loop: it reads all its elements before it writes,
// so an output may take the bytes of an input with the same layout. Neighbouring elements move together if those of all
// operands can (WHOLE), else one by one. `compute` and `misplaced` are generated.
//
// RANK axes, neighbours merged; OPERANDS tensors, inputs first; INDEX holds the number of units.
// The second launch bound lets ptxas spend registers, so that all loads are under way before the first is waited for.
#include "scalar.cuh"

struct Operand {
    char* start;
    i64 strides[RANK];  // bytes, 0 where it is broadcast; of packed bits: bits
};

struct Arguments {
    i64 units, units_a_row;
    i64 extents[RANK];
    Operand operands[OPERANDS];
};

// An operand's elements of one unit: `offset` behind the start, `step` from one to the next.
struct Place {
    char* start;
    i64 offset, step;
};

template <class T, bool WHOLE> __device__ inline Vector<T, VECTOR> read_row(const Place& place, i64 count) {
    if constexpr (WHOLE) return load_vector<T, VECTOR>(place.start + place.offset);
    else return load_each<T, VECTOR>(place.start + place.offset, count);
}

template <class T, bool> __device__ inline Vector<T, VECTOR> read_one(const Place& place, i64 count) {
    const T one = *reinterpret_cast<const T*>(place.start + place.offset);
    Vector<T, VECTOR> found;
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) found.at[i] = one;
    return found;
}

template <class T, bool> __device__ inline Vector<T, VECTOR> read_gaps(const Place& place, i64 count) {
    Vector<T, VECTOR> found = {};
#pragma unroll
    for (int i = 0; i < VECTOR; ++i)
        if (i < count) found.at[i] = *reinterpret_cast<const T*>(place.start + place.offset + i * place.step);
    return found;
}

template <class, bool WHOLE> __device__ inline Vector<bool, VECTOR> read_bits(const Place& place, i64 count) {
    if constexpr (WHOLE) return load_bits<VECTOR>(place.start, place.offset);
    else return load_bits<VECTOR>(place.start, place.offset, 1, count);
}

template <class, bool> __device__ inline Vector<bool, VECTOR> read_scattered_bits(const Place& place, i64 count) {
    return load_bits<VECTOR>(place.start, place.offset, place.step, count);
}

template <class T, bool WHOLE>
__device__ inline void write_row(const Place& place, const Vector<T, VECTOR>& found, i64 count) {
    if constexpr (WHOLE) store_vector<T, VECTOR>(place.start + place.offset, found);
    else store_each<T, VECTOR>(place.start + place.offset, found, count);
}

template <class T, bool>
__device__ inline void write_gaps(const Place& place, const Vector<T, VECTOR>& found, i64 count) {
#pragma unroll
    for (int i = 0; i < VECTOR; ++i)
        if (i < count) *reinterpret_cast<T*>(place.start + place.offset + i * place.step) = found.at[i];
}

// The distance of a row's (or bits') beginning from a place where they could move together.
template <class T> __device__ inline u32 misplaced_row(const Place& place) {
    return static_cast<u32>(reinterpret_cast<u64>(place.start + place.offset)) % alignof(Vector<T, VECTOR>);
}

template <class> __device__ inline u32 misplaced_bits(const Place& place) {
    return static_cast<u32>(place.offset) % BITS_APART<VECTOR>;
}

// Zero if all operands can move together.
__device__ inline u32 misplaced(const Place (&at)[OPERANDS]);

template <bool WHOLE> __device__ inline void compute(const Place (&at)[OPERANDS], i64 count);

extern "C" __global__ void __launch_bounds__(256, 2) map(const Arguments a) {
    const INDEX unit = static_cast<INDEX>(blockIdx.x) * 256 + threadIdx.x;
    if (unit >= static_cast<INDEX>(a.units)) return;
    INDEX row = unit / static_cast<INDEX>(a.units_a_row);
    const i64 first = static_cast<i64>(unit - row * static_cast<INDEX>(a.units_a_row)) * VECTOR;
    Place at[OPERANDS];
#pragma unroll
    for (int k = 0; k < OPERANDS; ++k) {
        const Operand& operand = a.operands[k];
        at[k] = Place{operand.start, first * operand.strides[RANK - 1], operand.strides[RANK - 1]};
    }
#pragma unroll
    for (int axis = RANK - 2; axis >= 0; --axis) {
        const INDEX extent = static_cast<INDEX>(a.extents[axis]), above = row / extent;
        const i64 here = static_cast<i64>(row - above * extent);
#pragma unroll
        for (int k = 0; k < OPERANDS; ++k) at[k].offset += here * a.operands[k].strides[axis];
        row = above;
    }
    const i64 count = a.extents[RANK - 1] - first;
    if (VECTOR == 1 || (count >= VECTOR && misplaced(at) == 0)) compute<true>(at, VECTOR);
    else compute<false>(at, count);
}
