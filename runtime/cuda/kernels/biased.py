"""A matrix product to which a bias is added, and perhaps a tensor: by cuBLASLt, or a product and a map behind it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from foreplan.graph import DType, Op, Window
from foreplan.graph.layouts import lie_alike
from foreplan.graph.op import Windows
from foreplan.graph.types import DTYPES
from foreplan.ops.expr import Arg, Call, Expr
from foreplan.ops.matmul_map import MatMulMap
from foreplan.runtime.cuda.device import Device
from foreplan.runtime.cuda.kernels import matmul
from foreplan.runtime.cuda.kernels.map import Tensor, broadcast, map_launches
from foreplan.runtime.cuda.launch import (
    Address,
    Instruction,
    LaunchKernel,
    Scratch,
    input_at,
    output_at,
    relocated,
    workspace_at,
)
from foreplan.runtime.kernel import Refused


@dataclass(frozen=True)
class Biased:
    """The summands of a product.

    Attributes:
        bias: the input with a number for each column.
        added: the input that is as large as the product; None: there is none.
    """

    bias: int
    added: int | None


def terms_of(op: MatMulMap, inputs: Windows, outputs: Windows) -> Biased:
    """The summands that a map adds to a product, if it does nothing else.

    Raises:
        Refused: it is not.
    """
    y, *more = outputs
    if more or not y.type.size:
        raise Refused("a product with several results")
    added = _added(op.map.parsed[0], (y.type.dtype, y.type.dtype.wide))
    indices = sorted(islice(added, 4))  # one more than there may be
    of_columns = [i for i in indices if i and inputs[i + 1].shape == y.shape[-1:]]
    whole = [i for i in indices if i and inputs[i + 1].type == y.type]
    if len(y.shape) < 2 or len(of_columns) != 1 or len(whole) > 1 or indices != sorted([0, *of_columns, *whole]):
        raise Refused(f"a product followed by {op.exprs[0]}")
    return Biased(of_columns[0] + 1, whole[0] + 1 if whole else None)


def _added(expr: Expr, dtypes: Sequence[DType]) -> Iterator[int]:
    """The arguments whose sum an expression is, rounded only to these types."""
    if isinstance(expr, Arg):
        yield expr.index
    elif isinstance(expr, Call) and expr.function == "add":
        for part in expr.args:
            yield from _added(part, dtypes)
    elif isinstance(expr, Call) and expr.function in DTYPES and DTYPES[expr.function] in dtypes:
        yield from _added(expr.args[0], dtypes)
    else:
        raise Refused(f"{expr} is no sum of {dtypes[0]}")


def bias_of(terms: Biased, inputs: Windows, y: Window) -> tuple[tuple[Instruction, ...], int]:
    """The launches that put the bias at the beginning of the workspace for cuBLASLt, and its bytes there: side by side,
    of the result's type, and aligned. cuBLASLt's kernels were seen to need this, whatever they are told.
    """
    window, dtype = inputs[terms.bias], y.type.dtype
    own = broadcast(input_at(terms.bias), window, window.shape)
    made = Tensor(workspace_at(), dtype, (dtype.itemsize,))
    return map_launches([Arg(0)], window.shape, [own], [made]), window.type.size * dtype.itemsize


def product_of(op: MatMulMap, inputs: Windows) -> Window:
    """The product alone, in C order."""
    return Window.dense(op.matmul.infer([x.type for x in inputs[:2]])[0])


def biased(op: Op, inputs: Windows, outputs: Windows, device: Device) -> LaunchKernel:
    """Foreplan's own launches: the product in the workspace, then the map."""
    assert isinstance(op, MatMulMap)
    (y,), terms = outputs, terms_of(op, inputs, outputs)
    product = product_of(op, inputs)
    made = matmul.matmul(op.matmul, inputs[:2], [product], device)
    scratch = Scratch()
    scratch.take(made.workspace)
    whole = scratch.take(product.type.nbytes)

    def moved(place: Address) -> Address:
        return whole.behind(place.offset) if place.of == "output" else place

    last = map_behind(op, inputs, y, whole, product)
    instructions = (*(relocated(each, moved) for each in made.instructions), *last)
    return replace(made, instructions=instructions, workspace=scratch.nbytes, overwrites=overwrites(terms, inputs, y))


def map_behind(op: MatMulMap, inputs: Windows, y: Window, start: Address, product: Window) -> tuple[Instruction, ...]:
    """The map of a product that lies somewhere."""
    further = [broadcast(input_at(i), x, y.shape) for i, x in enumerate(inputs) if i > 1]
    read = [broadcast(start, product, y.shape), *further]
    return map_launches(op.map.parsed, y.shape, read, [broadcast(output_at(0), y, y.shape)])


def overwrites(terms: Biased, inputs: Windows, y: Window) -> tuple[tuple[int, int], ...]:
    """The summand may be changed in place."""
    return ((0, terms.added),) if terms.added is not None and lie_alike(inputs[terms.added], y) else ()
