// A copy between tensors whose elements lie side by side along different axes: through shared memory, tile by tile.
//
// `across` is the axis along which the source's elements lie side by side, `down` that of the target's. ELEMENT is a
// word of an element's size; TILE elements along both axes, ROWS of them at a time; RANK other axes. A thread reads its
// whole part of a tile before it stores the first element.
#include "types.cuh"

// GAP: elements behind a row of a tile, so that those of a column lie in different banks of shared memory.
constexpr int EACH = TILE / ROWS, GAP = sizeof(ELEMENT) < 4 ? 4 / sizeof(ELEMENT) : 1;

struct Arguments {
    const char* source;
    char* target;
    i64 across, down;                  // extents
    i64 source_step, target_step;      // bytes: of the source along `down`, of the target along `across`
    i64 tiles_across, tiles_down;
    i64 extents[RANK], source_strides[RANK], target_strides[RANK];
};

__device__ inline int at_most(int most, i64 count) { return count < most ? static_cast<int>(count) : most; }

extern "C" __global__ void __launch_bounds__(TILE * ROWS) transpose(const Arguments a) {
    __shared__ ELEMENT tile[TILE][TILE + GAP];
    u32 block = blockIdx.x;
    const u32 tiles_across = static_cast<u32>(a.tiles_across), tiles_down = static_cast<u32>(a.tiles_down);
    const i64 first_across = static_cast<i64>(block % tiles_across) * TILE;
    block /= tiles_across;
    const i64 first_down = static_cast<i64>(block % tiles_down) * TILE;
    block /= tiles_down;
    const char* source = a.source;
    char* target = a.target;
#pragma unroll
    for (int axis = RANK - 1; axis >= 0; --axis) {
        const u32 extent = static_cast<u32>(a.extents[axis]), above = block / extent;
        source += static_cast<i64>(block - above * extent) * a.source_strides[axis];
        target += static_cast<i64>(block - above * extent) * a.target_strides[axis];
        block = above;
    }
    const int lane = threadIdx.x % TILE, row = threadIdx.x / TILE;
    const int rows = first_across + lane < a.across ? at_most(TILE, a.down - first_down - row) : 0;
    const int columns = first_down + lane < a.down ? at_most(TILE, a.across - first_across - row) : 0;
    source += (first_down + row) * a.source_step + (first_across + lane) * static_cast<i64>(sizeof(ELEMENT));
    target += (first_across + row) * a.target_step + (first_down + lane) * static_cast<i64>(sizeof(ELEMENT));
    ELEMENT found[EACH] = {};
#pragma unroll
    for (int k = 0; k < EACH; ++k, source += ROWS * a.source_step)
        if (k * ROWS < rows) found[k] = *reinterpret_cast<const ELEMENT*>(source);
#pragma unroll
    for (int k = 0; k < EACH; ++k) tile[row + k * ROWS][lane] = found[k];
    __syncthreads();
#pragma unroll
    for (int k = 0; k < EACH; ++k) found[k] = tile[lane][row + k * ROWS];
#pragma unroll
    for (int k = 0; k < EACH; ++k, target += ROWS * a.target_step)
        if (k * ROWS < columns) *reinterpret_cast<ELEMENT*>(target) = found[k];
}
