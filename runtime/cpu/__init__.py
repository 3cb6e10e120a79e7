"""Kernels of the CPU engine: oneDNN's primitives and compiled loops, each with its exact workspace.

`library` declares oneDNN's C API, `primitives` wraps what is used of it; the other files hold the kernels of some ops
each; `table` says which kernel runs an op.
"""
