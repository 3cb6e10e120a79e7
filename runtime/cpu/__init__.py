"""The CPU engine: oneDNN's primitives and compiled loops, each with its exact workspace.

`target` says what lowering needs to know, `table` which kernel runs an op, `engine` binds a plan. The rooms: `onednn`
is the library, `codegen` makes machine code of loops, `gemm` multiplies matrices, `kernels` has the kernels of some ops
each.
"""
