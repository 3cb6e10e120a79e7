"""The CPU engine: oneDNN's primitives and compiled loops, each with its exact workspace.

`target` describes the engine to lowering, `table` has the kernels of each op, `engine` binds a plan. The folders:
`onednn` is the library, `codegen` makes machine code of loops, `gemm` multiplies matrices, `kernels` has the kernels.
"""
