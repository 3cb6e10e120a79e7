"""Element-wise ops: a node for each function of their expressions."""

from __future__ import annotations

from foreplan.export.emitter import Emitter
from foreplan.export.expressions import write_expressions
from foreplan.export.table import writes
from foreplan.graph import TensorType
from foreplan.graph.types import broadcast_shapes
from foreplan.ops.expr import used_args
from foreplan.ops.map import Map


@writes(Map)
def _map(e: Emitter, op: Map, x: list[str], types: list[TensorType]) -> list[str]:
    shape = broadcast_shapes(*(type.shape for type in types))
    made = write_expressions(e, op.parsed, x, [type.dtype for type in types])
    own = [broadcast_shapes(*(types[i].shape for i in used_args(expr))) for expr in op.parsed]
    return [e.expand(y, before, shape) for y, before in zip(made, own)]
