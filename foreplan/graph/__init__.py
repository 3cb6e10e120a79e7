"""The typed static SSA graph of a model or of a whole training step."""

from foreplan.graph.build import Builder
from foreplan.graph.init import Array, Fill, Initializer, Missing, Normal, RandomSeed, Stored, TruncatedNormal, Uniform
from foreplan.graph.ir import Graph, Kind, Node, Value
from foreplan.graph.op import Cost, Op, View, op_named, register
from foreplan.graph.text import parse_graph
from foreplan.graph.types import DType, TensorType, Window, as_dtype

__all__ = [
    "Array",
    "Builder",
    "Cost",
    "DType",
    "Fill",
    "Graph",
    "Initializer",
    "Kind",
    "Missing",
    "Node",
    "Normal",
    "Op",
    "RandomSeed",
    "Stored",
    "TensorType",
    "TruncatedNormal",
    "Uniform",
    "Value",
    "View",
    "Window",
    "as_dtype",
    "op_named",
    "parse_graph",
    "register",
]
