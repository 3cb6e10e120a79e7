// Normalisation of rows, and its gradients.
//
// CENTRED: the mean is taken away first. SCALED and BIASED: there are such parameters, of type PARAMETER. Each thread
// writes only elements of a row that it alone reads, after the row's sums: results may take the bytes of x or g.
#include "rows.cuh"

constexpr int COLUMNS = 32, LANES = THREADS / COLUMNS;

struct Arguments {
    i64 rows, width, rows_a_part;
    double epsilon;
    Rows x, g, result;
    Line scale, bias;
    Number* mean;       // a number a row
    Number* deviation;  // 1 / deviation
    Number* sums;       // [parts, 2, width]: of g · normalised, and of g
};

extern "C" __global__ void __launch_bounds__(THREADS) row_norm(const Arguments a) {
    __shared__ Number shared[THREADS / WARP];
    const i64 row = row_of_team();
    const i64 width = row < a.rows ? a.width : 0;
    const int lane = lane_of_team();
    const Line x = a.x.line(width ? row : 0), y = a.result.line(width ? row : 0);
    const Number count = static_cast<Number>(a.width);
    Number mean = 0, squares = 0;
    if constexpr (CENTRED) {
        for (i64 i = lane; i < width; i += TEAM) mean += x.read<ELEMENT>(i);
        mean = combined(mean, Sum(), shared) / count;
    }
    for (i64 i = lane; i < width; i += TEAM) {
        const Number apart = x.read<ELEMENT>(i) - mean;
        squares += apart * apart;
    }
    squares = combined(squares, Sum(), shared);
    const Number r = 1 / sqrt(squares / count + static_cast<Number>(a.epsilon));
    if (lane == 0 && width) {
        if (CENTRED) a.mean[row] = mean;
        a.deviation[row] = r;
    }
    for (i64 i = lane; i < width; i += TEAM) {
        Number found = (x.read<ELEMENT>(i) - mean) * r;
        if (SCALED) found *= static_cast<Number>(a.scale.read<PARAMETER>(i));
        if (BIASED) found += static_cast<Number>(a.bias.read<PARAMETER>(i));
        y.write<ELEMENT>(i, found);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) row_norm_grad(const Arguments a) {
    __shared__ Number shared[THREADS / WARP];
    const i64 row = row_of_team();
    const i64 width = row < a.rows ? a.width : 0;
    const int lane = lane_of_team();
    const Line x = a.x.line(width ? row : 0), g = a.g.line(width ? row : 0), y = a.result.line(width ? row : 0);
    const Number count = static_cast<Number>(a.width);
    const Number mean = CENTRED && width ? a.mean[row] : 0, r = width ? a.deviation[row] : 0;
    Number sum = 0, product = 0;
    for (i64 i = lane; i < width; i += TEAM) {
        Number h = g.read<ELEMENT>(i);
        if (SCALED) h *= static_cast<Number>(a.scale.read<PARAMETER>(i));
        sum += h;
        product += h * ((x.read<ELEMENT>(i) - mean) * r);
    }
    if (CENTRED) sum = combined(sum, Sum(), shared) / count;
    product = combined(product, Sum(), shared) / count;
    for (i64 i = lane; i < width; i += TEAM) {
        Number h = g.read<ELEMENT>(i);
        if (SCALED) h *= static_cast<Number>(a.scale.read<PARAMETER>(i));
        if (CENTRED) h -= sum;
        y.write<ELEMENT>(i, (h - (x.read<ELEMENT>(i) - mean) * r * product) * r);
    }
}

// Sums over the rows of a part (grid.y parts), a column for each of 32 threads, eight of which share it.
extern "C" __global__ void __launch_bounds__(THREADS) row_norm_columns(const Arguments a) {
    __shared__ Number products[THREADS], sums[THREADS];
    const i64 column = static_cast<i64>(blockIdx.x) * COLUMNS + threadIdx.x % COLUMNS;
    const int lane = threadIdx.x / COLUMNS;
    const i64 end = (blockIdx.y + 1) * a.rows_a_part, last = column < a.width ? (end < a.rows ? end : a.rows) : 0;
    Number product = 0, sum = 0;
#pragma unroll 4
    for (i64 row = blockIdx.y * a.rows_a_part + lane; row < last; row += LANES) {
        const Number mean = CENTRED ? a.mean[row] : 0, g = a.g.line(row).read<ELEMENT>(column);
        product += g * ((a.x.line(row).read<ELEMENT>(column) - mean) * a.deviation[row]);
        sum += g;
    }
    products[threadIdx.x] = product;
    sums[threadIdx.x] = sum;
    __syncthreads();
    if (lane || column >= a.width) return;
    for (int i = 1; i < LANES; ++i) {
        product += products[threadIdx.x + i * COLUMNS];
        sum += sums[threadIdx.x + i * COLUMNS];
    }
    Number* found = a.sums + static_cast<i64>(blockIdx.y) * 2 * a.width;
    found[column] = product;
    found[a.width + column] = sum;
}
