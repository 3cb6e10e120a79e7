"""Python functions → Graph: a function over NumPy-style arrays runs once with tensors that record what it does.

function    `trace`: the front door
specs       `Spec`: the type of an input
tensor      `Tensor`: what the function sees instead of an array
methods     what tensors do by functions that need tensors
tracer      the trace in progress: its builder, the user's line for errors, names of parameters
dispatch    NumPy's functions on tensors: the table, filled by the modules numpy_*
refusals    why other functions of NumPy are refused
elementwise ufuncs, as `map` expressions
contraction matmul, dot, tensordot and einsum, as `matmul` nodes
indexing    `x[…]`
call        a graph called on tensors, as a layer of a larger one
loop        `scan`
"""

from foreplan.frontend.tracing import (  # noqa: F401  (what tensors do, and NumPy's functions, is declared in them)
    call,
    indexing,
    numpy_join,
    numpy_matrix,
    numpy_nan,
    numpy_order,
    numpy_reduce,
    numpy_shape,
)
from foreplan.frontend.tracing.function import trace
from foreplan.frontend.tracing.loop import scan
from foreplan.frontend.tracing.specs import Spec, spec
from foreplan.frontend.tracing.tensor import Tensor

__all__ = ["Spec", "Tensor", "scan", "spec", "trace"]
