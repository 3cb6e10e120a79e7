"""Maps of rows that were brought to another shape → maps of the rows, which then fuse with what made them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foreplan.graph import Builder, Graph, Node, Value
from foreplan.graph.types import Shape
from foreplan.ops.map import Map
from foreplan.ops.matmul import MatMul
from foreplan.ops.shape import Reshape, reshape
from foreplan.passes.base import Pass
from foreplan.passes.rewrite import rewrite


@dataclass(frozen=True)
class DelayReshapes(Pass, requires=("plain ops",), ensures=("plain ops", "live"), optional=True):
    """Let a map of a matrix of rows [R, C] that is read as […, C] work on the matrix, and reshape its result.

    This serves PyTorch's models that view tokens as rows for a product, and as [N, T, C] for the activation or the sum
    behind it (GPT-2 of transformers): the bias, the activation and the sum become one map, which can be the product's
    epilogue.

    Ensures: the same results. Only behind products, and maps of their results; the other operands have the shape of the
    result, one element for each column, or one.
    """

    def _run(self, graph: Graph) -> Graph:
        if not any(_is_rows(node.inputs[0].shape, node.op.shape) for node in graph.nodes_of(Reshape)):
            return graph
        rows: dict[Value, Value] = {}  # values of the new graph, and the matrices that they are reshaped from
        of_products: set[Value] = set()

        def replace(b: Builder, node: Node, inputs: tuple[Value, ...]) -> Sequence[Value] | None:
            (y, *others), product, map = node.outputs, node.of(MatMul), node.of(Map)
            if product or (map and not of_products.isdisjoint(inputs)):
                of_products.update(node.outputs)
            if node.of(Reshape) and inputs[0] in of_products and _is_rows(inputs[0].shape, y.shape):
                rows[y] = inputs[0]
            if map is None or others:
                return None
            matrix = next((rows[x] for x in inputs if x in rows and x.shape == y.shape), None)
            if matrix is None or not all(_is_by_rows(x.shape, y.shape) for x in inputs):
                return None
            operands = [rows.get(x) or _by_rows(b, x, y.shape, matrix.shape) for x in inputs]
            rows[y] = made = b.apply(node.op, *operands, name=f"{y.name}/rows")
            of_products.add(made)
            b.append(Node(Reshape(y.shape), (made,), (y,), node.name, node.source))
            return [y]

        return rewrite(rewrite(graph, replace), lambda b, node, inputs: None)


delay_reshapes = DelayReshapes()


def _is_rows(matrix: Shape, shape: Shape) -> bool:
    """Whether a matrix's rows are those of a tensor of more axes."""
    return len(matrix) == 2 and len(shape) > 2 and matrix[1] == shape[-1]


def _is_by_rows(operand: Shape, shape: Shape) -> bool:
    """Whether an operand has the shape of a map's result, an element for each column, or one."""
    columns = not operand or operand == (*[1] * (len(operand) - 1), operand[-1])
    return operand == shape or (columns and (operand or (1,))[-1] in (1, shape[-1]))


def _by_rows(b: Builder, x: Value, shape: Shape, matrix: Shape) -> Value:
    """Such an operand, of a map of a matrix."""
    if x.shape == shape:
        return reshape(b, x, matrix)
    return x if len(x.shape) < 2 else reshape(b, x, x.shape[-1:])
