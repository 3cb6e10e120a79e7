"""The kernels of some ops each, as launches of cuda/ and calls of libraries."""
