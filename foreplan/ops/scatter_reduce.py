"""Tensors changed at the places of indices, by products, minima or maxima."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from foreplan.base.errors import ShapeError
from foreplan.graph import Builder, TensorType, Value, register
from foreplan.graph.axes import Axes
from foreplan.graph.op import Cotangents, Types, Values, only
from foreplan.ops.expr import call, where
from foreplan.ops.index import Gather, ScatterAdd
from foreplan.ops.map import elementwise

_UFUNCS = {"mul": np.multiply, "min": np.minimum, "max": np.maximum}


@register
@dataclass(frozen=True)
class ScatterReduce(ScatterAdd):
    """y = base (the third input), with y[a…, indices[i…], b…] combined with updates[a…, i…, b…], in their order.

    Attributes:
        how: mul, min or max.
    """

    name: ClassVar[str] = "scatter_reduce"
    accumulates: ClassVar[int] = 0
    how: str

    def __post_init__(self) -> None:
        if self.how not in _UFUNCS:
            raise ValueError(f"how must be one of {', '.join(_UFUNCS)}, and is {self.how!r}")

    @property
    def combine(self) -> np.ufunc:
        """What an update and an element give."""
        return _UFUNCS[self.how]

    def infer(self, inputs: Types) -> tuple[TensorType, ...]:
        """`shape`, which the base must have, if the updates have it with the axis replaced by the indices' shape."""
        self.check_count(inputs, 3)
        if inputs[1].dtype.category == "bool":
            raise ShapeError(f"scatters numbers, and got {inputs[1]}; convert booleans to integers first")
        return ScatterAdd.infer(self, inputs)

    def indexing(self, inputs: Types, outputs: Types) -> Axes:
        """All of the indices."""
        found = super().indexing(inputs, outputs)
        return replace(found, whole=found.whole | found.sums.keys(), sums={})

    def vjp(self, b: Builder, inputs: Values, outputs: Values, cotangents: Cotangents) -> Cotangents:
        """As `torch.scatter_reduce` with the base included: an extreme's cotangent is shared by all that equal it; a
        product's goes to each factor times all others, which is right where factors are zero, too.
        """
        (indices, updates, base), (y,), g = inputs, outputs, only(cotangents)
        if self.how == "mul":
            return [None, *self._of_products(b, indices, updates, base, g)[::-1]]
        at = b.apply(Gather(self.axis), y, indices)
        hits = [
            elementwise(b, lambda x, y: where(call("eq", x, y), 1.0, 0.0), x, best, dtype=x.dtype)
            for x, best in ((base, y), (updates, at))
        ]
        ties = b.apply(ScatterAdd(self.axis, self.shape), indices, hits[1], hits[0])
        share = elementwise(b, lambda g, n: g / n, g, ties)
        d_base = elementwise(b, lambda h, s: h * s, hits[0], share) if b.wants(base) else None
        if not b.wants(updates):
            return [None, None, d_base]
        return [None, elementwise(b, lambda h, s: h * s, hits[1], b.apply(Gather(self.axis), share, indices)), d_base]

    def _of_products(self, b: Builder, indices: Value, updates: Value, base: Value, g: Value) -> list[Value | None]:
        """Those of base and updates: zeros are counted and left out of the product."""
        both = (base, updates)
        zeros = [elementwise(b, lambda x: where(call("eq", x, 0.0), 1.0, 0.0), x, dtype=x.dtype) for x in both]
        others = [elementwise(b, lambda x: where(call("eq", x, 0.0), 1.0, x), x, dtype=x.dtype) for x in both]
        count = b.apply(ScatterAdd(self.axis, self.shape), indices, zeros[1], zeros[0])
        product = b.apply(self, indices, others[1], others[0])
        flow = elementwise(b, lambda g, p: g * p, g, product)
        found: list[Value | None] = []
        for i, x in enumerate(both):
            if not b.wants(x):
                found.append(None)
                continue
            n, p = (v if i == 0 else b.apply(Gather(self.axis), v, indices) for v in (count, flow))
            of = (n, zeros[i], p, others[i])
            found.append(elementwise(b, lambda n, z, p, o: where(call("eq", n, z), p / o, 0.0), *of))
        return found
