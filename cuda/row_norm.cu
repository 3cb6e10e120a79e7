// Normalisation of rows, and its gradients.
//
// CENTRED: the mean is taken away first. SCALED and BIASED: there are such parameters, of type PARAMETER. Each thread
// writes only elements of a row that it alone reads, after the row's sums: results may take the bytes of x or g.
#include "rows.cuh"

constexpr int ACROSS = 32, LANES = THREADS / ACROSS;  // where rows are summed: threads for columns, and for rows

struct Arguments {
    i64 rows, width, rows_a_part;
    double epsilon;
    Rows x, g, result;
    Line scale, bias;
    Number* mean;       // a number a row
    Number* deviation;  // 1 / deviation
    Number* sums;       // [parts, 2, width]: of g · normalised, and of g
};

// Elements of a row times a parameter, where there is one.
__device__ inline void scale_by(Vector<Number, VECTOR>& numbers, const Arguments& a, i64 i) {
    if constexpr (SCALED) {
        const auto scale = a.scale.stretch<PARAMETER>(i, a.width);
#pragma unroll
        for (int k = 0; k < VECTOR; ++k) numbers.at[k] *= static_cast<Number>(scale.at[k]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) row_norm(const Arguments a) {
    __shared__ Number shared[THREADS / WARP];
    const i64 row = row_of_team();
    const i64 width = row < a.rows ? a.width : 0;
    const Line x = a.x.line(width ? row : 0), y = a.result.line(width ? row : 0);
    const Number count = static_cast<Number>(a.width);
    Number mean = 0, squares = 0;
    if constexpr (CENTRED) {
        for (i64 i = first_of_lane(); i < width; i += STRIDE) {
            const auto here = x.stretch<ELEMENT>(i, width);
#pragma unroll
            for (int k = 0; k < VECTOR; ++k) mean += here.at[k];
        }
        mean = combined(mean, Sum(), shared) / count;
    }
    for (i64 i = first_of_lane(); i < width; i += STRIDE) {
        const auto here = x.stretch<ELEMENT>(i, width);
#pragma unroll
        for (int k = 0; k < VECTOR; ++k) {
            const Number apart = here.at[k] - mean;
            if (i + k < width) squares += apart * apart;
        }
    }
    squares = combined(squares, Sum(), shared);
    const Number r = 1 / sqrt(squares / count + static_cast<Number>(a.epsilon));
    if (first_of_lane() == 0 && width) {
        if (CENTRED) a.mean[row] = mean;
        a.deviation[row] = r;
    }
    for (i64 i = first_of_lane(); i < width; i += STRIDE) {
        auto found = x.stretch<ELEMENT>(i, width);
#pragma unroll
        for (int k = 0; k < VECTOR; ++k) found.at[k] = (found.at[k] - mean) * r;
        scale_by(found, a, i);
        if constexpr (BIASED) {
            const auto bias = a.bias.stretch<PARAMETER>(i, width);
#pragma unroll
            for (int k = 0; k < VECTOR; ++k) found.at[k] += static_cast<Number>(bias.at[k]);
        }
        y.write_stretch<ELEMENT>(i, found, width);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) row_norm_grad(const Arguments a) {
    __shared__ Number shared[THREADS / WARP];
    const i64 row = row_of_team();
    const i64 width = row < a.rows ? a.width : 0;
    const Line x = a.x.line(width ? row : 0), g = a.g.line(width ? row : 0), y = a.result.line(width ? row : 0);
    const Number count = static_cast<Number>(a.width);
    const Number mean = CENTRED && width ? a.mean[row] : 0, r = width ? a.deviation[row] : 0;
    Number sum = 0, product = 0;
    for (i64 i = first_of_lane(); i < width; i += STRIDE) {
        const auto here = x.stretch<ELEMENT>(i, width);
        auto h = g.stretch<ELEMENT>(i, width);
        scale_by(h, a, i);
#pragma unroll
        for (int k = 0; k < VECTOR; ++k) {
            sum += h.at[k];
            product += h.at[k] * ((here.at[k] - mean) * r);
        }
    }
    if (CENTRED) sum = combined(sum, Sum(), shared) / count;
    product = combined(product, Sum(), shared) / count;
    for (i64 i = first_of_lane(); i < width; i += STRIDE) {
        const auto here = x.stretch<ELEMENT>(i, width);
        auto h = g.stretch<ELEMENT>(i, width);
        scale_by(h, a, i);
#pragma unroll
        for (int k = 0; k < VECTOR; ++k) {
            if (CENTRED) h.at[k] -= sum;
            h.at[k] = (h.at[k] - (here.at[k] - mean) * r * product) * r;
        }
        y.write_stretch<ELEMENT>(i, h, width);
    }
}

// Sums over the rows of a part (grid.y parts): threads across have VECTOR columns each, and eight share them.
extern "C" __global__ void __launch_bounds__(THREADS, 2) row_norm_columns(const Arguments a) {
    __shared__ Number products[VECTOR][THREADS], sums[VECTOR][THREADS];
    const i64 column = (static_cast<i64>(blockIdx.x) * ACROSS + threadIdx.x % ACROSS) * VECTOR;
    const int lane = threadIdx.x / ACROSS;
    const i64 end = (blockIdx.y + 1) * a.rows_a_part, last = column < a.width ? (end < a.rows ? end : a.rows) : 0;
    Number product[VECTOR] = {}, sum[VECTOR] = {};
#pragma unroll 2
    for (i64 row = blockIdx.y * a.rows_a_part + lane; row < last; row += LANES) {
        const Number mean = CENTRED ? a.mean[row] : 0, r = a.deviation[row];
        const auto there = a.g.line(row).stretch<ELEMENT>(column, a.width);
        const auto here = a.x.line(row).stretch<ELEMENT>(column, a.width);
#pragma unroll
        for (int k = 0; k < VECTOR; ++k) {
            product[k] += there.at[k] * ((here.at[k] - mean) * r);
            sum[k] += there.at[k];
        }
    }
#pragma unroll
    for (int k = 0; k < VECTOR; ++k) {
        products[k][threadIdx.x] = product[k];
        sums[k][threadIdx.x] = sum[k];
    }
    __syncthreads();
    if (lane) return;
    Number* found = a.sums + static_cast<i64>(blockIdx.y) * 2 * a.width;
#pragma unroll
    for (int k = 0; k < VECTOR; ++k) {
        for (int i = 1; i < LANES; ++i) {
            product[k] += products[k][threadIdx.x + i * ACROSS];
            sum[k] += sums[k][threadIdx.x + i * ACROSS];
        }
        if (column + k >= a.width) continue;
        found[column + k] = product[k];
        found[a.width + column + k] = sum[k];
    }
}
