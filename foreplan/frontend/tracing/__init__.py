"""Python functions → Graph: a function over NumPy-style arrays runs once with tensors that record what it does.

function    `trace`: the front door
specs       `Spec`: the type of an input
tensor      `Tensor`: what the function sees instead of an array
tracer      the trace in progress: its builder, the user's line for errors, names of parameters
dispatch    NumPy's functions on tensors: the table, filled by the modules numpy_*
refusals    why other functions of NumPy are refused
elementwise ufuncs, as `map` expressions
contraction matmul, dot, tensordot and einsum, as `matmul` nodes
indexing    `x[…]`
call        a graph called on tensors, as a layer of a larger one
loop        `scan`
"""

from foreplan.frontend.tracing.function import trace
from foreplan.frontend.tracing.loop import scan
from foreplan.frontend.tracing.specs import Spec, spec
from foreplan.frontend.tracing.tensor import Tensor

__all__ = ["Spec", "Tensor", "scan", "spec", "trace"]
