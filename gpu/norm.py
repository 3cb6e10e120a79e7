"""Statistics of channels, and the gradient of batch normalisation by them; the normalisation itself is a map."""

from __future__ import annotations

from dataclasses import dataclass

from foreplan.gpu.device import Device
from foreplan.gpu.expressions import stored
from foreplan.gpu.launch import (
    Address,
    Launch,
    LaunchKernel,
    Scratch,
    Source,
    Windows,
    Word,
    ceil_div,
    input_at,
    launch,
    output_at,
)
from foreplan.gpu.map import Tensor, broadcast, index_type, map_launches
from foreplan.graph import Op, Window
from foreplan.graph.layouts import channels_last, lie_alike
from foreplan.graph.op import Types
from foreplan.ops.batch_norm import BatchNormGrad, ChannelMoments
from foreplan.ops.expr import parse_expr
from foreplan.ops.map import merged_axes

CHANNELS = 32  # of a block
LANES = 8  # threads for each of them
THREADS = CHANNELS * LANES
LEAST = 32 * LANES  # positions of a part
MOST_PARTS = 512
_GRADIENT = parse_expr("((a1 - (((a0 - a2) * a3) + a4)) * a5)")


@dataclass(frozen=True)
class _Work:
    """What the kernels of cuda/channels.cu work on, beside the addresses that they are given.

    Attributes:
        x: images.
        g: others of the same shape, or x itself.
        parts: of the positions, each of which has sums of its own.
    """

    x: Window
    g: Window
    epsilon: float
    parts: int

    @property
    def positions(self) -> int:
        """Of a channel."""
        return self.x.type.size // self.x.shape[1]

    def launch(self, entry: str, x: Address, g: Address, given: tuple[Address, ...], parts: int) -> Launch:
        """One launch: `given` are the vectors that the kernels take, in their order."""
        shape, channels = self.x.shape, self.x.shape[1]
        axes = merged_axes(shape, [self.x.strides, self.g.strides], (0, *range(2, len(shape))))
        index = index_type(max(self.positions, channels))
        defines = (("ELEMENT", stored(self.x.type.dtype)), ("RANK", len(axes)), ("INDEX", index))
        words: list[Word] = [x, g, channels, self.positions, ceil_div(self.positions, self.parts), self.parts]
        words += [self.x.strides[1], self.g.strides[1], *(n for n, _ in axes)]
        words += [steps[0] for _, steps in axes] + [steps[1] for _, steps in axes]
        words += [float(self.epsilon), *given]
        grid = (ceil_div(channels, CHANNELS), parts, 1)
        return launch(Source("channels.cu", defines), entry, grid, THREADS, words)


def _work(x: Window, g: Window, epsilon: float, device: Device) -> _Work:
    """In as many parts as keep the multiprocessors at work, none of them short, none of them empty."""
    positions = x.type.size // x.shape[1]
    wanted = ceil_div(4 * device.multiprocessors, ceil_div(x.shape[1], CHANNELS))
    parts = max(1, min(wanted, positions // LEAST, MOST_PARTS))
    return _Work(x, g, epsilon, ceil_div(positions, ceil_div(positions, parts)))


def moments(op: Op, inputs: Windows, outputs: Windows, device: Device) -> LaunchKernel:
    """Of each part, then of what parts have."""
    assert isinstance(op, ChannelMoments)
    (x,), scratch = inputs, Scratch()
    work = _work(x, x, 0.0, device)
    nbytes = work.parts * outputs[0].type.nbytes
    first, second = scratch.take(nbytes), scratch.take(nbytes)
    none = output_at(0)  # what only gradients have
    given = (none, none, none, first, second, output_at(0), output_at(1), none)
    launches = (
        work.launch("moments", input_at(0), input_at(0), given, work.parts),
        work.launch("moments_of_parts", input_at(0), input_at(0), given, 1),
    )
    return LaunchKernel(launches, scratch.nbytes)


def gradient(op: Op, inputs: Windows, outputs: Windows, device: Device) -> LaunchKernel:
    """Sums of parts, what they come to, and a map."""
    assert isinstance(op, BatchNormGrad)
    x, *_, g = inputs
    dx, dscale, _ = outputs
    work, scratch = _work(x, g, op.epsilon, device), Scratch()
    dtype, nbytes = dscale.type.dtype, dscale.type.nbytes
    first, second = scratch.take(work.parts * nbytes), scratch.take(work.parts * nbytes)
    vectors = scratch.take(3 * nbytes)
    given = (input_at(1), input_at(2), input_at(3), first, second, output_at(1), output_at(2), vectors)
    launches = (
        work.launch("gradient_sums", input_at(0), input_at(4), given, work.parts),
        work.launch("gradient_of_sums", input_at(0), input_at(4), given, 1),
    )
    along = tuple(dtype.itemsize * (axis == 1) for axis in range(len(x.shape)))
    starts = [input_at(2), *(Address(vectors.of, 0, vectors.offset + i * nbytes) for i in range(3))]
    read = [broadcast(input_at(0), x, x.shape), broadcast(input_at(4), g, x.shape)]
    read += [Tensor(start, dtype, along) for start in starts]
    last = map_launches([_GRADIENT], x.shape, read, [broadcast(output_at(0), dx, x.shape)])
    overwrites = tuple((0, i) for i in (4, 0) if lie_alike(inputs[i], dx))
    return LaunchKernel((*launches, *last), scratch.nbytes, overwrites)


def layout(op: Op, inputs: Windows, outputs: Types) -> list[Window]:
    """Images as the first input lies, or with their channels last."""
    x = inputs[0]
    return [(x if x.is_compact else channels_last(y)) if y == x.type else Window.dense(y) for y in outputs]


def reads(op: Op, index: int, window: Window) -> Window:
    """Images as they lie; vectors without gaps."""
    return window if len(window.shape) > 1 else Window.dense(window.type)
