// Normalisation of rows, and its gradients.
// CENTRED: the mean is subtracted first. SCALED and BIASED: there are such parameters, of type PARAMETER. ADDED: the
// gradient of x is added to a tensor. WHOLE: rows are whole vectors. HELD: the vectors of each row that a thread keeps
// in registers; 0: they are too many. A thread writes only elements that no other thread reads, after the row's sums:
// results may take the bytes of x, of g or of the summand.
#include "rows.cuh"

constexpr int ACROSS = 8, LANES = THREADS / ACROSS;  // where rows are summed: threads for columns, and for rows
constexpr int COLUMNS = ACROSS * VECTOR;             // of a block
constexpr int MORE = sizeof(Number) > 4 || ADDED ? BLOCKS : 4;  // blocks of a gradient's rows

struct Arguments {
    i64 rows, width, rows_a_part;
    double epsilon;
    Rows x, g, added, result;
    Line scale, bias;
    Number* mean;       // a number a row
    Number* deviation;  // 1 / deviation
    Number* sums;       // [parts, 2, width]: of g · normalised, and of g

    // Whether the first row of everything and the parameters begin where a vector may.
    __device__ bool begin_with_vectors() const {
        const bool rows = begins<ELEMENT>(x.start) && begins<ELEMENT>(g.start) && begins<ELEMENT>(added.start);
        const bool vectors = (!SCALED || begins<PARAMETER>(scale.start)) && (!BIASED || begins<PARAMETER>(bias.start));
        return rows && vectors && begins<ELEMENT>(result.start);
    }
    template <class T> __device__ static bool begins(const void* place) { return is_aligned<T, VECTOR>(place); }
};

// A line; ALIGNED: it consists of whole vectors, which are read and written as such.
template <bool ALIGNED> struct Place {
    Line line;

    template <class T> __device__ Vector<T, VECTOR> elements(i64 i, i64 count) const {
        if constexpr (!ALIGNED || VECTOR == 1) return line.elements<T>(i, count);
        return i < count ? *reinterpret_cast<const Vector<T, VECTOR>*>(line.start + i * sizeof(T)) : Vector<T, VECTOR>{};
    }
    __device__ void write(i64 i, const Numbers& numbers, i64 count) const {
        if constexpr (!ALIGNED || VECTOR == 1) return line.write_stretch<ELEMENT>(i, numbers, count);
        Vector<ELEMENT, VECTOR> narrow;
#pragma unroll
        for (int k = 0; k < VECTOR; ++k) narrow.at[k] = narrowed<ELEMENT>(numbers.at[k]);
        if (i < count) *reinterpret_cast<Vector<ELEMENT, VECTOR>*>(line.start + i * sizeof(ELEMENT)) = narrow;
    }
};

// A thread's part of a row, MOST vectors in registers from the beginning; 0: they are read at each use.
template <int MOST> struct Held {
    Line line;
    i64 width;
    Packed<ELEMENT, VECTOR> at[MOST ? MOST : 1];

    __device__ Held(const Line& line, i64 width) : line(line), width(width) {
#pragma unroll
        for (int n = 0; n < MOST; ++n) {
            const i64 i = first_of_lane() + n * STRIDE;
            at[n].load(line.start + i * (VECTOR > 1 ? sizeof(ELEMENT) : line.step), i < width);
        }
    }
    // Their wide numbers, and parameters, would not all fit into registers.
    __device__ void forget() {
#pragma unroll
        for (int n = 0; n < MOST; ++n) at[n].forget();
    }
    // The n-th of them, which begins at the i-th element.
    __device__ Numbers numbers(int n, i64 i) const {
        if constexpr (MOST > 0) return widened(at[n].elements);
        return line.stretch<ELEMENT>(i, width);
    }
};

// Calls `each` with the number of each of a thread's vectors, and with the element that it begins at.
template <int MOST, class Each> __device__ inline void for_vectors(i64 width, Each each) {
    if constexpr (MOST > 0) {
#pragma unroll
        for (int n = 0; n < MOST; ++n) each(n, first_of_lane() + n * STRIDE);
    } else {
        for (i64 i = first_of_lane(); i < width; i += STRIDE) each(0, i);
    }
}

// Elements of a row times a parameter, where there is one.
template <int MOST> __device__ inline void scale_by(Numbers& numbers, const Arguments& a, i64 i) {
    if constexpr (SCALED) {
        const auto scale = Place<(MOST > 0)>{a.scale}.template elements<PARAMETER>(i, a.width);
#pragma unroll
        for (int k = 0; k < VECTOR; ++k) numbers.at[k] *= static_cast<Number>(widened(scale.at[k]));
    }
}

template <int MOST> __device__ inline void normalise(const Arguments& a, Number* shared) {
    const i64 row = row_of_team();
    const i64 width = row < a.rows ? a.width : 0;
    Held<MOST> x(a.x.line(width ? row : 0), width);
    const Place<(MOST > 0)> y{a.result.line(width ? row : 0)};
    const Number count = static_cast<Number>(a.width);
    Number mean = 0, squares = 0;
    if constexpr (CENTRED) {
        for_vectors<MOST>(width, [&](int n, i64 i) {
            const Numbers here = x.numbers(n, i);
#pragma unroll
            for (int k = 0; k < VECTOR; ++k) mean += here.at[k];
        });
        mean = combined(mean, Sum(), shared) / count;
        x.forget();
    }
    for_vectors<MOST>(width, [&](int n, i64 i) {
        const Numbers here = x.numbers(n, i);
#pragma unroll
        for (int k = 0; k < VECTOR; ++k) {
            const Number apart = here.at[k] - mean;
            if (i + k < width) squares += apart * apart;
        }
    });
    squares = combined(squares, Sum(), shared);
    x.forget();
    const Number r = 1 / sqrt(squares / count + static_cast<Number>(a.epsilon));
    if (first_of_lane() == 0 && width) {
        if (CENTRED) a.mean[row] = mean;
        a.deviation[row] = r;
    }
    for_vectors<MOST>(width, [&](int n, i64 i) {
        Numbers found = x.numbers(n, i);
#pragma unroll
        for (int k = 0; k < VECTOR; ++k) found.at[k] = (found.at[k] - mean) * r;
        scale_by<MOST>(found, a, i);
        if constexpr (BIASED) {
            const auto bias = Place<(MOST > 0)>{a.bias}.template elements<PARAMETER>(i, width);
#pragma unroll
            for (int k = 0; k < VECTOR; ++k) found.at[k] += static_cast<Number>(widened(bias.at[k]));
        }
        y.write(i, found, width);
    });
}

extern "C" __global__ void __launch_bounds__(THREADS, 4) row_norm(const Arguments a) {
    __shared__ Number shared[THREADS / WARP];
    if (HELD && a.begin_with_vectors()) normalise<HELD>(a, shared);
    else normalise<0>(a, shared);
}

template <int MOST> __device__ inline void differentiate(const Arguments& a, Number* shared) {
    const i64 row = row_of_team();
    const i64 width = row < a.rows ? a.width : 0;
    Held<MOST> x(a.x.line(width ? row : 0), width), g(a.g.line(width ? row : 0), width);
    const Held<MOST> added(a.added.line(width ? row : 0), ADDED ? width : 0);
    const Place<(MOST > 0)> y{a.result.line(width ? row : 0)};
    const Number count = static_cast<Number>(a.width);
    const Number mean = CENTRED && width ? a.mean[row] : 0, r = width ? a.deviation[row] : 0;
    Number sum = 0, product = 0;
    for_vectors<MOST>(width, [&](int n, i64 i) {
        const Numbers here = x.numbers(n, i);
        Numbers h = g.numbers(n, i);
        scale_by<MOST>(h, a, i);
#pragma unroll
        for (int k = 0; k < VECTOR; ++k) {
            sum += h.at[k];
            product += h.at[k] * ((here.at[k] - mean) * r);
        }
    });
    if (CENTRED) sum = combined(sum, Sum(), shared) / count;
    product = combined(product, Sum(), shared) / count;
    x.forget();
    g.forget();
    for_vectors<MOST>(width, [&](int n, i64 i) {
        const Numbers here = x.numbers(n, i);
        Numbers h = g.numbers(n, i);
        scale_by<MOST>(h, a, i);
#pragma unroll
        for (int k = 0; k < VECTOR; ++k) {
            if (CENTRED) h.at[k] -= sum;
            h.at[k] = (h.at[k] - (here.at[k] - mean) * r * product) * r;
        }
        if constexpr (ADDED) {
            const Numbers more = added.numbers(n, i);
#pragma unroll
            for (int k = 0; k < VECTOR; ++k) h.at[k] += more.at[k];
        }
        y.write(i, h, width);
    });
}

extern "C" __global__ void __launch_bounds__(THREADS, MORE) row_norm_grad(const Arguments a) {
    __shared__ Number shared[THREADS / WARP];
    if (HELD && a.begin_with_vectors()) differentiate<HELD>(a, shared);
    else differentiate<0>(a, shared);
}

// A thread's sums of its columns over every LANES-th row: of g · normalised, and of g.
template <bool ALIGNED> struct Columns {
    const Arguments& a;
    i64 column;
    Number found[2][VECTOR] = {};

    __device__ void read(Packed<ELEMENT, VECTOR>& at, const Rows& rows, i64 row) const {
        const Line line = rows.line(row);
        if constexpr (ALIGNED) at.load(line.start + column * (VECTOR > 1 ? sizeof(ELEMENT) : line.step));
        else at.elements = line.elements<ELEMENT>(column, a.width);
    }
    template <int MANY> __device__ void take(i64 row) {
        Packed<ELEMENT, VECTOR> x[MANY], g[MANY];
        Number mean[MANY], r[MANY];
#pragma unroll
        for (int n = 0; n < MANY; ++n) {
            read(g[n], a.g, row + n * LANES);
            read(x[n], a.x, row + n * LANES);
            mean[n] = CENTRED ? a.mean[row + n * LANES] : 0;
            r[n] = a.deviation[row + n * LANES];
        }
#pragma unroll
        for (int n = 0; n < MANY; ++n) {
#pragma unroll
            for (int k = 0; k < VECTOR; ++k) {
                const Number there = widened(g[n].elements.at[k]);
                found[0][k] += there * ((widened(x[n].elements.at[k]) - mean[n]) * r[n]);
                found[1][k] += there;
            }
        }
    }
    __device__ void sum(i64 row, i64 last, Number (&totals)[THREADS / WARP][2][COLUMNS]) {
        if constexpr (ALIGNED)
            for (; row + (GROUP - 1) * LANES < last; row += GROUP * LANES) take<GROUP>(row);
        for (; row < last; row += LANES) take<1>(row);
#pragma unroll
        for (int which = 0; which < 2; ++which) {
#pragma unroll
            for (int k = 0; k < VECTOR; ++k) {
                Number total = found[which][k];
#pragma unroll
                for (int lanes = ACROSS; lanes < WARP; lanes *= 2) total += __shfl_xor_sync(0xffffffffu, total, lanes);
                if (threadIdx.x % WARP < ACROSS)
                    totals[threadIdx.x / WARP][which][threadIdx.x % ACROSS * VECTOR + k] = total;
            }
        }
    }
};

// Sums over the rows of a part (grid.y parts): threads across have VECTOR columns each. Results of threads are added up
// within warps and then over warps, each number by a thread.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) row_norm_columns(const Arguments a) {
    __shared__ Number totals[THREADS / WARP][2][COLUMNS];
    const i64 first = static_cast<i64>(blockIdx.x) * COLUMNS, column = first + threadIdx.x % ACROSS * VECTOR;
    const i64 row = blockIdx.y * a.rows_a_part + threadIdx.x / ACROSS, end = (blockIdx.y + 1) * a.rows_a_part;
    const i64 last = column < a.width ? (end < a.rows ? end : a.rows) : 0;
    if (WHOLE && a.begin_with_vectors()) Columns<true>{a, column}.sum(row, last, totals);
    else Columns<false>{a, column}.sum(row, last, totals);
    __syncthreads();
    for (int i = threadIdx.x; i < 2 * COLUMNS; i += THREADS) {
        const int which = i / COLUMNS, at = i % COLUMNS;
        if (first + at >= a.width) continue;
        Number total = totals[0][which][at];
#pragma unroll
        for (int warp = 1; warp < THREADS / WARP; ++warp) total += totals[warp][which][at];
        a.sums[(2 * static_cast<i64>(blockIdx.y) + which) * a.width + first + at] = total;
    }
}
