// Scalar functions of expressions, with NumPy's meaning.
#pragma once
#include "types.cuh"

namespace scalar {

template <class T> struct IsFloat { static constexpr bool value = false; };
template <> struct IsFloat<float> { static constexpr bool value = true; };
template <> struct IsFloat<double> { static constexpr bool value = true; };
template <class T> constexpr bool is_float = IsFloat<T>::value;
template <class T> struct IsTruth { static constexpr bool value = false; };
template <> struct IsTruth<bool> { static constexpr bool value = true; };
template <class T> constexpr bool is_signed = static_cast<T>(-1) < static_cast<T>(0);

#define FUNCTION template <class T> __device__ inline T
#define OF_FLOATS(name, function)                                          \
    __device__ inline float name(float x) { return function##f(x); }       \
    __device__ inline double name(double x) { return function(x); }
#define OF_NUMBERS(name, function)                                         \
    OF_FLOATS(name, function)                                              \
    FUNCTION name(T x) { return x; }

OF_FLOATS(square_root, sqrt)
OF_FLOATS(exponential, exp)
OF_FLOATS(sine_of_halves, sinpi)  // of so many halves of a turn
OF_FLOATS(cosine_of_halves, cospi)
OF_FLOATS(exponential_less_1, expm1)
OF_FLOATS(logarithm, log)
OF_FLOATS(logarithm_of_1_and, log1p)
OF_FLOATS(arcsine, asin)
OF_FLOATS(arccosine, acos)
OF_FLOATS(arctangent, atan)
OF_FLOATS(hyperbolic_sine, sinh)
OF_FLOATS(hyperbolic_cosine, cosh)
OF_FLOATS(hyperbolic_tangent, tanh)
OF_FLOATS(area_sine, asinh)
OF_FLOATS(area_cosine, acosh)
OF_FLOATS(area_tangent, atanh)
OF_FLOATS(error_function, erf)
OF_NUMBERS(rounded_down, floor)
OF_NUMBERS(rounded_up, ceil)
OF_NUMBERS(rounded_to_zero, trunc)
OF_NUMBERS(rounded_to_even, rint)

// The sine of an angle and of so many quarters of a turn. Angles are taken modulo a turn in double, which needs no stack
// as CUDA's own sine does on some cards: 1 / π in parts of 29 bits, whose products with a float are exact, and a last one
// of 53. Beyond 2^40 three parts would lose digits of the angle.
struct HalfTurns {
    double rest;  // beyond whole ones, at most half of one a part
    bool odd;
    __device__ inline void add(double halves) {
        const double whole = rint(halves);
        rest += halves - whole;
        odd ^= rint(0.5 * whole) != 0.5 * whole;
    }
};
__device__ inline float sine_of(float x, double quarters) {
    HalfTurns angle = {0.5 * quarters, false};
    angle.add(x * 0x1.45f306d000000p-2);
    angle.add(x * 0x1.9391054000000p-31);
    if (fabsf(x) < 0x1p40f) {
        angle.rest += x * 0x1.4fe13abe8fa9ap-60;
    } else {
        angle.add(x * 0x1.4fe13ab000000p-60);
        angle.add(x * 0x1.d1f534d000000p-89);
        angle.add(x * 0x1.b81b6c5000000p-118);
        angle.rest += x * 0x1.5993c439041fep-149;
    }
    HalfTurns last = {0.0, angle.odd};
    last.add(angle.rest);
    const float found = sinpif(static_cast<float>(last.rest));
    return last.odd ? -found : found;
}
__device__ inline float sine(float x) { return sine_of(x, 0); }
__device__ inline float cosine(float x) { return sine_of(x, 1); }
__device__ inline float tangent(float x) { return sine(x) / cosine(x); }
__device__ inline double sine(double x) { return sin(x); }
__device__ inline double cosine(double x) { return cos(x); }
__device__ inline double tangent(double x) { return tan(x); }

__device__ inline float angle_of(float y, float x) { return atan2f(y, x); }
__device__ inline double angle_of(double y, double x) { return atan2(y, x); }
__device__ inline float c_remainder(float a, float b) { return fmodf(a, b); }
__device__ inline double c_remainder(double a, double b) { return fmod(a, b); }

// Integers wrap around, which signed ones of C++ may not; of truth values, sums are "or" and products "and".
FUNCTION add(T a, T b) {
    if constexpr (is_float<T>) return a + b;
    else return static_cast<T>(static_cast<u64>(a) + static_cast<u64>(b));
}
FUNCTION subtract(T a, T b) {
    if constexpr (is_float<T>) return a - b;
    else return static_cast<T>(static_cast<u64>(a) - static_cast<u64>(b));
}
FUNCTION multiply(T a, T b) {
    if constexpr (is_float<T>) return a * b;
    else return static_cast<T>(static_cast<u64>(a) * static_cast<u64>(b));
}
FUNCTION negative(T x) {
    if constexpr (is_float<T>) return -x;
    else return static_cast<T>(0 - static_cast<u64>(x));
}
FUNCTION divide(T a, T b) { return a / b; }
FUNCTION reciprocal(T x) { return static_cast<T>(1) / x; }
FUNCTION reciprocal_root(T x) { return static_cast<T>(1) / square_root(x); }
FUNCTION square(T x) { return multiply(x, x); }
FUNCTION absolute(T x) {
    if constexpr (is_float<T>) return fabs(x);
    else return x < static_cast<T>(0) ? negative(x) : x;
}
FUNCTION sign(T x) {
    const T zero = static_cast<T>(0), one = static_cast<T>(1);
    return x > zero ? one : x < zero ? negative(one) : x;  // x: zero or NaN
}

// NaN if one of the two is NaN.
FUNCTION maximum(T a, T b) { return a > b || a != a ? a : b; }
FUNCTION minimum(T a, T b) { return a < b || a != a ? a : b; }
FUNCTION clip(T x, T low, T high) { return minimum(maximum(x, low), high); }
FUNCTION relu(T x) { return maximum(x, static_cast<T>(0)); }
// By the power that is at most 1: the other power is infinite where the result is small, but not zero.
FUNCTION sigmoid(T x) {
    const T one = static_cast<T>(1), power = exponential(-absolute(x));
    return (x < static_cast<T>(0) ? power : one) / (one + power);
}

FUNCTION power(T a, T b) {
    if constexpr (is_float<T>) {
        return pow(a, b);
    } else {
        T result = static_cast<T>(1);
        for (u64 left = static_cast<u64>(b); left; left >>= 1) {
            if (left & 1) result = multiply(result, a);
            a = multiply(a, a);
        }
        return result;
    }
}

// The quotient rounded toward zero; 0 if there is none.
FUNCTION whole_quotient(T a, T b) {
    if (b == static_cast<T>(0)) return static_cast<T>(0);
    if constexpr (is_signed<T>)
        if (b == static_cast<T>(-1)) return negative(a);  // overflows at the least number
    return static_cast<T>(a / b);
}
FUNCTION whole_remainder(T a, T b) {
    return b == static_cast<T>(0) ? static_cast<T>(0) : subtract(a, multiply(whole_quotient(a, b), b));
}

FUNCTION remainder(T a, T b) {
    const T zero = static_cast<T>(0);
    T rest;
    if constexpr (is_float<T>) {
        rest = c_remainder(a, b);
        if (rest == zero) return b < zero ? -zero : zero;
    } else {
        rest = whole_remainder(a, b);
    }
    return rest != zero && (rest < zero) != (b < zero) ? add(rest, b) : rest;
}
FUNCTION floor_divide(T a, T b) {
    const T zero = static_cast<T>(0), one = static_cast<T>(1);
    if constexpr (is_float<T>) {
        if (b == zero) return a / b;
        const T rest = c_remainder(a, b);
        T quotient = (a - rest) / b;
        if (rest != zero && (rest < zero) != (b < zero)) quotient -= one;
        const T lower = rounded_down(quotient);
        return quotient - lower > static_cast<T>(0.5) ? lower + one : lower;
    } else {
        const T rest = whole_remainder(a, b), quotient = whole_quotient(a, b);
        return rest != zero && (rest < zero) != (b < zero) ? subtract(quotient, one) : quotient;
    }
}
FUNCTION truncated_divide(T a, T b) {
    const T zero = static_cast<T>(0);
    if constexpr (!is_float<T>) return whole_quotient(a, b);
    else return floor_divide(a, b) + (remainder(a, b) != zero && (a < zero) != (b < zero) ? static_cast<T>(1) : zero);
}
FUNCTION truncated_remainder(T a, T b) {
    if constexpr (is_float<T>) return c_remainder(a, b);
    else return whole_remainder(a, b);
}

FUNCTION bits_not(T x) {
    if constexpr (IsTruth<T>::value) return !x;
    else return static_cast<T>(~x);
}
// Bits that are shifted out are lost: the result is zero, or -1 by the sign.
FUNCTION shift_left(T a, T b) {
    const u64 count = static_cast<u64>(b);
    return count < 8 * sizeof(T) ? static_cast<T>(static_cast<u64>(a) << count) : static_cast<T>(0);
}
FUNCTION shift_right(T a, T b) {
    const u64 count = static_cast<u64>(b), last = 8 * sizeof(T) - 1;
    if (count > last && !is_signed<T>) return static_cast<T>(0);
    return static_cast<T>(a >> (count < last ? count : last));
}

template <class T> __device__ inline bool is_nan(T x) { return x != x; }
template <class T> __device__ inline bool is_infinite(T x) {
    if constexpr (is_float<T>) return fabs(x) == static_cast<T>(INFINITE);
    else return false;
}

// A number of another type; of truth values, whether it is not zero.
template <class T, class S> __device__ inline T to(S x) {
    if constexpr (IsTruth<T>::value) return x != static_cast<S>(0);
    else return static_cast<T>(x);
}

// As an element of a narrower type, and back.
template <class T> __device__ inline float rounded(float x) { return widened(narrowed<T>(x)); }
template <class T> __device__ inline float rounded(double x) { return widened(narrowed<T>(x)); }
template <> __device__ inline float rounded<bfloat16>(float x) { return rounded_to_bfloat(x); }

#undef OF_NUMBERS
#undef OF_FLOATS
#undef FUNCTION
}  // namespace scalar
