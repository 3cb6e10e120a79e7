"""Layouts in blocks, which strides cannot express: how kernels like to find weights that never change."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np

from foreplan.base.errors import ShapeError

_TAG = re.compile(r"([A-Za-z]+?)((?:\d+[a-z])*)")
_INNER = re.compile(r"(\d+)([a-z])")
MOST = 26  # axes, each with a letter


@dataclass(frozen=True)
class Blocks:
    """The elements of a tensor in blocks, as one of oneDNN's tags names them.

    A tag names the axes from the outermost one to the innermost: a is the first axis of the shape, b the second. An
    axis in blocks has a capital letter, and its blocks follow behind all axes: of `AB16b48a` all elements of a block of
    16 × 48 lie together, the first axis innermost. Axes are filled up with zeros to whole blocks.

    Attributes:
        shape: extents of the axes that the tag names; the tensor's elements, in C order, counted along them.
        tag: names of axes, and blocks.

    Raises:
        ShapeError: the tag is none, or one for another number of axes.
    """

    shape: tuple[int, ...]
    tag: str

    def __post_init__(self) -> None:
        letters, outer = [chr(ord("a") + i) for i in range(len(self.shape))], self._parsed[0]
        blocked = {letter for _, letter in self.inner}
        right = sorted(outer.lower()) == letters and blocked == {x.lower() for x in outer if x.isupper()}
        if not right or len(self.shape) > MOST or any(size < 1 for size, _ in self.inner) or min(self.shape) < 1:
            raise ShapeError(f"{self.tag!r} is no layout in blocks of {list(self.shape)}; ABcd16b16a is one")

    @classmethod
    def parsed(cls, text: str) -> Blocks:
        """What `str` gave.

        Raises:
            ShapeError: it is none.
        """
        shape, _, tag = text.partition(":")
        if not re.fullmatch(r"\d+(x\d+)*", shape):
            raise ShapeError(f"{text!r} is no layout in blocks; 64x32:AB16b48a is one")
        return cls(tuple(map(int, shape.split("x"))), tag)

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.shape))}:{self.tag}"

    @cached_property
    def inner(self) -> Sequence[tuple[int, str]]:
        """Extent and axis of each block, from the outermost one to the innermost."""
        return [(int(size), letter) for size, letter in _INNER.findall(self._parsed[1])]

    @cached_property
    def elements(self) -> int:
        """Those of the tensor."""
        return math.prod(self.shape)

    @cached_property
    def size(self) -> int:
        """Elements with what fills up blocks."""
        return math.prod(self._filled)

    @cached_property
    def steps(self) -> Sequence[tuple[int, int, int]] | None:
        """Of each axis: how many places a block has, and elements from one block to the next, and from one place of a
        block to the next; None if an axis has blocks within blocks.
        """
        extents, order = self._order
        if any(len(each) > 2 for each in extents):
            return None
        split, step, found = [extent for each in extents for extent in each], 1, dict[int, int]()
        for i in reversed(order):
            found[i], step = step, step * split[i]
        starts = np.cumsum([0, *map(len, extents)])
        pairs = [(each[1] if len(each) > 1 else 1, int(start)) for each, start in zip(extents, starts)]
        return [(size, found[at], found[at + 1] if size > 1 else 0) for size, at in pairs]

    def copies(self, tensor: np.ndarray, into: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """The copies, each from one array to another with other strides, that write a tensor in blocks: zeros first, if
        there are blocks to be filled up. Axes have no blocks within blocks.

        Args:
            tensor: in C order.
            into: of one axis, and of `size` elements.
        """
        assert self.steps is not None, self
        flat, item = tensor.reshape(self.shape), tensor.itemsize
        made = [(np.broadcast_to(np.zeros(1, tensor.dtype), into.shape), into)] * (self._filled != self.shape)
        for part in self._parts:
            shape = [n for low, high, each in part for n in ((high - low) // each, each)]
            start = sum(low // size * far for (low, _, _), (size, far, _) in zip(part, self.steps))
            steps = [item * step for _, far, near in self.steps for step in (far, near)]
            there = np.ndarray(shape, tensor.dtype, into, start * item, steps)
            made.append((flat[tuple(slice(low, high) for low, high, _ in part)].reshape(shape), there))
        return made

    @property
    def copied(self) -> int:
        """The number of `copies`."""
        return len(self._parts) + (self._filled != self.shape)

    @cached_property
    def _parts(self) -> Sequence[Sequence[tuple[int, int, int]]]:
        """Parts of a tensor of whole blocks, and of what is left: of each axis where it begins, where it ends, and the
        places of a block that it has.
        """
        assert self.steps is not None, self
        ranges = []
        for extent, (size, _, _) in zip(self.shape, self.steps):
            whole = extent // size * size
            both = (0, whole, size), (whole, extent, extent - whole)
            ranges.append([(low, high, each) for low, high, each in both if high > low])
        return list(product(*ranges))

    def packed(self, tensor: np.ndarray, into: np.ndarray) -> None:
        """Write the elements of a tensor in blocks into an array of one axis, of `size` elements."""
        flat = np.ascontiguousarray(tensor).reshape(self.shape)
        if self._filled != self.shape:
            filled = np.zeros(self._filled, tensor.dtype)
            filled[tuple(map(slice, self.shape))] = flat
            flat = filled
        extents, order = self._order
        split = [extent for each in extents for extent in each]
        into.reshape([split[i] for i in order])[...] = flat.reshape(split).transpose(order)

    def unpacked(self, elements: np.ndarray) -> np.ndarray:
        """The tensor whose elements in blocks these are, in `shape`."""
        extents, order = self._order
        split = [extent for each in extents for extent in each]
        back = elements.reshape([split[i] for i in order]).transpose(np.argsort(order)).reshape(self._filled)
        return np.ascontiguousarray(back[tuple(map(slice, self.shape))])

    @property
    def _parsed(self) -> tuple[str, str]:
        """The names of axes, and the blocks; both empty of what is no tag."""
        found = _TAG.fullmatch(self.tag)
        return (found[1], found[2]) if found else ("", "")

    @cached_property
    def _filled(self) -> tuple[int, ...]:
        """The extent of each axis in whole blocks."""
        found = []
        for axis, extent in enumerate(self.shape):
            each = math.prod(size for size, letter in self.inner if letter == chr(ord("a") + axis))
            found.append(-(-extent // each) * each)
        return tuple(found)

    @cached_property
    def _order(self) -> tuple[Sequence[Sequence[int]], Sequence[int]]:
        """Of each axis its number of blocks, then their extents; and the place of each of these in memory, outermost
        first, where they are counted through.
        """
        extents: list[list[int]] = []
        for axis, filled in enumerate(self._filled):
            sizes = [size for size, letter in self.inner if letter == chr(ord("a") + axis)]
            extents.append([filled // math.prod(sizes), *sizes])
        starts = np.cumsum([0, *map(len, extents)])
        order = [int(starts[ord(letter) - ord("a")]) for letter in self._parsed[0].lower()]
        taken = [1] * len(extents)
        for _, letter in self.inner:
            axis = ord(letter) - ord("a")
            order.append(int(starts[axis]) + taken[axis])
            taken[axis] += 1
        return extents, order
