// Windows that slide over images: KERNEL, STRIDES, LOWS (padding before the first element) and DILATIONS are lists with a
// number for each of the AXES spatial axes.
#pragma once

__device__ constexpr int kernel_of(int axis) {
    constexpr int found[] = {KERNEL};
    return found[axis];
}

__device__ constexpr int stride_of(int axis) {
    constexpr int found[] = {STRIDES};
    return found[axis];
}

__device__ constexpr int low_of(int axis) {
    constexpr int found[] = {LOWS};
    return found[axis];
}

__device__ constexpr int dilation_of(int axis) {
    constexpr int found[] = {DILATIONS};
    return found[axis];
}
