"""The kernels of some ops each."""
