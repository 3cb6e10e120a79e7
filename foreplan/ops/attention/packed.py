"""The gradient of attention whose queries, keys and values are one tensor. It is written in that tensor's place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from foreplan.base.errors import ShapeError
from foreplan.graph import Builder, Cost, Op, TensorType, Window, register
from foreplan.graph.axes import ONE, Axes, Factors
from foreplan.graph.op import Arrays, Types, Values
from foreplan.ops.attention.gradient import AttentionGrad
from foreplan.ops.join import concat, split
from foreplan.ops.shape import reshape


@register
@dataclass(frozen=True)
class PackedAttentionGrad(Op):
    """dx from x, o, lse and the cotangent g of o, where x[B, T, (H + 2·G)·D] holds queries, keys and values.

    Along its last axis x holds H heads of queries, then G heads of keys, then G heads of values, each of depth D. dx
    holds their gradients in the same order. o and g are [B, T, H, D], lse is [B, H, T]. See `attention_grad`.

    Attributes:
        scale: factor on the scores.
        heads: number of query heads.
        kv_heads: number of key heads, and of value heads.
        causal: query i reads keys 0 … i only.
    """

    name: ClassVar[str] = "packed_attention_grad"
    scale: float
    heads: int
    kv_heads: int
    causal: bool = False

    @property
    def unpacked(self) -> AttentionGrad:
        """The op on separate tensors."""
        return AttentionGrad(self.scale, self.causal, heads_last=True)

    def infer(self, inputs: Types) -> tuple[TensorType, ...]:
        """The type of x."""
        self.unpacked.infer(self.unpacked_types(inputs))
        return (inputs[0],)

    def indexing(self, inputs: Types, outputs: Types) -> Axes:
        """Items."""
        f = Factors()
        n = f.dim(("n", inputs[0].shape[0]))
        return f.axes(
            [(n, *[ONE] * (x.rank - 1)) for x in inputs], [(n, *f.row("a", outputs[0].shape[1:]))], {"a0", "a1"}
        )

    def unpacked_types(self, inputs: Types) -> list[TensorType]:
        """The types of the inputs of `unpacked`: three in place of the first."""
        x, *others = inputs
        parts = self.heads + 2 * self.kv_heads
        if x.rank != 3 or min(self.heads, self.kv_heads) < 1 or x.shape[2] % parts:
            raise ShapeError(
                f"x must be [batch, positions, width], its width a multiple of {self.heads} + 2·{self.kv_heads} heads, "
                f"and is {x}"
            )
        depth = x.shape[2] // parts
        of = [x.with_shape((*x.shape[:2], heads, depth)) for heads in (self.heads, self.kv_heads, self.kv_heads)]
        return [*of, *others]

    def overwrites(self, inputs: Types, outputs: Types) -> tuple[tuple[int, int], ...]:
        """dx takes the bytes of x: each part of x is read for the last time before its gradient is written."""
        return ((0, 0),)

    def accepts_strides(self, index: int, input: TensorType, strides: tuple[int, ...]) -> bool:
        """Any strides for o; those that BLAS takes for g."""
        return index == 1 or (index == 3 and self.unpacked.takes_strides(input, strides))

    def cost(self, inputs: Types, outputs: Types) -> Cost:
        """That of `attention_grad`."""
        types = self.unpacked_types(inputs)
        return self.unpacked.cost(types, types[:3])

    def workspace(self, inputs: Types, outputs: Types) -> int:
        """That of `attention_grad`."""
        types = self.unpacked_types(inputs)
        return self.unpacked.workspace(types, types[:3])

    def compute(self, inputs: Arrays, outputs: Arrays, workspace: np.ndarray) -> None:
        """`attention_grad` on views of x and dx."""
        x, *others = inputs
        self.unpacked.compute([*self.unpacked_arrays(x), *others], self.unpacked_arrays(outputs[0]), workspace)

    def decompose(self, b: Builder, inputs: Values) -> Values:
        """Three slices, three gradients, one concatenation."""
        x, *others = inputs
        types = self.unpacked_types([value.type for value in inputs])[:3]
        widths = [type.shape[2] * type.shape[3] for type in types]
        parts = [reshape(b, part, type.shape) for part, type in zip(split(b, x, widths, 2), types)]
        gradients = b.node(self.unpacked, *parts, *others)
        return [concat(b, [reshape(b, value, (*x.shape[:2], n)) for value, n in zip(gradients, widths)], 2)]

    def unpacked_windows(self, x: Window, types: Types) -> list[tuple[int, Window]]:
        """Where queries, keys and values of these types lie in x, or their gradients in dx: (bytes from the first
        element of x, window).
        """
        found, start = [], 0
        for type in types:
            *_, heads, depth = type.shape
            found.append((start, Window(type, (*x.strides[:2], depth * x.strides[2], x.strides[2]))))
            start += heads * depth * x.strides[2]
        return found

    def unpacked_arrays(self, x: np.ndarray) -> Sequence[np.ndarray]:
        """Queries, keys and values, or their gradients, as views of x or dx."""
        heads = self.heads + 2 * self.kv_heads
        every = x.reshape(*x.shape[:2], heads, x.shape[2] // heads)
        keys = self.heads + self.kv_heads
        return every[:, :, : self.heads], every[:, :, self.heads : keys], every[:, :, keys:]
