// A tile's results shared by warps, on tensor cores: each warp has as many rows of the tile as others, 16 at a time, and
// all columns. Tiles are rounded to TensorFloat-32 when they arrive, weights when they are used.
#pragma once
#include "tensor_cores.cuh"

constexpr int TALL = ROWS / (THREADS / 32) / 16;  // of 16 rows each
constexpr int DOWN = 2 * TALL, ACROSS = COLUMNS / 4;
constexpr int WEIGHTS_FLOATS = 0;

typedef float Scores[DOWN][ACROSS];

__device__ inline int lane() { return threadIdx.x % 32; }
__device__ inline int first_row() { return threadIdx.x / 32 * TALL * 16; }
__device__ inline int row_of(int i) { return first_row() + i * 8 + lane() / 4; }
__device__ inline int column_of(int j) { return j / 2 * 8 + lane() % 4 * 2 + j % 2; }
__device__ inline bool first_of_row() { return lane() % 4 == 0; }
__device__ inline int place_in_row() { return lane() % 4; }
constexpr int OF_A_ROW = 4;  // threads

// The combined value of the threads of a row.
template <class Combine> __device__ inline float of_row(float x, Combine combine) {
#pragma unroll
    for (int lanes = 2; lanes; lanes /= 2) x = combine(x, __shfl_xor_sync(0xffffffffu, x, lanes));
    return x;
}

// Waits until a tile that was sent is there. Each thread rounds what it has sent itself.
template <int TALL, int WIDTH> __device__ inline void arrive(float* tile) {
    constexpr int FOURS = full(WIDTH) / 4;
    wait_for_sent();
#pragma unroll 4
    for (int i = threadIdx.x; i < TALL * FOURS; i += THREADS) {
        Four& here = *reinterpret_cast<Four*>(tile + i / FOURS * pitch(WIDTH) + i % FOURS * 4);
        Four rounded = here;
#pragma unroll
        for (int e = 0; e < 4; ++e) rounded.at[e] = rounded_to_tf32(rounded.at[e]);
        here = rounded;
    }
}

// Products of rows of `a` with rows of `b`.
template <int WIDTH> __device__ inline void dots(const float* a, const float* b, Scores& found) {
    constexpr int PITCH = pitch(WIDTH);
    float sums[TALL][ACROSS / 2][4] = {};
    a += (first_row() + lane() % 16) * PITCH + lane() / 16 * 4;
    b += (lane() % 8 + lane() / 16 * 8) * PITCH + lane() / 8 % 2 * 4;
#pragma unroll 2
    for (int d = 0; d < full(WIDTH); d += 8) {
        float x[TALL][4];
#pragma unroll
        for (int i = 0; i < TALL; ++i) load_matrices(x[i], a + i * 16 * PITCH + d);
#pragma unroll
        for (int j = 0; j < ACROSS / 4; ++j) {
            float y[4];
            load_matrices(y, b + j * 16 * PITCH + d);
#pragma unroll
            for (int i = 0; i < TALL; ++i) {
                multiply_tf32(sums[i][2 * j], x[i], y[0], y[1]);
                multiply_tf32(sums[i][2 * j + 1], x[i], y[2], y[3]);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < DOWN; ++i)
#pragma unroll
        for (int j = 0; j < ACROSS; ++j) found[i][j] = sums[i / 2][j / 2][i % 2 * 2 + j % 2];
}

// Numbers for a tile's pairs, which rows of the other side are multiplied with: each thread has its own, in registers.
constexpr int WEIGHTS_AT_ONCE = larger(DOWN, ACROSS);
struct Weights {
    Scores own;

    __device__ explicit Weights(float*) {}
    __device__ float& at(int i, int j) { return own[i][j]; }
};

// A thread's results that are WIDTH wide.
template <int WIDTH> struct Sums {
    static constexpr int EACH = full(WIDTH) / 8;
    float at[TALL][EACH][4];

    static __device__ int column(int c) { return c * 8 + lane() % 4 * 2; }

    // Adds rows of `weights` times columns of `tile`. In sums, a thread has weights 2 t and 2 t + 1 of eight, and as a
    // factor the terms t and t + 4: so these terms are rows 2 t and 2 t + 1 of `tile`.
    __device__ void add(const Weights& weights, const float* tile) {
        tile += lane() % 4 * 2 * pitch(WIDTH) + lane() / 4;
#pragma unroll
        for (int j = 0; j < COLUMNS / 8; ++j) {
            float x[TALL][4];
#pragma unroll
            for (int i = 0; i < TALL; ++i)
#pragma unroll
                for (int e = 0; e < 4; ++e) x[i][e] = rounded_to_tf32(weights.own[2 * i + e % 2][2 * j + e / 2]);
#pragma unroll
            for (int c = 0; c < EACH; ++c) {
                const float* y = tile + j * 8 * pitch(WIDTH) + c * 8;
                const float y0 = y[0], y1 = y[pitch(WIDTH)];
#pragma unroll
                for (int i = 0; i < TALL; ++i) multiply_tf32(at[i][c], x[i], y0, y1);
            }
        }
    }

    __device__ void scale(int i, float factor) {
#pragma unroll
        for (int c = 0; c < EACH; ++c)
#pragma unroll
            for (int e = 0; e < 2; ++e) at[i / 2][c][i % 2 * 2 + e] *= factor;
    }

    // The i-th of the thread's rows.
    __device__ void write(int i, const Heads& to, i64 b, i64 h, i64 row) const {
#pragma unroll
        for (int c = 0; c < EACH; ++c)
#pragma unroll
            for (int e = 0; e < 2; ++e)
                if (column(c) + e < WIDTH)
                    *to.at(b, h, row, column(c) + e) = narrowed<ELEMENT>(at[i / 2][c][i % 2 * 2 + e]);
    }
};
