"""How ops compute on parts: given how one tensor of a node is cut, how its others are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foreplan.base.errors import ShapeError
from foreplan.graph import Node, Op, TensorType
from foreplan.graph.axes import Axes, Dim, Dims, Part
from foreplan.graph.shard import Shard
from foreplan.passes.narrowing import axes_of
from foreplan.passes.tensor.reductions import CLOSINGS, Close, entropies, rows

# The ops that ranks compute whole though they could compute parts: these make the diffusion U-Net smaller by 14 %, and
# the step of ConvNeXt larger by 3 %.
CLOSED = frozenset({"conv", "conv_data_grad", "conv_map"})
Placement = Shard | None  # None: every rank has the whole tensor


class StaysWhole(Exception):
    """A tensor cannot be cut as asked; the message says why."""


@dataclass(frozen=True)
class Shards:
    """How the tensors of a node are cut.

    Attributes:
        inputs, outputs: of each.
        op: what computes the parts.
        close: what makes the outputs instead, which are whole; None: outputs are cut.
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    op: Op
    close: Close | None = None


@dataclass(frozen=True)
class Known:
    """A tensor of a node whose cut is known.

    Attributes:
        index: among the node's inputs, or among its outputs if `made`.
    """

    node: Node
    index: int
    made: bool
    shard: Shard

    @property
    def inputs(self) -> list[TensorType]:
        """The types of the node's inputs."""
        return [value.type for value in self.node.inputs]

    @property
    def outputs(self) -> list[TensorType]:
        """The types of its outputs."""
        return [value.type for value in self.node.outputs]

    @property
    def type(self) -> TensorType:
        """Of the tensor."""
        return (self.outputs if self.made else self.inputs)[self.index]


def shards_of(known: Known) -> Shards:
    """How the other tensors of a node are cut, if ranks compute parts of its op.

    Raises:
        StaysWhole: they do not, or cannot compute with such a part; says why.
    """
    if known.node.op.name in CLOSED:
        raise StaysWhole(f"{known.node.op.name} needs the whole of {known.type}")
    return possible_shards(known)


def possible_shards(known: Known) -> Shards:
    """How the other tensors of a node are cut: one factor of its op's axes is, wherever they walk it.

    Raises:
        StaysWhole: its op cannot compute with such a part; says why.
    """
    op, types = known.node.op, [*known.inputs, *known.outputs]
    axes = axes_of(known.node)
    if axes is None:
        raise StaysWhole(f"{op.name} needs the whole of {known.type}")
    dims, first = [*axes.inputs, *axes.outputs], len(known.inputs)
    dim = dims[known.index + (first if known.made else 0)][known.shard.axis]
    name, length = _factor(known, dim, axes)
    cut = [_cut(known, each, whole, name, length) for each, whole in zip(dims, types)]
    for shard, whole in zip(cut, types):
        if shard is not None:
            check(shard, whole)
    if length % known.shard.ranks:
        raise StaysWhole(f"{known.shard.ranks} ranks do not divide {op.name} of {known.type} into {length}")
    inputs, outputs = tuple(cut[:first]), tuple(cut[first:])
    if name in axes.sums and None in outputs:
        return Shards(inputs, outputs, op, _close(known, axes, name, length, outputs))
    parts = [whole if shard is None else shard.of(whole) for shard, whole in zip(cut, types)]
    given, made = parts[:first], parts[first:]
    part = op.part(_told(known, axes, name, given, made))
    try:
        fits = part is not None and part.result_types(given) == tuple(made)
    except ShapeError:
        fits = False
    if part is None or not fits:
        raise StaysWhole(f"{op.name} of {known.type} cannot be computed in parts")
    return Shards(inputs, outputs, part)


def _factor(known: Known, dim: Dim, axes: Axes) -> tuple[str, int]:
    """The factor that a cut axis is cut by, and how much of it is a block."""
    shard, op = known.shard, known.node.op
    check(shard, known.type)
    block = known.type.shape[shard.axis] // shard.blocks
    for name, unit in dim.terms:
        extent = axes.extents[name]
        if unit < block <= unit * extent and block % unit == 0 and extent % (block // unit) == 0:
            if name in axes.whole:
                raise StaysWhole(f"{op.name} needs the whole of axis {shard.axis} of {known.type}")
            return name, block // unit
    raise StaysWhole(f"{op.name} cannot compute with parts of {known.type}, {shard}")


def _cut(known: Known, dims: Dims, whole: TensorType, name: str, length: int) -> Placement:
    """How a tensor is cut if blocks of a factor are; None: it does not walk it."""
    for axis, dim in enumerate(dims):
        unit = dict(dim.terms).get(name)
        if unit is None:
            continue
        extent, block = whole.shape[axis], length * unit
        if extent % block or (not dim.dense and (len(dim.terms) > 1 or unit != 1 or dim.start % block)):
            op = known.node.op.name
            raise StaysWhole(f"{op} reads elements along axis {axis} of {whole} that are not whole blocks of {block}")
        return Shard(known.shard.ranks, axis, extent // block)
    return None


def _close(known: Known, axes: Axes, name: str, length: int, outputs: Sequence[Placement]) -> Close:
    """What makes whole outputs of what ranks have along a factor that is summed."""
    op, how = known.node.op, axes.sums[name]
    close = CLOSINGS.get(how)
    if known.made or close is None or any(shard is not None for shard in outputs):
        raise StaysWhole(f"{how} of {op.name} needs the whole of axis {known.shard.axis} of {known.type}")
    if op.accumulates and len(known.inputs) > op.accumulates:
        raise StaysWhole(f"{op.name} that adds to another tensor cannot be a sum over ranks")
    if close in (rows, entropies) and length != axes.extents[name]:
        raise StaysWhole(f"{op.name} of {known.type} needs neighbours along axis {known.shard.axis}")
    return close


def _told(known: Known, axes: Axes, name: str, given: Sequence[TensorType], made: Sequence[TensorType]) -> Part:
    """What `Op.part` may ask of the parts of a rank."""
    ranks, windows = known.shard.ranks, dict[tuple[int, int], tuple[int, int, int]]()
    for tensor, dims in enumerate(axes.inputs):
        for axis, dim in enumerate(dims):
            if not dim.dense and len(dim.terms) == 1:
                windows[tensor, axis] = dim.start // (ranks if dim.terms[0][0] == name else 1), 0, 0
    places = {name: (0, axes.extents[name] // ranks, 1)}
    return Part([x.shape for x in given], [x.shape for x in made], places, windows)


def check(shard: Shard, whole: TensorType) -> None:
    """Check that a tensor can be cut so.

    Raises:
        StaysWhole: it cannot; names the nearest numbers of ranks that could.
    """
    if shard.divides(whole):
        return
    extent = whole.shape[shard.axis] // shard.blocks
    if not extent:
        raise StaysWhole(f"axis {shard.axis} of {whole} is no row of {shard.blocks} blocks")
    fitting = [n for n in range(1, extent + 1) if extent % n == 0]
    near = [max(n for n in fitting if n <= shard.ranks), *[n for n in fitting if n > shard.ranks][:1]]
    fits = " or ".join(map(str, near))
    raise StaysWhole(
        f"{shard.ranks} ranks do not divide the {extent} elements along axis {shard.axis} of {whole} ({fits} would)"
    )
