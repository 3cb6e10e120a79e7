"""The CUDA engine: device profiles, and what runs each op on a card, known without one.

`target` says what lowering needs to know, `table` which kernel runs an op, `launch` what a kernel comes to, `engine`
binds a plan. The rooms: `libraries` are NVIDIA's and the driver, `kernels` has the kernels of some ops each; their CUDA
C++ is in cuda/.
"""
