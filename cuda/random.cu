// Random numbers from counters: Philox4x32-10 of Salmon et al. (SC 2011), as foreplan/ops/random.py says.
//
// A thread has one counter: four numbers, or two of 64 bits. DISTRIBUTION is one of the three below; REAL is the type
// of arithmetic, ELEMENT that of stored numbers. Products and sums are rounded one by one, so uniform numbers are the
// same everywhere.
#include "scalar.cuh"

enum Distribution { BERNOULLI, UNIFORM, NORMAL };
constexpr int THREADS = 256, EACH = sizeof(REAL) == 8 && DISTRIBUTION != BERNOULLI ? 2 : 4;

struct Arguments {
    i64 count, stream, threshold;  // threshold: words below it give 1
    const u64* state;              // seed and step
    ELEMENT* target;
    double first, second, below;   // uniform: low, range, the largest number below high; normal: mean, deviation
    i64 scaled;
};

__device__ inline float times(float a, float b) { return __fmul_rn(a, b); }
__device__ inline double times(double a, double b) { return __dmul_rn(a, b); }
__device__ inline float plus(float a, float b) { return __fadd_rn(a, b); }
__device__ inline double plus(double a, double b) { return __dadd_rn(a, b); }

struct Words {
    u32 at[4];
};

__device__ inline Words philox(Words counter, u32 k0, u32 k1) {
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const u64 a = static_cast<u64>(counter.at[0]) * 0xd2511f53u, b = static_cast<u64>(counter.at[2]) * 0xcd9e8d57u;
        counter = Words{static_cast<u32>(b >> 32) ^ counter.at[1] ^ k0, static_cast<u32>(b),
                        static_cast<u32>(a >> 32) ^ counter.at[3] ^ k1, static_cast<u32>(a)};
        k0 += 0x9e3779b9u;
        k1 += 0xbb67ae85u;
    }
    return counter;
}

// The i-th integer that a number is made of, and its most significant bits as a fraction.
__device__ inline u64 integer(const Words& words, int i) {
    return sizeof(REAL) == 8 ? words.at[2 * i] | static_cast<u64>(words.at[2 * i + 1]) << 32 : words.at[i];
}

__device__ inline REAL fraction(const Words& words, int i) {
    if (sizeof(REAL) == 8) return times(static_cast<REAL>(integer(words, i) >> 11), static_cast<REAL>(0x1p-53));
    return times(static_cast<REAL>(static_cast<u32>(integer(words, i)) >> 8), static_cast<REAL>(0x1p-24));
}

// Both numbers of a pair (Box and Muller 1958).
__device__ inline void normal_pair(const Words& words, int i, REAL& even, REAL& odd) {
    REAL radius, turns;
    if (sizeof(REAL) == 8) {
        radius = plus(fraction(words, i), static_cast<REAL>(0x1p-54));
        turns = fraction(words, i + 1);
    } else {
        radius = plus(times(static_cast<REAL>(words.at[i]), static_cast<REAL>(0x1p-32)), static_cast<REAL>(0x1p-33));
        turns = times(static_cast<REAL>(words.at[i + 1]), static_cast<REAL>(0x1p-32));
    }
    radius = scalar::square_root(times(scalar::logarithm(radius), static_cast<REAL>(-2)));
    even = times(scalar::cosine_of_halves(2 * turns), radius);
    odd = times(scalar::sine_of_halves(2 * turns), radius);
}

extern "C" __global__ void __launch_bounds__(THREADS) random_numbers(const Arguments a) {
    const i64 counter = static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x, first = counter * EACH;
    if (first >= a.count) return;
    const u64 seed = a.state[0], step = a.state[1];
    const Words start = {static_cast<u32>(counter), static_cast<u32>(a.stream), static_cast<u32>(step),
                         static_cast<u32>(step >> 32)};
    const Words words = philox(start, static_cast<u32>(seed), static_cast<u32>(seed >> 32));
    Vector<ELEMENT, EACH> found;
    if constexpr (DISTRIBUTION == BERNOULLI) {
#pragma unroll
        for (int i = 0; i < EACH; ++i) found.at[i] = narrowed<ELEMENT>(static_cast<i64>(words.at[i]) < a.threshold ? 1 : 0);
    } else if constexpr (DISTRIBUTION == UNIFORM) {
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            REAL x = fraction(words, i);
            if (a.scaled) {
                x = plus(times(x, static_cast<REAL>(a.second)), static_cast<REAL>(a.first));
                x = scalar::minimum(x, static_cast<REAL>(a.below));
            }
            found.at[i] = narrowed<ELEMENT>(x);
        }
    } else {
#pragma unroll
        for (int i = 0; i < EACH; i += 2) {
            REAL pair[2];
            normal_pair(words, i, pair[0], pair[1]);
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                if (a.scaled) pair[k] = plus(times(pair[k], static_cast<REAL>(a.second)), static_cast<REAL>(a.first));
                found.at[i + k] = narrowed<ELEMENT>(pair[k]);
            }
        }
    }
    store<ELEMENT, EACH>(a.target + first, found, a.count - first);
}
