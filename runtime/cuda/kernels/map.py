"""`map`, `masked_map` and `pack_bits`: kernels generated from scalar expressions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from foreplan.base.units import ceil_div
from foreplan.graph import DType, Op, TensorType, Window
from foreplan.graph.layouts import channels_last
from foreplan.graph.op import Windows
from foreplan.graph.types import BOOL, Shape
from foreplan.ops.bits import MaskedMap, PackBits
from foreplan.ops.expr import Arg, Expr, parse_expr
from foreplan.ops.map import Map, merged_axes
from foreplan.runtime.cuda.device import Device
from foreplan.runtime.cuda.kernels.copies import dense_copy, transposition
from foreplan.runtime.cuda.kernels.expressions import statements
from foreplan.runtime.cuda.launch import (
    Address,
    Defines,
    Instruction,
    Launch,
    LaunchKernel,
    Word,
    for_each,
    input_at,
    output_at,
    stored,
)
from foreplan.runtime.kernel import pairs_alike

BYTES = 16  # a thread moves at a time


@dataclass(frozen=True)
class Tensor:
    """An operand of a loop over a shape.

    Attributes:
        start: where it begins.
        dtype: of its elements.
        strides: bytes from one element to the next along each axis of the shape, 0 where it is broadcast; of a mask,
            bits.
        bits: whether it is a mask of bits.
    """

    start: Address
    dtype: DType
    strides: tuple[int, ...]
    bits: bool = False


def elementwise(op: Op, inputs: Windows, outputs: Windows, device: Device) -> LaunchKernel:
    """A map; a map that copies moves bytes as they lie, or transposed tiles."""
    assert isinstance(op, Map)
    if op.exprs == ("a0",) and inputs[0].type == outputs[0].type:
        return LaunchKernel(copies(input_at(0), inputs[0], output_at(0), outputs[0]))
    shape = outputs[0].shape
    tensors = [broadcast(input_at(i), x, shape) for i, x in enumerate(inputs)]
    results = [broadcast(output_at(i), y, shape) for i, y in enumerate(outputs)]
    return LaunchKernel(map_launches(op.parsed, shape, tensors, results), overwrites=pairs_alike(inputs, outputs))


def copies(source: Address, x: Window, target: Address, y: Window) -> tuple[Instruction, ...]:
    """The launches that copy a tensor to another one of its type: by bytes, tiles or elements."""
    whole = dense_copy(source, x, target, y)
    found = transposition(source, x, target, y) if whole is None else whole
    if found is None:
        found = map_launches([Arg(0)], y.shape, [broadcast(source, x, y.shape)], [broadcast(target, y, y.shape)])
    return found


def masked(op: Op, inputs: Windows, outputs: Windows, device: Device) -> LaunchKernel:
    """A map whose first input is a mask of bits."""
    assert isinstance(op, MaskedMap)
    shape = outputs[0].shape
    tensors = [mask(input_at(0), shape), *(broadcast(input_at(i), x, shape) for i, x in enumerate(inputs) if i)]
    results = [broadcast(output_at(i), y, shape) for i, y in enumerate(outputs)]
    return LaunchKernel(
        map_launches(op.map.parsed, shape, tensors, results), overwrites=pairs_alike(inputs, outputs, 1)
    )


def pack(op: Op, inputs: Windows, outputs: Windows, device: Device) -> LaunchKernel:
    """The launch that makes a mask."""
    assert isinstance(op, PackBits)
    (x,) = inputs
    if not x.type.size:
        return LaunchKernel(())
    bits = mask(input_at(0), x.shape)
    order = sorted(range(len(x.shape)), key=lambda axis: -bits.strides[axis])
    axes = merged_axes(x.shape, [x.strides], order)
    lines = [*statements([parse_expr(op.condition)], ["a0"], [x.type.dtype], ["truth"]), "return truth;"]
    text = function("bool condition(Wide<ELEMENT> a0)", lines)
    index = ("INDEX", index_type(x.type.size))
    defines: Defines = (("RANK", len(axes)), ("ELEMENT", x.type.dtype), index)
    nbytes = x.type.size // 8
    numbers: list[Word] = [nbytes, input_at(0), output_at(0), *(n for n, _ in axes), *(steps[0] for _, steps in axes)]
    return LaunchKernel((for_each("pack_bits.cu", "pack_bits", nbytes, numbers, defines, generated=text),))


def map_launches(
    exprs: Sequence[Expr], shape: Shape, inputs: Sequence[Tensor], outputs: Sequence[Tensor]
) -> tuple[Launch, ...]:
    """The launch that computes expressions at each element of a shape; none where there is no element.

    Args:
        inputs: the tensors a0, a1, ….
        outputs: results of one expression each, rounded to their element types.
    """
    if not math.prod(shape):
        return ()
    tensors = [*inputs, *outputs]
    leader = outputs[0].strides
    order = sorted(range(len(shape)), key=lambda axis: -abs(leader[axis]))
    axes = merged_axes(shape, [x.strides for x in tensors], order)
    steps = [[strides[i] for _, strides in axes] for i in range(len(tensors))]
    kinds = [_kind(x, row[-1]) for x, row in zip(tensors, steps)]
    kinds[len(inputs) :] = ["row" if kind == "one" else kind for kind in kinds[len(inputs) :]]  # of a single element
    once = [kind != "one" and all(row[:-1]) for kind, row in zip(kinds, steps)]
    vector = _vector(kinds, tensors, once, axes[-1][0])
    units_a_row = ceil_div(axes[-1][0], vector)
    units = units_a_row * math.prod(extent for extent, _ in axes[:-1])
    numbers = [units, units_a_row, *(extent for extent, _ in axes)]
    sizes = (("RANK", len(axes)), ("OPERANDS", len(tensors)), ("VECTOR", vector), ("INDEX", index_type(units)))
    operands: list[Word] = []
    for x, row in zip(tensors, steps):
        operands += [x.start, *row]
    text = _compute(exprs, inputs, outputs, kinds, once)
    return (for_each("map.cu", "map", units, [*numbers, *operands], sizes, generated=text),)


def index_type(count: int) -> str:
    """A type that holds numbers up to a count, and a block of threads behind it."""
    return "u32" if count < 1 << 31 else "u64"


def _kind(x: Tensor, step: int) -> str:
    """How a tensor's elements lie along the innermost axis."""
    if x.bits:
        return "bits" if step == 1 else "scattered_bits"
    return "one" if step == 0 else "row" if step == x.dtype.itemsize else "gaps"


def _vector(kinds: Sequence[str], tensors: Sequence[Tensor], once: Sequence[bool], extent: int) -> int:
    """Elements that a thread computes: as many of the widest elements side by side as move at a time.

    Inputs repeated along an outer axis come from a cache, so they do not limit this number.
    """
    widths = [x.dtype.itemsize for x, kind, alone in zip(tensors, kinds, once) if kind == "row" and alone]
    vector = BYTES // max(widths, default=BYTES)
    while vector > extent:
        vector //= 2
    return vector


def _compute(
    exprs: Sequence[Expr],
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    kinds: Sequence[str],
    once: Sequence[bool],
) -> str:
    """The functions of cuda/map.cu: one computes a unit, and one checks its alignment.

    Args:
        kinds: how each tensor lies along the innermost axis.
        once: whether its elements are read once, and so come from memory: these are read first.
    """
    n, dtypes, tensors = len(inputs), [x.dtype for x in inputs], (*inputs, *outputs)
    given = [f"{kind}<{stored(x.dtype)}, WHOLE>" for x, kind in zip(tensors, kinds)]
    order = sorted(range(n), key=lambda i: not once[i])
    reads = [f"const auto x{i} = read_{given[i]}(at[{i}], count);" for i in order]
    results = [f"Vector<{stored(y.dtype)}, VECTOR> y{i};" for i, y in enumerate(outputs)]
    arguments = [f"const auto a{i} = widened(x{i}.at[i]);" for i in range(n)]
    names = [f"r{i}" for i in range(len(outputs))]
    body = statements(exprs, [f"a{i}" for i in range(n)], dtypes, names)
    ends = [f"y{i}.at[i] = narrowed<{stored(y.dtype)}>(r{i});" for i, y in enumerate(outputs)]
    loop = ["    " + line for line in (*arguments, *body, *ends)]
    writes = [f"write_{given[n + i]}(at[{n + i}], y{i}, count);" for i in range(len(outputs))]
    lines = [*reads, *results, "#pragma unroll", "for (int i = 0; i < VECTOR; ++i) {", *loop, "}", *writes]
    terms = [
        f"misplaced_{kind}<{stored(x.dtype)}>(at[{i}])"
        for i, (x, kind) in enumerate(zip(tensors, kinds))
        if kind in ("row", "bits")
    ]
    lying = function("u32 misplaced(const Place (&at)[OPERANDS])", [f"return {' | '.join(terms) or 0};"])
    head = "void compute(const Place (&at)[OPERANDS], i64 count)"
    return lying + "template <bool WHOLE> " + function(head, lines)


def function(head: str, lines: Sequence[str]) -> str:
    """A device function of generated statements."""
    body = "".join(f"    {line}\n" for line in lines)
    return f"__device__ inline {head} {{\n{body}}}\n"


def broadcast(start: Address, window: Window, shape: Shape) -> Tensor:
    """A tensor that is broadcast to the shape of a loop."""
    return Tensor(start, window.type.dtype, window.broadcast(shape).strides)


def mask(start: Address, shape: Shape) -> Tensor:
    """A mask's bits: channels last of four axes, else in C order."""
    type = TensorType(BOOL, shape)
    order = channels_last(type) if type.rank == 4 else Window.dense(type)
    return Tensor(start, BOOL, order.strides, bits=True)
