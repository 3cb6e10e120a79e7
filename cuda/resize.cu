// Resizing along any axes, and its gradient: each element of the result is a weighted sum of elements.
// For each place of each axis that changes, `taps` writes the places of the other tensor that it reads (the first and
// their number) and their weights; for a gradient (TRANSPOSED), the places that read it. LINES axes change; a thread
// has a place of one. MODE and ROUNDING say how an axis is resized, EXCLUDED whether places outside have weight 0,
// NORMALISED whether weights are divided by their sum. Coordinates are computed in double, like NumPy's, since they are
// rounded to places.
//
// `resize` has a thread for VECTOR neighbouring elements of the result, whose RANK axes are in the order of its memory;
// RESIZED has a bit for each axis that changes. SOURCE and TARGET are element types.
#include "scalar.cuh"

enum Mode { NEAREST, LINEAR, CUBIC };
enum Rounding { ROUND_PREFER_FLOOR, ROUND_PREFER_CEIL, FLOOR, CEIL };

constexpr int THREADS = 256;
constexpr bool WEIGHTED = MODE != NEAREST;
typedef Wide<SOURCE> Number;

// The places that one place reads.
struct Span {
    i32 first, count;
};

struct Taps {
    Span* spans;
    Number* weights;  // `most` of each place
    i64 most;
};

// An axis that changes.
struct Line {
    i64 before, after;  // extents
    i64 first, terms;   // of elements that are read, counted from the one at a coordinate or right before it
    double shift, factor, divisor, extra, shrink;
    Taps taps;

    __device__ double coordinate(i64 i) const {
        return (static_cast<double>(i) + shift) * factor / divisor - shift + extra;
    }
    // The first place that an element reads, which may be outside.
    __device__ i64 first_of(i64 i) const {
        const double at = coordinate(i);
        if constexpr (MODE != NEAREST) return static_cast<i64>(floor(at)) + first;
        if constexpr (ROUNDING == ROUND_PREFER_FLOOR) return static_cast<i64>(ceil(at - 0.5));
        if constexpr (ROUNDING == ROUND_PREFER_CEIL) return static_cast<i64>(floor(at + 0.5));
        return static_cast<i64>(ROUNDING == FLOOR ? floor(at) : ceil(at));
    }
    __device__ i64 inside(i64 place) const { return place < 0 ? 0 : place < before ? place : before - 1; }
};

struct TapArguments {
    double cubic_a;  // of Keys's kernel
    Line lines[LINES];
};

__device__ inline double kernel_at(double distance, double a) {
    const double d = fabs(distance);
    if (MODE == LINEAR) return d < 1 ? 1 - d : 0;
    if (d <= 1) return ((a + 2) * d - (a + 3)) * d * d + 1;
    return d < 2 ? ((d - 5) * d + 8) * d * a - 4 * a : 0;
}

// The weights of one element's terms.
struct Weights {
    const Line& line;
    double a, rest, total;
    i64 first;

    __device__ Weights(const Line& line, i64 i, double a) : line(line), a(a), total(1), first(line.first_of(i)) {
        const double at = line.coordinate(i);
        rest = at - floor(at);
        if (!NORMALISED) return;
        double sum = 0;
        for (i64 t = 0; t < line.terms; ++t) sum += share(t);
        total = sum;
    }
    __device__ double share(i64 t) const {
        if (EXCLUDED && (first + t < 0 || first + t >= line.before)) return 0;
        return kernel_at((static_cast<double>(line.first + t) - rest) * line.shrink, a);
    }
    // Of the term, divided by the sum of all.
    __device__ double operator[](i64 t) const { return NORMALISED ? share(t) / total : share(t); }
};

__device__ inline void read_by(const Line& line, i64 place, double a) {
    Span found{static_cast<i32>(line.first_of(place)), static_cast<i32>(line.terms)};
    if constexpr (WEIGHTED) {
        const Weights weights(line, place, a);
        for (i64 t = 0; t < line.terms; ++t) line.taps.weights[place * line.taps.most + t] = static_cast<Number>(weights[t]);
    } else {
        found.first = static_cast<i32>(line.inside(found.first));
    }
    line.taps.spans[place] = found;
}

// Coordinates never fall, so the readers of a place are neighbours; places outside are read at the nearest end.
__device__ inline void readers_of(const Line& line, i64 place, double a) {
    i64 low = 0, high = line.after;
    while (low < high) {
        const i64 middle = (low + high) / 2;
        if (line.inside(line.first_of(middle) + line.terms - 1) < place) low = middle + 1;
        else high = middle;
    }
    i64 count = 0;
    for (; low + count < line.after && line.inside(line.first_of(low + count)) <= place; ++count) {
        if constexpr (WEIGHTED) {
            const Weights weights(line, low + count, a);
            double sum = 0;
            for (i64 t = 0; t < line.terms; ++t)
                if (line.inside(weights.first + t) == place) sum += weights[t];
            line.taps.weights[place * line.taps.most + count] = static_cast<Number>(sum);
        }
    }
    line.taps.spans[place] = Span{static_cast<i32>(low), static_cast<i32>(count)};
}

extern "C" __global__ void __launch_bounds__(THREADS) taps(const TapArguments a) {
    const Line& line = a.lines[blockIdx.y];
    const i64 place = static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x;
    if (place >= (TRANSPOSED ? line.before : line.after)) return;
    if (TRANSPOSED) readers_of(line, place, a.cubic_a);
    else read_by(line, place, a.cubic_a);
}

struct Arguments {
    i64 units;
    const char* source;
    char* target;
    i64 extents[RANK];  // of the result, the last in units
    i64 target_steps[RANK], source_steps[RANK];  // bytes, from one element to the next
    i64 limits[RANK];  // extents of the source, along axes that change
    Taps taps[RANK];
};

// The sum of one thread.
struct Sum {
    const Arguments& a;
    i64 places[RANK], left;
    Span spans[RANK];
    Number numbers[VECTOR];

    // All terms along the axes from one on; the tensor begins at `from`.
    template <int AXIS> __device__ __forceinline__ void add(const char* from, Number weight) {
        if constexpr (AXIS == RANK) {
            const Vector<SOURCE, VECTOR> x = load<SOURCE, VECTOR>(from, left);
#pragma unroll
            for (int k = 0; k < VECTOR; ++k)
                if constexpr (WEIGHTED) numbers[k] += weight * widened(x.at[k]);
                else if constexpr (TRANSPOSED) numbers[k] += widened(x.at[k]);
                else numbers[k] = widened(x.at[k]);
        } else if constexpr (RESIZED >> AXIS & 1) {
            const Taps& taps = a.taps[AXIS];
            for (i32 t = 0; t < spans[AXIS].count; ++t) {
                const i64 place = spans[AXIS].first + t, last = a.limits[AXIS] - 1;
                const char* next = from + (place < 0 ? 0 : place < last ? place : last) * a.source_steps[AXIS];
                if constexpr (WEIGHTED) {
                    const Number share = taps.weights[places[AXIS] * taps.most + t];
                    // An element with weight 0 is not read: NaN must not spread.
                    if (!TRANSPOSED || share != 0) add<AXIS + 1>(next, weight * share);
                } else {
                    add<AXIS + 1>(next, weight);
                }
            }
        } else {
            add<AXIS + 1>(from, weight);
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS) resize(const Arguments a) {
    const INDEX number = static_cast<INDEX>(blockIdx.x) * THREADS + threadIdx.x;
    if (number >= static_cast<INDEX>(a.units)) return;
    Sum sum{a};
    const char* from = a.source;
    char* to = a.target;
    INDEX rest = number;
    sum.left = VECTOR;
#pragma unroll
    for (int axis = RANK - 1; axis >= 0; --axis) {
        const INDEX extent = static_cast<INDEX>(a.extents[axis]), above = axis ? rest / extent : 0;
        i64 place = static_cast<i64>(rest - above * extent);
        rest = above;
        if (axis == RANK - 1 && VECTOR > 1) {
            place *= VECTOR;
            sum.left = a.limits[axis] - place;
        }
        sum.places[axis] = place;
        to += place * a.target_steps[axis];
        if (RESIZED >> axis & 1) sum.spans[axis] = a.taps[axis].spans[place];
        else from += place * a.source_steps[axis];
    }
#pragma unroll
    for (int k = 0; k < VECTOR; ++k) sum.numbers[k] = 0;
    sum.add<0>(from, static_cast<Number>(1));
    Vector<TARGET, VECTOR> result;
#pragma unroll
    for (int k = 0; k < VECTOR; ++k) result.at[k] = narrowed<TARGET>(sum.numbers[k]);
    store<TARGET, VECTOR>(to, result, sum.left);
}
