"""Python functions → Graph: a function over NumPy-style arrays runs once with tensors that record what it does.

function    `trace`: the front door
specs       `Spec`: the type of an input
tensor      `Tensor`: what the function sees instead of an array
tracer      the trace in progress: its builder, the user's line for errors, names of parameters
dispatch    NumPy's functions on tensors: the table, filled by numpy_shape and numpy_reduce
elementwise ufuncs, as `map` expressions
contraction matmul, dot, tensordot and einsum, as `matmul` nodes
indexing    `x[…]`
"""

from foreplan.frontend.tracing.function import trace
from foreplan.frontend.tracing.specs import Spec, spec
from foreplan.frontend.tracing.tensor import Tensor

__all__ = ["Spec", "Tensor", "spec", "trace"]
