"""The typed static SSA graph of a model or of a whole training step."""

from foreplan.graph.build import GraphBuilder
from foreplan.graph.init import Array, Fill, Initializer, Missing, Normal, RandomSeed, Stored, TruncatedNormal, Uniform
from foreplan.graph.ir import Graph
from foreplan.graph.op import Builder, Cost, Node, Op, View
from foreplan.graph.registry import op_named, register
from foreplan.graph.text import parse_graph
from foreplan.graph.types import DType, TensorType, Window, as_dtype
from foreplan.graph.value import Kind, Value

__all__ = [
    "Array",
    "Builder",
    "Cost",
    "DType",
    "Fill",
    "Graph",
    "GraphBuilder",
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
