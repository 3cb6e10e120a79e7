"""Statistics of channels, and with them the gradient of batch normalisation; the normalisation itself is a map."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from foreplan.base.units import ceil_div
from foreplan.graph import DType, Op, Window
from foreplan.graph.layouts import channels_last, lie_alike
from foreplan.graph.op import Types, Windows
from foreplan.graph.types import Shape
from foreplan.ops.expr import Arg, Expr, cast, parse_expr, substitute
from foreplan.ops.map import merged_axes
from foreplan.ops.norm.batch import BatchNormGrad, ChannelMoments
from foreplan.ops.norm.masked import MaskedBatchNormGrad
from foreplan.ops.norm.sync import ChannelSums
from foreplan.runtime.cuda.device import Device
from foreplan.runtime.cuda.kernels.expressions import statements
from foreplan.runtime.cuda.kernels.map import Tensor, broadcast, function, index_type, map_launches, mask
from foreplan.runtime.cuda.kernels.reduce import power_of_2
from foreplan.runtime.cuda.launch import (
    THREADS,
    Address,
    Defines,
    Launch,
    LaunchKernel,
    Scratch,
    Word,
    input_at,
    launch,
    output_at,
    stored,
)

ACROSS = 32  # threads of a block for neighbouring channels, at most
CHANNELS = 8  # threads of a block that adds up parts
BYTES = 16  # of channels that lie side by side, that a thread reads at a time
LEAST = 4  # positions of a part for each thread of a channel: as many as it reads ahead
_GRADIENT = parse_expr("((a1 - (((a0 - a2) * a3) + a4)) * a5)")


@dataclass(frozen=True)
class _Work:
    """The tensors of kernels over channels.

    Attributes:
        x: images.
        others: further tensors of their shape, as kernels take them behind x.
        parts: of the positions, each of which has sums of its own.
    """

    x: Tensor
    shape: Shape
    others: tuple[Tensor, ...]
    parts: int

    @property
    def vector(self) -> int:
        """Channels of a thread: as many as are read at a time, if they lie side by side."""
        item = self.x.dtype.itemsize
        together = all(each.strides[1] == item for each in (self.x, *self.others) if not each.bits)
        return power_of_2(self.shape[1], 1, BYTES // item) if together else 1

    @property
    def across(self) -> int:
        """Threads for neighbouring channels."""
        return power_of_2(ceil_div(self.shape[1], self.vector), 1, ACROSS)

    @property
    def blocks(self) -> int:
        """Blocks that a multiprocessor can run at a time: with more tensors, each needs more registers."""
        return 3 if len(self.others) < 4 else 2

    @property
    def positions(self) -> int:
        """Of a channel."""
        return math.prod(self.shape) // self.shape[1]

    def launches(
        self, file: str, entries: tuple[str, str], words: Sequence[Word], defines: Defines = (), generated: str = ""
    ) -> tuple[Launch, Launch]:
        """The launch over parts, and the one that adds up their results.

        Args:
            words: the kernels' arguments behind the tensors.
        """
        tensors, channels = (self.x, *self.others), self.shape[1]
        axes = merged_axes(self.shape, [each.strides for each in tensors], (0, *range(2, len(self.shape))))
        index = index_type(max(self.positions, channels))
        sizes: Defines = (("VECTOR", self.vector), ("ACROSS", self.across), ("BLOCKS", self.blocks))
        sizes += (("RANK", len(axes)), ("INDEX", index))
        every: Defines = (("ELEMENT", self.x.dtype), *sizes, *defines)
        given: list[Word] = [channels, self.positions, ceil_div(self.positions, self.parts), self.parts]
        given += [n for n, _ in axes]
        for i, each in enumerate(tensors):
            given += [each.start, each.strides[1], *(steps[i] for _, steps in axes)]
        given += words
        first, last = (
            (ceil_div(channels, n), p, 1) for n, p in ((self.vector * self.across, self.parts), (CHANNELS, 1))
        )
        return (
            launch(file, entries[0], first, given, every, generated=generated),
            launch(file, entries[1], last, given, every, generated=generated),
        )


def _work(x: Tensor, shape: Shape, others: Sequence[Tensor], device: Device) -> _Work:
    """As many parts as the multiprocessors can run at a time, none short or empty."""
    work = _Work(x, shape, tuple(others), 1)
    positions, rows = work.positions, THREADS // work.across
    wanted = work.blocks * device.multiprocessors // ceil_div(shape[1], work.vector * work.across)
    parts = max(1, min(wanted, positions // (LEAST * rows)))
    return replace(work, parts=ceil_div(positions, ceil_div(positions, parts)))


def moments(op: Op, inputs: Windows, outputs: Windows, device: Device) -> LaunchKernel:
    """Moments of each part, then of all."""
    assert isinstance(op, ChannelMoments)
    (x,), scratch = inputs, Scratch()
    work = _work(broadcast(input_at(0), x, x.shape), x.shape, (), device)
    nbytes = work.parts * outputs[0].type.nbytes
    words = [scratch.take(nbytes), scratch.take(nbytes), output_at(0), output_at(1)]
    return LaunchKernel(work.launches("channel_moments.cu", ("moments", "moments_of_parts"), words), scratch.nbytes)


def gradient(op: Op, inputs: Windows, outputs: Windows, device: Device) -> LaunchKernel:
    """Sums of parts, their totals, and a map."""
    assert isinstance(op, BatchNormGrad)
    x, *_, g = inputs
    return _gradient(Arg(0), [broadcast(input_at(4), g, x.shape)], op.epsilon, False, inputs, outputs, device)


def gradient_sums(op: Op, inputs: Windows, outputs: Windows, device: Device) -> LaunchKernel:
    """Sums of parts, then their totals."""
    assert isinstance(op, ChannelSums)
    (x, mean, g), (total, _), scratch = inputs, outputs, Scratch()
    images, there = broadcast(input_at(0), x, x.shape), broadcast(input_at(2), g, x.shape)
    work = _work(images, x.shape, (images, there), device)
    sums, moments = (scratch.take(work.parts * total.type.nbytes) for _ in range(2))
    vectors: list[Word] = [input_at(1)] * 3  # of which the mean alone is read
    launches = work.launches(
        "channel_gradients.cu",
        ("gradient_sums", "sums_of_parts"),
        [0.0, *vectors, sums, moments, output_at(1), output_at(0), sums],
        (("OPERANDS", 1), ("KEEPS", 0), *((name, mean.type.dtype) for name in ("SCALE", "MEAN", "VARIANCE"))),
        _reading(Arg(0), [there]),
    )
    return LaunchKernel(launches, scratch.nbytes)


def masked_gradient(op: Op, inputs: Windows, outputs: Windows, device: Device) -> LaunchKernel:
    """Likewise for a gradient that a map makes of a mask and tensors while it is read."""
    assert isinstance(op, MaskedBatchNormGrad)
    shape = inputs[0].shape
    made_of = [mask(input_at(4), shape), *(broadcast(input_at(i), x, shape) for i, x in enumerate(inputs) if i > 4)]
    return _gradient(parse_expr(op.expr), made_of, op.epsilon, op.keeps, inputs, outputs, device)


def _gradient(
    expr: Expr,
    made_of: Sequence[Tensor],
    epsilon: float,
    keeps: bool,
    inputs: Windows,
    outputs: Windows,
    device: Device,
) -> LaunchKernel:
    """The kernel of a gradient g.

    Args:
        expr: g as an expression of its operands.
        keeps: whether g is an output, behind dx, dscale and dbias.
    """
    x, (dx, dscale, *_), scratch = inputs[0], outputs, Scratch()
    images, dtype, nbytes = broadcast(input_at(0), x, x.shape), dscale.type.dtype, dscale.type.nbytes
    kept = broadcast(output_at(3), outputs[3], x.shape) if keeps else images
    work = _work(images, x.shape, (kept, *made_of), device)
    sums, moments = scratch.take(work.parts * nbytes), scratch.take(work.parts * nbytes)
    vectors = scratch.take(3 * nbytes)
    words: list[Word] = [float(epsilon), input_at(1), input_at(2), input_at(3), sums, moments]
    words += [output_at(1), output_at(2), vectors]
    vector_types = [(name, inputs[i].type.dtype) for i, name in enumerate(("SCALE", "MEAN", "VARIANCE"), 1)]
    launches = work.launches(
        "channel_gradients.cu",
        ("gradient_sums", "gradient_of_sums"),
        words,
        (("OPERANDS", len(made_of)), ("KEEPS", int(keeps)), *vector_types),
        _reading(expr, made_of),
    )
    made = [(vectors.behind(i * nbytes), dtype) for i in range(3)]
    again = [kept] if keeps else made_of
    read = [images, *(_of_channels(*each, x) for each in ((input_at(2), inputs[2].type.dtype), *made)), *again]
    g = cast(Arg(5) if keeps else substitute(expr, [Arg(5 + i) for i in range(len(made_of))]), dtype)
    # Without a cast, a narrow x less a narrow mean would be rounded before it is multiplied.
    whole = substitute(_GRADIENT, [cast(Arg(0), dtype), g, *(Arg(1 + i) for i in range(4))])
    last = map_launches([whole], x.shape, read, [broadcast(output_at(0), dx, x.shape)])
    # A pass over x and g's operands, which may write g; and one over x and g, or its operands, which writes dx.
    moved = [images, *made_of, *[kept] * keeps, images, *again, images]
    total = sum(x.type.size * (1 / 8 if each.bits else each.dtype.itemsize) for each in moved)
    overwrites = [(0, 0)] if lie_alike(x, dx) else []
    for i in range(4, len(inputs)):  # a mask lies in bytes, unlike images
        overwrites += [(0, i)] * lie_alike(inputs[i], dx)
        overwrites += [(3, i)] * (keeps and lie_alike(inputs[i], outputs[3]))
    price = round(total / device.bytes_per_second * 1e9)
    return LaunchKernel((*launches, *last), scratch.nbytes, tuple(overwrites), nanoseconds=price)


def _of_channels(start: Address, dtype: DType, x: Window) -> Tensor:
    """A vector as a tensor of x's shape."""
    return Tensor(start, dtype, tuple(dtype.itemsize * (axis == 1) for axis in range(len(x.shape))))


def _reading(expr: Expr, made_of: Sequence[Tensor]) -> str:
    """The functions `gradients` and `are_whole` of cuda/channel_gradients.cu."""
    places, reads, whole = [], [], []
    for i, each in enumerate(made_of):
        x, type = f"a.operands[{i}]", stored(each.dtype)
        at = f"{x}.offset(positions[j], a.extents, own.channel)"
        read = f"read_bits<WHOLE>({x}, {at}" if each.bits else f"read<{type}, WHOLE>({x}.start + {at}"
        places.append(f"Vector<{type}, VECTOR> x{i}[AHEAD];")
        reads.append(f"x{i}[j] = {read}, own.left);")
        whole.append(f"{x}.are_whole_bits()" if each.bits else f"{x}.is_whole<{type}>()")
    names = [f"a{i}" for i in range(len(made_of))]
    body = [f"const auto a{i} = widened(x{i}[j].at[i]);" for i in range(len(made_of))]
    body += [*statements([expr], names, [each.dtype for each in made_of], ["r"]), "g[j].at[i] = r;"]
    lines = [*places, *_unrolled("j", "AHEAD", reads), *_unrolled("j", "AHEAD", _unrolled("i", "VECTOR", body))]
    positions, g = "const i64 (&positions)[AHEAD]", "Vector<Number, VECTOR> (&g)[AHEAD]"
    of_all = function("bool are_whole(const Arguments& a)", [f"return {' && '.join(whole)};"])
    of_each = function(f"void gradients(const Arguments& a, const Own& own, {positions}, {g})", lines)
    return f"{of_all}template <bool WHOLE, int AHEAD> {of_each}"


def _unrolled(name: str, count: str, lines: Sequence[str]) -> list[str]:
    """A loop of generated statements."""
    head = f"for (int {name} = 0; {name} < {count}; ++{name}) {{"
    return ["#pragma unroll", head, *("    " + line for line in lines), "}"]


def layout(op: Op, inputs: Windows, outputs: Types) -> list[Window]:
    """Images as the first input lies, or with their channels last."""
    x = inputs[0]
    return [(x if x.is_compact else channels_last(y)) if y == x.type else Window.dense(y) for y in outputs]


def reads(op: Op, index: int, window: Window) -> Window:
    """Images as they lie; vectors without gaps."""
    return window if len(window.shape) > 1 else Window.dense(window.type)
