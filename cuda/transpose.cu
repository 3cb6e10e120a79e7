// A copy between tensors whose elements lie side by side along different axes: through shared memory, tile by tile.
//
// `across` is the axis along which the source's elements lie side by side, `down` that of the target's. ELEMENT is a
// word as long as an element; TILE elements along both axes, ROWS of them at a time; RANK other axes.
#include "types.cuh"

struct Arguments {
    const char* source;
    char* target;
    i64 across, down;                  // extents
    i64 source_step, target_step;      // bytes: of the source along `down`, of the target along `across`
    i64 tiles_across, tiles_down;
    i64 extents[RANK], source_strides[RANK], target_strides[RANK];
};

extern "C" __global__ void __launch_bounds__(TILE * ROWS) transpose(const Arguments a) {
    __shared__ ELEMENT tile[TILE][TILE + 1];
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
    if (first_across + lane < a.across)
        for (int i = row; i < TILE && first_down + i < a.down; i += ROWS)
            tile[i][lane] = *reinterpret_cast<const ELEMENT*>(
                source + (first_down + i) * a.source_step + (first_across + lane) * static_cast<i64>(sizeof(ELEMENT)));
    __syncthreads();
    if (first_down + lane < a.down)
        for (int i = row; i < TILE && first_across + i < a.across; i += ROWS)
            *reinterpret_cast<ELEMENT*>(target + (first_across + i) * a.target_step +
                                        (first_down + lane) * static_cast<i64>(sizeof(ELEMENT))) = tile[lane][i];
}
