"""The CUDA engine: device profiles, and the kernels of each op, which can be planned without a card.

`target` describes the engine to lowering, `table` has the kernels of each op, `launch` describes them as data, `engine`
binds a plan. The folders: `libraries` are NVIDIA's and the driver, `kernels` has the kernels; their CUDA C++ is in
cuda/.
"""
