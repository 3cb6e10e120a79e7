// Slices of one axis, added at the places of indices; slices of one place in the order of the indices.
// First the positions of indices are sorted by their places, in a stable radix sort: by one digit of the places in each
// pass, lowest first. A block has a tile of positions: `count_digits` counts the digits of each tile, and
// `sort_by_digit` moves positions to where they belong; a single tile needs no counting before. Then `scatter_add` has
// a thread for a part of a slice: the thread at the first position of a place adds up all slices of that place. Only
// counts use atomics.
//
// Where places are few, `scatter_parts` takes its place: the slices of each place are divided into parts, and a thread
// adds up a part of a slice over one of these. Sums are [parts, outer, n, inner], and are added up afterwards; the first
// part has what the table holds.
//
// `first_equal` finds where each index stands first.
//
// PLACE is the type of indices, INDEX that of positions, BITS are those of a digit. VECTOR elements of a slice lie side
// by side in both tensors, and are moved at a time; a thread reads from AHEAD slices before it adds. ADDS: the table
// already holds numbers. HOW says what becomes of two numbers: ADD, MULTIPLY, LEAST or MOST; NaN stays NaN. Tensors are
// [outer, n, inner].
#include "place.cuh"

constexpr int WARP = 32;
constexpr int SORTING = 512, EACH = 8, WARPS = SORTING / WARP;  // threads of a block that sorts; positions of a thread
constexpr int SEGMENT = WARP * EACH, TILE = SORTING * EACH;     // positions of a warp, of a block
constexpr int DIGITS = 1 << BITS;
constexpr int ADDING = 128;  // threads of a block that adds

struct Pass {
    i64 count, extent;  // of indices, of the axis
    i64 shift, tiles;   // the lowest bit of the digit
    const PLACE* indices;
    const INDEX* given;        // positions in their order so far; null: in that of the indices
    INDEX* digits;             // of each tile, how many of each; null for a single tile
    INDEX *positions, *places;  // sorted, and the places of these
};

__device__ inline INDEX position_at(const Pass& a, i64 i) {
    return a.given ? a.given[i] : static_cast<INDEX>(i);
}

__device__ inline int digit_of(const Pass& a, INDEX place) { return static_cast<int>(place >> a.shift) & (DIGITS - 1); }

extern "C" __global__ void __launch_bounds__(SORTING) count_digits(const Pass a) {
    __shared__ u32 found[DIGITS];
    const int thread = threadIdx.x;
    if (thread < DIGITS) found[thread] = 0;
    __syncthreads();
#pragma unroll
    for (int k = 0; k < EACH; ++k) {
        const i64 i = static_cast<i64>(blockIdx.x) * TILE + k * SORTING + thread;
        if (i < a.count)
            atomicAdd(&found[digit_of(a, static_cast<INDEX>(place_of(a.indices[position_at(a, i)], a.extent)))], 1u);
    }
    __syncthreads();
    if (thread < DIGITS) a.digits[static_cast<i64>(blockIdx.x) * DIGITS + thread] = found[thread];
}

// The threads of a warp whose digit is this one's.
__device__ inline u32 alike(int digit, bool inside) {
    u32 found = __ballot_sync(0xffffffffu, inside);
#pragma unroll
    for (int bit = 0; bit < BITS; ++bit) {
        const bool set = digit >> bit & 1;
        const u32 those = __ballot_sync(0xffffffffu, set);
        found &= set ? those : ~those;
    }
    return found;
}

extern "C" __global__ void __launch_bounds__(SORTING, 1) sort_by_digit(const Pass a) {
    __shared__ u32 before[WARPS][DIGITS];  // how many of each digit a warp has; then how many the warps before it have
    __shared__ INDEX first[DIGITS];        // where the first one of this tile goes
    const int thread = threadIdx.x, warp = thread / WARP, lane = thread % WARP;
    for (int i = thread; i < WARPS * DIGITS; i += SORTING) before[i / DIGITS][i % DIGITS] = 0;
    __syncthreads();
    const i64 segment = static_cast<i64>(blockIdx.x) * TILE + warp * SEGMENT + lane;
    INDEX position[EACH], place[EACH];
    u32 rank[EACH];
#pragma unroll
    for (int k = 0; k < EACH; ++k) position[k] = segment + k * WARP < a.count ? position_at(a, segment + k * WARP) : 0;
#pragma unroll
    for (int k = 0; k < EACH; ++k) place[k] = static_cast<INDEX>(place_of(a.indices[position[k]], a.extent));
#pragma unroll
    for (int k = 0; k < EACH; ++k) {
        const bool inside = segment + k * WARP < a.count;
        const int digit = digit_of(a, place[k]);
        const u32 equal = alike(digit, inside), lower = equal & ((1u << lane) - 1);
        rank[k] = before[warp][digit] + __popc(lower);
        __syncwarp();
        if (inside && lower == 0) before[warp][digit] += __popc(equal);
        __syncwarp();
    }
    __syncthreads();
    const bool counts = thread < DIGITS;
    INDEX own = 0, every = 0, earlier = 0;  // of a digit: in this tile, in all, in those before this one
    if (counts) {
        for (int i = 0; i < WARPS; ++i) {
            const u32 here = before[i][thread];
            before[i][thread] = static_cast<u32>(own);
            own += here;
        }
        for (i64 tile = 0; a.digits && tile < a.tiles; ++tile) {
            const INDEX there = a.digits[tile * DIGITS + thread];
            every += there;
            if (tile < blockIdx.x) earlier += there;
        }
        if (!a.digits) every = own;
        first[thread] = every;
    }
    __syncthreads();
    for (int step = 1; step < DIGITS; step *= 2) {
        const INDEX less = counts && thread >= step ? first[thread - step] : 0;
        __syncthreads();
        if (counts) first[thread] += less;
        __syncthreads();
    }
    if (counts) first[thread] += earlier - every;
    __syncthreads();
#pragma unroll
    for (int k = 0; k < EACH; ++k)
        if (segment + k * WARP < a.count) {
            const int digit = digit_of(a, place[k]);
            const INDEX slot = first[digit] + before[warp][digit] + rank[k];
            a.positions[slot] = position[k];
            a.places[slot] = place[k];
        }
}

struct Sorted {
    i64 count;
    const INDEX *positions, *places;
    i64* y;
};

// Of each position, the first one of its place, which is found by halves.
extern "C" __global__ void __launch_bounds__(ADDING) first_equal(const Sorted a) {
    const INDEX slot = static_cast<INDEX>(blockIdx.x) * ADDING + threadIdx.x, count = static_cast<INDEX>(a.count);
    if (slot >= count) return;
    const INDEX place = a.places[slot];
    INDEX begin = 0, step = 1;
    while (step <= count / 2) step *= 2;
    for (; step; step /= 2)
        if (begin + step <= count && a.places[begin + step - 1] < place) begin += step;
    a.y[a.positions[slot]] = static_cast<i64>(a.positions[begin]);
}

constexpr int ADD = 0, MULTIPLY = 1, LEAST = 2, MOST = 3;

__device__ inline Wide<ELEMENT> combined(Wide<ELEMENT> x, Wide<ELEMENT> y) {
    if constexpr (HOW == ADD) return x + y;
    if constexpr (HOW == MULTIPLY) return x * y;
    if constexpr (HOW == LEAST) return y < x || y != y ? y : x;
    return y > x || y != y ? y : x;
}

struct Folded {
    char* start;
    i64 outer_step, step, inner_step;  // bytes
};

struct Arguments {
    i64 outer, count, inner;  // count: of indices
    const INDEX *positions, *places;
    Folded table, slices;
    i64 extent, parts;
    Wide<ELEMENT>* sums;  // of parts
};

typedef Vector<ELEMENT, VECTOR> Elements;

template <bool ALIGNED> __device__ inline Elements elements_at(const char* from) {
    if constexpr (ALIGNED) return *reinterpret_cast<const Elements*>(from);
    Elements found;
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) found.at[i] = reinterpret_cast<const ELEMENT*>(from)[i];
    return found;
}

// Combines sums with a part of the slices of one place, from a sorted position on up to the last of them, if not to
// another one before.
template <bool ALIGNED>
__device__ inline void sum_up(const Arguments& a, INDEX slot, INDEX last, const char* from, Wide<ELEMENT> (&sums)[VECTOR]) {
    constexpr int TAKEN = ALIGNED ? AHEAD : 1;
    const INDEX place = a.places[slot];
    for (int taken = TAKEN; taken == TAKEN; slot += TAKEN) {
        INDEX positions[TAKEN], places[TAKEN];
        Elements found[TAKEN];
#pragma unroll
        for (int k = 0; k < TAKEN; ++k) {
            const INDEX there = slot + k < last ? slot + k : last;
            positions[k] = a.positions[there];
            places[k] = a.places[there];
        }
        taken = 0;
#pragma unroll
        for (int k = 0; k < TAKEN; ++k) taken += slot + k <= last && places[k] == place;
#pragma unroll
        for (int k = 0; k < TAKEN; ++k)
            if (k < taken) found[k] = elements_at<ALIGNED>(from + static_cast<i64>(positions[k]) * a.slices.step);
#pragma unroll
        for (int k = 0; k < TAKEN; ++k)
            if (k < taken)
#pragma unroll
                for (int i = 0; i < VECTOR; ++i) sums[i] = combined(sums[i], widened(found[k].at[i]));
    }
}

template <bool ALIGNED> __device__ inline void read_table(const char* from, Wide<ELEMENT> (&sums)[VECTOR]) {
    const Elements there = elements_at<ALIGNED>(from);
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) sums[i] = widened(there.at[i]);
}

// Adds a part of all slices of one place, from a sorted position on, to that part of the table.
template <bool ALIGNED> __device__ inline void add_slices(const Arguments& a, INDEX slot, const char* from, char* to) {
    Wide<ELEMENT> sums[VECTOR] = {};
    if constexpr (ADDS) read_table<ALIGNED>(to, sums);
    sum_up<ALIGNED>(a, slot, static_cast<INDEX>(a.count) - 1, from, sums);
    Elements result;
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) result.at[i] = narrowed<ELEMENT>(sums[i]);
    if constexpr (ALIGNED)
        *reinterpret_cast<Elements*>(to) = result;
    else
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) reinterpret_cast<ELEMENT*>(to)[i] = result.at[i];
}

__device__ inline bool is_whole(const Arguments& a) {
    return VECTOR == 1 || (is_aligned<ELEMENT, VECTOR>(a.table.start) && is_aligned<ELEMENT, VECTOR>(a.slices.start));
}

extern "C" __global__ void __launch_bounds__(ADDING) scatter_add(const Arguments a) {
    const INDEX unit = static_cast<INDEX>(blockIdx.x) * ADDING + threadIdx.x;
    const INDEX parts = static_cast<INDEX>(a.inner) / VECTOR, count = static_cast<INDEX>(a.count);
    const INDEX slice = unit / parts, outer = slice / count, slot = slice - outer * count;
    if (outer >= static_cast<INDEX>(a.outer)) return;
    const INDEX place = a.places[slot];
    if (slot && a.places[slot - 1] == place) return;
    const i64 first = static_cast<i64>(unit - slice * parts) * VECTOR;
    char* to = a.table.start + outer * a.table.outer_step + place * a.table.step + first * a.table.inner_step;
    const char* from = a.slices.start + outer * a.slices.outer_step + first * a.slices.inner_step;
    if (is_whole(a)) add_slices<true>(a, slot, from, to);
    else add_slices<false>(a, slot, from, to);
}

extern "C" __global__ void __launch_bounds__(ADDING) scatter_parts(const Arguments a) {
    const INDEX unit = static_cast<INDEX>(blockIdx.x) * ADDING + threadIdx.x;
    const INDEX vectors = static_cast<INDEX>(a.inner) / VECTOR, extent = static_cast<INDEX>(a.extent);
    const INDEX row = unit / vectors, rows = row / extent, place = row - rows * extent;
    const INDEX part = rows / static_cast<INDEX>(a.outer), outer = rows - part * static_cast<INDEX>(a.outer);
    if (part >= static_cast<INDEX>(a.parts)) return;
    const INDEX count = static_cast<INDEX>(a.count);
    INDEX begin = 0, end = 0, step = 1;  // the sorted positions of the place, found by halves
    while (step <= count / 2) step *= 2;
    for (; step; step /= 2) {
        if (begin + step <= count && a.places[begin + step - 1] < place) begin += step;
        if (end + step <= count && a.places[end + step - 1] <= place) end += step;
    }
    const u64 all = end - begin;
    end = begin + static_cast<INDEX>(all * (part + 1) / static_cast<u64>(a.parts));
    begin += static_cast<INDEX>(all * part / static_cast<u64>(a.parts));
    const i64 first = static_cast<i64>(unit - row * vectors) * VECTOR;
    const char* to = a.table.start + outer * a.table.outer_step + place * a.table.step + first * a.table.inner_step;
    const char* from = a.slices.start + outer * a.slices.outer_step + first * a.slices.inner_step;
    Wide<ELEMENT> sums[VECTOR] = {};
    const bool whole = is_whole(a);
    if (ADDS && part == 0) {
        if (whole) read_table<true>(to, sums);
        else read_table<false>(to, sums);
    }
    if (begin < end) {
        if (whole) sum_up<true>(a, begin, end - 1, from, sums);
        else sum_up<false>(a, begin, end - 1, from, sums);
    }
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) a.sums[static_cast<i64>(unit) * VECTOR + i] = sums[i];
}
