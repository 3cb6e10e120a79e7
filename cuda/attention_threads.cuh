// A tile's results shared by threads in a rectangle, THREADS_ACROSS wide, in float32. A thread has rows and columns that
// are as far apart as the rectangle is large, and uses each read of shared memory, four neighbours at a time, for several
// results. All threads of a row are in one warp. Neighbouring lanes are in pairs one below the other: then a warp's reads
// of 16 bytes a lane are served together.
#pragma once

constexpr int THREADS_DOWN = THREADS / THREADS_ACROSS;
constexpr int DOWN = ROWS / THREADS_DOWN, ACROSS = COLUMNS / THREADS_ACROSS;
constexpr int OF_SCORES = COLUMNS + THREADS_ACROSS;  // rows of a warp's threads in other banks
constexpr int WEIGHTS_FLOATS = ROWS * OF_SCORES;

// Steps of a sum whose operands are read together: from compute capability 10 on, two of them take more registers than
// there are.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int STEPS_AT_ONCE = 1;
#else
constexpr int STEPS_AT_ONCE = 2;
#endif

typedef float Scores[DOWN][ACROSS];

__device__ inline int down() { return threadIdx.x % 2 + threadIdx.x / (2 * THREADS_ACROSS) * 2; }
__device__ inline int across() { return threadIdx.x / 2 % THREADS_ACROSS; }
__device__ inline int row_of(int i) { return down() + i * THREADS_DOWN; }
__device__ inline int column_of(int j) { return across() + j * THREADS_ACROSS; }
__device__ inline bool first_of_row() { return across() == 0; }
__device__ inline int place_in_row() { return across(); }
constexpr int OF_A_ROW = THREADS_ACROSS;  // threads

// The combined value of the threads of a row.
template <class Combine> __device__ inline float of_row(float x, Combine combine) {
#pragma unroll
    for (int lanes = THREADS_ACROSS; lanes > 1; lanes /= 2) x = combine(x, __shfl_xor_sync(0xffffffffu, x, lanes));
    return x;
}

// Waits until a tile that was sent is there.
template <int TALL, int WIDTH> __device__ inline void arrive(float*) { wait_for_sent(); }

// Products of rows of `a` with rows of `b`.
template <int WIDTH> __device__ inline void dots(const float* a, const float* b, Scores& found) {
    constexpr int PITCH = pitch(WIDTH);
#pragma unroll
    for (int i = 0; i < DOWN; ++i)
#pragma unroll
        for (int j = 0; j < ACROSS; ++j) found[i][j] = 0;
    a += down() * PITCH;
    b += across() * PITCH;
#pragma unroll STEPS_AT_ONCE
    for (int d = 0; d < WIDTH; d += 4) {
        Four x[DOWN];
#pragma unroll
        for (int i = 0; i < DOWN; ++i) x[i] = four(a + i * THREADS_DOWN * PITCH + d);
#pragma unroll
        for (int j = 0; j < ACROSS; ++j) {
            const Four y = four(b + j * THREADS_ACROSS * PITCH + d);
#pragma unroll
            for (int k = 0; k < 4; ++k)
#pragma unroll
                for (int i = 0; i < DOWN; ++i) found[i][j] += x[i].at[k] * y.at[k];
        }
    }
}

// Numbers for a tile's pairs, which rows of the other side are multiplied with: in shared memory, where they can be taken
// one after the other.
constexpr int WEIGHTS_AT_ONCE = 1;
struct Weights {
    float* start;

    __device__ explicit Weights(float* start) : start(start) {}
    __device__ float& at(int i, int j) { return start[row_of(i) * OF_SCORES + column_of(j)]; }
};

// A thread's results that are WIDTH wide: VECTOR neighbouring columns, and those as many threads further.
template <int WIDTH> struct Sums {
    static constexpr int VECTOR = WIDTH >= 4 * THREADS_ACROSS ? 4 : WIDTH >= 2 * THREADS_ACROSS ? 2 : 1;
    static constexpr int EACH = larger((WIDTH + VECTOR * THREADS_ACROSS - 1) / (VECTOR * THREADS_ACROSS), 1);
    float at[DOWN][EACH][VECTOR];

    static __device__ int column(int i) { return (i * THREADS_ACROSS + across()) * VECTOR; }

    // Adds rows of `weights`, which the thread's own warp has written, times columns of `tile`.
    __device__ void add(const Weights& weights, const float* tile) {
        __syncwarp();
        const float* w = weights.start + down() * OF_SCORES;
#pragma unroll STEPS_AT_ONCE
        for (int j = 0; j < COLUMNS; j += 4) {
            Four x[DOWN];
#pragma unroll
            for (int i = 0; i < DOWN; ++i) x[i] = four(w + i * THREADS_DOWN * OF_SCORES + j);
#pragma unroll
            for (int k = 0; k < 4; ++k)
#pragma unroll
                for (int c = 0; c < EACH; ++c) {
                    if (column(c) >= WIDTH) continue;
                    const auto y = *reinterpret_cast<const Vector<float, VECTOR>*>(tile + (j + k) * pitch(WIDTH) + column(c));
#pragma unroll
                    for (int i = 0; i < DOWN; ++i)
#pragma unroll
                        for (int e = 0; e < VECTOR; ++e) at[i][c][e] += x[i].at[k] * y.at[e];
                }
        }
        __syncwarp();
    }

    __device__ void scale(int i, float factor) {
#pragma unroll
        for (int c = 0; c < EACH; ++c)
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) at[i][c][e] *= factor;
    }

    // The i-th of the thread's rows.
    __device__ void write(int i, const Heads& to, i64 b, i64 h, i64 row) const {
#pragma unroll
        for (int c = 0; c < EACH; ++c)
#pragma unroll
            for (int e = 0; e < VECTOR; ++e)
                if (column(c) + e < WIDTH) *to.at(b, h, row, column(c) + e) = narrowed<ELEMENT>(at[i][c][e]);
    }
};
