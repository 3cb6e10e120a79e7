"""Statistics of channels, and the gradient of batch normalisation by them; the normalisation itself is a map."""

from __future__ import annotations

from dataclasses import dataclass, replace

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
from foreplan.gpu.reduce import power_of_2
from foreplan.graph import Op, Window
from foreplan.graph.layouts import channels_last, lie_alike
from foreplan.graph.op import Types
from foreplan.ops.batch_norm import BatchNormGrad, ChannelMoments
from foreplan.ops.expr import parse_expr
from foreplan.ops.map import merged_axes

THREADS = 256
CHANNELS = 32  # of a block that puts parts together
BYTES = 16  # of channels that lie side by side, that a thread reads at a time
LEAST = 16  # positions of a part for each thread of a channel
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
    def vector(self) -> int:
        """Channels of a thread: as many as are read at a time, where they lie side by side."""
        item, channels = self.x.type.dtype.itemsize, self.x.shape[1]
        together = self.x.strides[1] == item == self.g.strides[1]
        return power_of_2(channels, 1, BYTES // item) if together else 1

    @property
    def across(self) -> int:
        """Threads for neighbouring channels."""
        return power_of_2(ceil_div(self.x.shape[1], self.vector), 1, CHANNELS)

    @property
    def positions(self) -> int:
        """Of a channel."""
        return self.x.type.size // self.x.shape[1]

    def launch(self, entry: str, x: Address, g: Address, given: tuple[Address, ...], last: bool = False) -> Launch:
        """One launch: `given` are the vectors that kernels take, in their order; the last one puts parts together."""
        shape, channels = self.x.shape, self.x.shape[1]
        axes = merged_axes(shape, [self.x.strides, self.g.strides], (0, *range(2, len(shape))))
        index = index_type(max(self.positions, channels))
        defines = (
            ("ELEMENT", stored(self.x.type.dtype)),
            ("VECTOR", self.vector),
            ("ACROSS", self.across),
            ("RANK", len(axes)),
            ("INDEX", index),
        )
        words: list[Word] = [x, g, channels, self.positions, ceil_div(self.positions, self.parts), self.parts]
        words += [self.x.strides[1], self.g.strides[1], *(n for n, _ in axes)]
        words += [steps[0] for _, steps in axes] + [steps[1] for _, steps in axes]
        words += [float(self.epsilon), *given]
        each, parts = (CHANNELS, 1) if last else (self.vector * self.across, self.parts)
        grid = (ceil_div(channels, each), parts, 1)
        return launch(Source("channels.cu", defines), entry, grid, THREADS, words)


def _work(x: Window, g: Window, epsilon: float, device: Device) -> _Work:
    """In as many parts as keep the multiprocessors at work, none of them short, none of them empty."""
    work = _Work(x, g, epsilon, 1)
    positions, rows = work.positions, THREADS // work.across
    wanted = ceil_div(4 * device.multiprocessors, ceil_div(x.shape[1], work.vector * work.across))
    parts = max(1, min(wanted, positions // (LEAST * rows), MOST_PARTS))
    return replace(work, parts=ceil_div(positions, ceil_div(positions, parts)))


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
        work.launch("moments", input_at(0), input_at(0), given),
        work.launch("moments_of_parts", input_at(0), input_at(0), given, last=True),
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
        work.launch("gradient_sums", input_at(0), input_at(4), given),
        work.launch("gradient_of_sums", input_at(0), input_at(4), given, last=True),
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
