"""The gradient of batch normalisation before a mask, such as a ReLU's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from foreplan.base.errors import ShapeError
from foreplan.graph import Builder, TensorType, register
from foreplan.graph.axes import Axes, in_c_order, named
from foreplan.graph.op import Arrays, Types, Values
from foreplan.ops.bits import MaskedMap
from foreplan.ops.blocks import carve, carve_bytes
from foreplan.ops.norm.batch import BatchNormGrad
from foreplan.ops.norm.channels import ChannelNorm


@register
@dataclass(frozen=True)
class MaskedBatchNormGrad(ChannelNorm):
    """`batch_norm_grad` of a gradient that is a `masked_map` of the inputs: g = expr(a0, a1, …), a0 a mask's bits.

    Inputs: x [N, C, *S], scale, mean, variance [C], bits as `masked_map` takes them, and one or more tensors as x.
    Outputs: dx as x, dscale, dbias [C], wide if x is narrow, and g, if others read it.

    Attributes:
        expr: a scalar expression of x's type, as text; a0 is boolean.
        keeps: whether g is an output.
    """

    name: ClassVar[str] = "masked_batch_norm_grad"
    expr: str
    keeps: bool = False

    @property
    def masked(self) -> MaskedMap:
        """The map that makes g."""
        return MaskedMap((self.expr,))

    @property
    def gradient(self) -> BatchNormGrad:
        """The gradient that takes g."""
        return BatchNormGrad(self.epsilon)

    def accepts_strides(self, index: int, input: TensorType, strides: tuple[int, ...]) -> bool:
        """Images whose channels are dense, but for the mask."""
        return index != 4 and super().accepts_strides(index, input, strides)

    def infer(self, inputs: Types) -> tuple[TensorType, ...]:
        """The type of x, and two vectors, and that of x once more."""
        x, *rest = inputs
        if len(rest) < 5 or any(type != x for type in rest[4:]):
            raise ShapeError(f"needs a mask and tensors of {x}, and got {', '.join(map(str, rest[3:])) or 'nothing'}")
        (g,) = self.masked.infer(rest[3:])
        found = self.gradient.infer([x, *rest[:3], g])
        return (*found, g) if self.keeps else found

    def indexing(self, inputs: Types, outputs: Types) -> Axes:
        """All of each channel, whose bits have bytes of their own."""
        x = inputs[0]
        found = in_c_order(x.shape, (x.size // 8, 8))
        (dims,), ((bits, bit),) = found.inputs, found.outputs
        given, made = ([dims if t.rank == x.rank else dims[1:2] for t in types] for types in (inputs, outputs))
        given[4] = (bits,)
        whole = named((dims[0], *dims[2:], bit)) | found.whole
        return Axes(given, made, found.extents, frozenset(whole))

    def overwrites(self, inputs: Types, outputs: Types) -> tuple[tuple[int, int], ...]:
        """dx may take the bytes of x, and g those of a tensor that it is made of; without g as an output, dx may."""
        return ((0, 0), *((3 if self.keeps else 0, i) for i in range(5, len(inputs))))

    def flops(self, inputs: Types, outputs: Types) -> int:
        """As those of both."""
        x, *rest = inputs
        return self.masked.flops(rest[3:], [x]) + self.gradient.flops([x, *rest[:3], x], outputs[:3])

    def workspace(self, inputs: Types, outputs: Types) -> int:
        """g, if it is not kept, and the larger workspace of both."""
        x, *rest = inputs
        both = self.masked.workspace(rest[3:], [x]), self.gradient.workspace([x, *rest[:3], x], outputs[:3])
        return max(both) + (0 if self.keeps else carve_bytes((x.shape, x.dtype.numpy)))

    def compute(self, inputs: Arrays, outputs: Arrays, workspace: np.ndarray) -> None:
        """One after the other."""
        x, *vectors = inputs[:4]
        if self.keeps:
            g = outputs[3]
        else:
            (g,) = carve(workspace, (x.shape, x.dtype))
            workspace = workspace[carve_bytes((x.shape, x.dtype)) :]
        self.masked.compute(inputs[4:], [g], workspace)
        self.gradient.compute([x, *vectors, g], outputs[:3], workspace)

    def decompose(self, b: Builder, inputs: Values) -> Values:
        """One after the other."""
        x, *vectors = inputs[:4]
        g = b.apply(self.masked, *inputs[4:])
        found = b.node(self.gradient, x, *vectors, g)
        return [*found, g] if self.keeps else found
