"""Tensors without bytes: storages that are counted while something refers to them, as PyTorch's are.

A storage lives as long as a tensor refers to it. CPython counts references, as PyTorch does, and drops at once what
nobody refers to. So the variables of a rule say when its bytes are taken and given back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from foreplan.graph.types import DType, Shape


class Use(StrEnum):
    """What a storage is to the person who trains."""

    INPUT = "inputs"
    PARAMETER = "parameters"
    BUFFER = "buffers"
    STATE = "optimizer state"
    PARAMETER_GRADIENT = ".grad"
    ACTIVATION = "activations"
    GRADIENT = "gradients of activations"
    TEMPORARY = "temporaries"
    WORKSPACE = "workspaces of convolutions"
    BUCKET = "buckets of gradients"
    GATHERED = "gathered from all ranks"


@dataclass(frozen=True, slots=True)
class Block:
    """One storage, for people.

    Attributes:
        name: of the model's value or node that it was made for, and the op.
        nbytes: its size.
        use: what it was made for.
    """

    name: str
    nbytes: int
    use: Use


@dataclass(eq=False, slots=True)
class Memory:
    """The storages that are alive, and all that were, in order.

    Attributes:
        blocks: every storage that there was.
        events: the index of a block where it is allocated, its complement (`~index`) where it is freed.
        live: bytes that are alive now.
        most: the most of them since `mark` was called.
        node: the node of the model that runs; the names of blocks begin with it.
        use: of the storages that are made now.
    """

    blocks: list[Block] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    live: int = 0
    most: int = 0
    node: str = ""
    use: Use = Use.ACTIVATION

    def mark(self) -> int:
        """Begin to count the most anew; gives the most so far."""
        most, self.most = self.most, self.live
        return most

    def take(self, nbytes: int, op: str) -> int:
        """The index of a new block."""
        name = f"{self.node}: {op}" if self.node and op else self.node or op
        self.blocks.append(Block(name, nbytes, self.use))
        self.events.append(len(self.blocks) - 1)
        self.live += nbytes
        self.most = max(self.most, self.live)
        return len(self.blocks) - 1

    def give_back(self, index: int) -> None:
        """A block is free."""
        self.events.append(~index)
        self.live -= self.blocks[index].nbytes

    def call(self, index: int, use: Use, name: str = "") -> None:
        """A block has become something else, such as the gradient of a parameter."""
        block = self.blocks[index]
        self.blocks[index] = Block(name or block.name, block.nbytes, use)


class Storage:
    """Bytes that tensors share; they are free when the last of these is gone.

    Attributes:
        tensors: how many tensors refer to it.
    """

    __slots__ = ("index", "memory", "tensors")

    def __init__(self, memory: Memory, nbytes: int, op: str) -> None:
        self.memory, self.tensors = memory, 0
        self.index = memory.take(nbytes, op)

    def __del__(self) -> None:
        self.memory.give_back(self.index)


class Tensor:
    """A tensor as PyTorch has it.

    Attributes:
        storage: its bytes.
        shape: extents of its axes.
        strides: elements from one to the next along each axis.
        dtype: its element type.
        maker: the `Function` of autograd that it came from, and which of its results it is; None: it has no history.
        trained: whether it is a parameter that gets a gradient.
        grad: its gradient, where it is a parameter that has one.
        held: how many buffers of the autograd engine hold it.
    """

    __slots__ = ("__weakref__", "dtype", "grad", "held", "maker", "shape", "storage", "strides", "trained")

    def __init__(self, storage: Storage, shape: Shape, strides: Sequence[int], dtype: DType) -> None:
        self.storage, self.shape, self.strides, self.dtype = storage, tuple(shape), tuple(strides), dtype
        self.maker: tuple[Any, int] | None = None
        self.trained = False
        self.grad: Tensor | None = None
        self.held = 0
        storage.tensors += 1

    def __del__(self) -> None:
        self.storage.tensors -= 1

    @property
    def needs_grad(self) -> bool:
        """Whether a gradient flows to it."""
        return self.trained or self.maker is not None

    @property
    def rank(self) -> int:
        """How many axes it has."""
        return len(self.shape)

    @property
    def is_contiguous(self) -> bool:
        """Whether it lies in C order without gaps."""
        steps = zip(self.shape, self.strides, dense_strides(self.shape))
        return math.prod(self.shape) == 0 or all(extent == 1 or a == b for extent, a, b in steps)

    @property
    def is_dense(self) -> bool:
        """Whether it lies without gaps and overlaps, its axes in any order."""
        step = 1
        for stride, extent in sorted((s, e) for e, s in zip(self.shape, self.strides) if e != 1):
            if stride != step:
                return False
            step *= extent
        return True

    def viewed(self, shape: Shape, strides: Sequence[int]) -> Tensor:
        """Another view of the same bytes, without history."""
        return Tensor(self.storage, shape, strides, self.dtype)

    def detached(self) -> Tensor:
        """The same tensor without history, as autograd saves it."""
        return self.viewed(self.shape, self.strides)


def dense_strides(shape: Shape) -> tuple[int, ...]:
    """Of a tensor in C order, in elements; an axis without elements counts as one of one."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(1, extent)
    return tuple(reversed(strides))


def view_strides(tensor: Tensor, shape: Shape) -> tuple[int, ...] | None:
    """The strides of a view of another shape, or None where there is none (`at::detail::computeStride`)."""
    if not math.prod(tensor.shape):
        return dense_strides(shape)
    if not tensor.shape:
        return (1,) * len(shape)
    strides = [0] * len(shape)
    axis, base, here, there = len(shape) - 1, tensor.strides[-1], 1, 1
    for i in range(tensor.rank - 1, -1, -1):
        here *= tensor.shape[i]
        if i and (tensor.shape[i - 1] == 1 or tensor.strides[i - 1] == here * base):
            continue
        while axis >= 0 and (there < here or shape[axis] == 1):
            strides[axis] = there * base
            there *= shape[axis]
            axis -= 1
        if there != here:
            return None
        if i:
            base, here, there = tensor.strides[i - 1], 1, 1
    return tuple(strides) if axis == -1 else None


def strides_like(shape: Shape, *tensors: Tensor) -> tuple[int, ...]:
    """Of the result of an element-wise op: that of its operands where they lie without gaps, else by their order
    (`TensorIterator`, memory format preserve).
    """
    for tensor in tensors:
        if tensor.shape == shape:
            if tensor.is_dense:
                return tensor.strides
            if any(not stride for stride, extent in zip(tensor.strides, shape) if extent > 1):
                return dense_strides(shape)
            order = sorted(range(len(shape)), key=lambda axis: (tensor.strides[axis], -axis))
            strides, step = [0] * len(shape), 1
            for axis in order:
                strides[axis] = step
                step *= max(1, shape[axis])
            return tuple(strides)
    return dense_strides(shape)
