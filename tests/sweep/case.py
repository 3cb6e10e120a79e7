"""A drawn case: an op and what it is given, written as text that reads back to the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from foreplan.graph import Op, TensorType, Window
from foreplan.graph.op import op_text
from foreplan.graph.registry import parse_op
from foreplan.graph.types import tensor_type
from tests.sweep.values import fill

T = TypeVar("T")


@dataclass(frozen=True)
class Given:
    """One input.

    Attributes:
        type: element type and shape.
        values: what its elements are, as `values.fill` reads it.
        seed: of the generator that makes them.
        lies: how it lies in memory, a key of `LAYOUTS`.
    """

    type: TensorType
    values: str
    seed: int
    lies: str = "dense"

    def array(self) -> np.ndarray:
        """Its elements, in C order."""
        found = fill(self.values, self.type, self.seed)
        if self.lies == "repeated" and self.type.size:
            found[...] = found[:1]
        return found

    def window(self) -> Window:
        """How it lies."""
        return Window(self.type, LAYOUTS[self.lies](self.type))

    def __str__(self) -> str:
        return f"{self.type} {self.values} {self.seed} {self.lies}"


@dataclass(frozen=True)
class Case:
    """An op and its inputs."""

    op: Op
    inputs: tuple[Given, ...]

    @property
    def types(self) -> list[TensorType]:
        """Of the inputs."""
        return [given.type for given in self.inputs]

    @property
    def number(self) -> int:
        """As good as drawn, and of the case alone: for what else a judge has to choose."""
        return sum(given.seed for given in self.inputs)

    def one_of(self, found: Iterable[T]) -> list[T]:
        """One of some things, as good as drawn; none of none."""
        listed = list(found)
        return [listed[self.number // 64 % len(listed)]] if listed else []

    def arrays(self) -> list[np.ndarray]:
        """The inputs, in C order."""
        return [given.array() for given in self.inputs]

    def valued(self, values: str) -> Case:
        """The same with other floating-point elements."""
        return replace(
            self,
            inputs=tuple(replace(x, values=values) if x.type.dtype.is_float else x for x in self.inputs),
        )

    def __str__(self) -> str:
        return "\n".join([op_text(self.op), *map(str, self.inputs)])


def parse_case(text: str) -> Case:
    """The case that `str` writes."""
    first, *rest = [line.strip() for line in text.strip().splitlines()]
    given = []
    for line in rest:
        type, values, seed, lies = line.split()
        given.append(Given(tensor_type(type), values, int(seed), lies))
    return Case(parse_op(first), tuple(given))


def _ordered(type: TensorType, order: list[int], gap: int = 0) -> tuple[int, ...]:
    """Strides of axes that lie in this order, the innermost last, with the given number of elements between rows."""
    strides, step = [0] * type.rank, type.dtype.itemsize
    for i, axis in enumerate(reversed(order)):
        strides[axis] = step
        step *= max(1, type.shape[axis])
        if i == 0:
            step += gap * type.dtype.itemsize
    return tuple(strides)


def _turned(type: TensorType) -> tuple[int, ...]:
    return _ordered(type, [*range(type.rank)[:-2], *range(type.rank)[-2:][::-1]])


def _channels_last(type: TensorType) -> tuple[int, ...]:
    axes = list(range(type.rank))
    return _ordered(type, [*axes[:1], *axes[2:], *axes[1:2]])


def _wide_channels(type: TensorType) -> tuple[int, ...]:
    """A range of the channels of images that lie with their channels last."""
    axes = list(range(type.rank))
    return _ordered(type, [*axes[:1], *axes[2:], *axes[1:2]], gap=5)


def _backward(type: TensorType) -> tuple[int, ...]:
    return tuple(-step if axis == type.rank - 1 else step for axis, step in enumerate(type.strides))


# How inputs may lie. Views make all of these: transpositions, ranges, walks from the end, broadcasts.
LAYOUTS: dict[str, Callable[[TensorType], tuple[int, ...]]] = {
    "dense": lambda type: type.strides,
    "gaps": lambda type: _ordered(type, list(range(type.rank)), gap=3),
    "spread": lambda type: tuple(3 * step for step in type.strides),
    "turned": _turned,
    "reversed": lambda type: _ordered(type, list(range(type.rank))[::-1]),
    "channels_last": _channels_last,
    "some_channels": _wide_channels,
    "backward": _backward,
    "repeated": lambda type: tuple(0 if axis == 0 else step for axis, step in enumerate(type.strides)),
}
