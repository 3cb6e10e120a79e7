"""Kernels of several primitives of oneDNN: one after the other, on shared scratch memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from foreplan.base.units import align_up
from foreplan.graph import DType, TensorType, Window
from foreplan.graph.blocks import Blocks
from foreplan.graph.op import Arrays
from foreplan.runtime.cpu.codegen.epilogue import FURTHER, MADE
from foreplan.runtime.cpu.gemm.products import Product
from foreplan.runtime.cpu.kernels.copies import clear, copy
from foreplan.runtime.cpu.kernels.rows import Rows, rows_along
from foreplan.runtime.cpu.onednn import library as c
from foreplan.runtime.cpu.onednn import primitives
from foreplan.runtime.cpu.onednn.primitives import Description, Primitive
from foreplan.runtime.kernel import Refused, Run, one_after_another

ALIGNMENT = 64
Place = tuple[str, int, int]  # "in" or "out" and its index, "scratch" or "zero"; and a byte in it
INPUT, WEIGHTS, OUTPUT, ZERO = ("in", 0, 0), ("in", 1, 0), ("out", 0, 0), ("zero", 0, 0)


@dataclass(frozen=True)
class Stage:
    """A primitive, or foreplan's own product, within a kernel: the place of each of its arguments.

    Attributes:
        arguments: by argument, an input, an output or the scratch memory, and a byte in it.
    """

    primitive: Product
    arguments: Mapping[int, Place]


@dataclass(frozen=True)
class Staged:
    """Primitives that run one after the other.

    Attributes:
        base: index of an input that is copied to output 0 first, unless it lies there; or -1.
        cleared: whether output 0 is zero at first.
        nanoseconds: predicted, if there are several ways; None: by the op's flops and bytes.
        mapped: pairs of an output and the input whose place it takes.
        wants: the blocks in which weights, input 1, would not be packed with every run.
    """

    stages: tuple[Stage, ...]
    workspace: int
    base: int = -1
    cleared: bool = False
    nanoseconds: int | None = None
    mapped: tuple[tuple[int, int], ...] = ()
    wants: Blocks | None = None

    @property
    def overwrites(self) -> tuple[tuple[int, int], ...]:
        """The input that is added to may be changed in place."""
        return ((0, self.base),) if self.base >= 0 else self.mapped

    def bind(self, inputs: Arrays, outputs: Arrays, workspace: np.ndarray) -> Run:
        """The primitives, bound."""
        arrays = {"in": inputs, "out": outputs, "scratch": [workspace], "zero": [_ZERO]}
        starts = {kind: [array.ctypes.data for array in found] for kind, found in arrays.items()}
        runs: list[Run] = []
        if self.base >= 0 and starts["in"][self.base] != starts["out"][0]:
            runs.append(copy(outputs[0], inputs[self.base]))
        if self.cleared:
            runs.append(clear(outputs[0]))
        for stage in self.stages:
            addresses = {a: starts[kind][index] + byte for a, (kind, index, byte) in stage.arguments.items()}
            runs.append(stage.primitive.bind(addresses))
        return one_after_another(*runs)


_ZERO = np.zeros(16, np.float32)


class Stages:
    """Stages as they are added, and the scratch memory that they share.

    Attributes:
        wants: see `Staged`.
    """

    def __init__(self) -> None:
        self.wants: Blocks | None = None
        self.stages: list[Stage] = []
        self.kept = 0  # bytes of scratch memory in use between stages
        self.most = 0

    def keep(self, nbytes: int) -> Place:
        """Take scratch memory until the end."""
        place = ("scratch", 0, self.kept)
        self.kept += align_up(nbytes, ALIGNMENT)
        self.most = max(self.most, self.kept)
        return place

    def run(self, primitive: Product, arguments: Mapping[int, Place]) -> None:
        """Add a stage, with its own scratch memory above the memory that is kept."""
        if primitive.scratchpad:
            arguments = {**arguments, c.SCRATCHPAD: ("scratch", 0, self.kept)}
            self.most = max(self.most, self.kept + align_up(primitive.scratchpad, ALIGNMENT))
        self.stages.append(Stage(primitive, arguments))

    def weights(self, given: Window, wanted: Description, place: Place, blocks: Blocks | None = None) -> Place:
        """Weights in the layout that a primitive wants.

        Args:
            blocks: those in which they lie already.

        Raises:
            Refused: the primitive wants others.
        """
        if blocks is not None:
            if wanted.blocks != blocks:
                raise Refused(f"weights in the blocks {blocks}")
            return place
        described = Description.of(given)
        if described == wanted:
            return place
        self.wants = wanted.blocks if given.is_dense else None
        here = self.keep(wanted.nbytes)
        self.run(primitives.reorder(described, wanted), {c.SRC: place, c.DST: here})
        return here

    def positions(self, image: Window, place: Place) -> tuple[Window, Place]:
        """An image as a matrix of positions and channels: itself, if it has this layout, or a copy."""
        if rows := rows_along(image, 1):
            return matrix(rows, image.type.dtype), place
        _, place = self.without_gaps(image, place)
        return positions_of(image.type), place

    def without_gaps(self, image: Window, place: Place) -> tuple[Window, Place]:
        """An image that lies with channels last and without gaps: itself or a copy."""
        if image.is_compact and rows_along(image, 1) is not None:
            return image, place
        whole = channels_together(image.type)
        here = self.keep(whole.type.nbytes)
        self.run(primitives.reorder(Description.of(image), Description.of(whole)), {c.SRC: place, c.DST: here})
        return whole, here

    def of_images(
        self, make: Callable[..., Primitive], *images: tuple[Window, Place]
    ) -> tuple[Primitive, Sequence[tuple[Window, Place]]]:
        """A primitive of images as they lie, or of copies without gaps; and the images that it takes.

        Raises:
            Refused: there is neither.
        """
        try:
            return make(*(window for window, _ in images)), images
        except Refused:
            whole = [self.without_gaps(*image) for image in images]
            return make(*(window for window, _ in whole)), whole

    def finish(
        self,
        base: int = -1,
        cleared: bool = False,
        nanoseconds: int | None = None,
        mapped: tuple[tuple[int, int], ...] = (),
    ) -> Staged:
        """The kernel."""
        return Staged(tuple(self.stages), self.most, base, cleared, nanoseconds, mapped, self.wants)


def beside(own: int, inputs: int, outputs: int = 1) -> dict[int, Place]:
    """The arguments of a product's epilogue: inputs from number `own` on, and all outputs but the first."""
    further = {FURTHER + i: ("in", number, 0) for i, number in enumerate(range(own, inputs))}
    return further | {MADE + i: ("out", i, 0) for i in range(1, outputs)}


def channels_together(type: TensorType) -> Window:
    """Images [N, C, ...] of any rank with the channels of a position side by side, and no gaps."""
    turned = Window.dense(type.with_shape((type.shape[0], *type.shape[2:], type.shape[1])))
    return turned.viewed(type.shape, (turned.strides[0], turned.strides[-1], *turned.strides[1:-1]))


def positions_of(type: TensorType) -> Window:
    """Such images as a matrix of positions and channels."""
    return Window.dense(type.with_shape((type.size // type.shape[1], type.shape[1])))


def matrix(rows: Rows, dtype: DType) -> Window:
    """Rows of elements that lie side by side."""
    return Window(TensorType(dtype, (rows.count, rows.width)), (rows.step * dtype.itemsize, dtype.itemsize))


def check(*windows: Window) -> None:
    """Raise for tensors that no kernel here takes."""
    for x in windows:
        if x.type.dtype.name not in ("float32", "bfloat16") or not x.type.size or any(step < 0 for step in x.strides):
            raise Refused(f"{x.type} with the strides {x.strides}")
