"""The form of ONNX's Resize that crops: `tf_crop_and_resize`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from foreplan.frontend.onnx.node import OnnxNode
from foreplan.frontend.onnx.tensors import from_array
from foreplan.graph import Value
from foreplan.ops.expr import where
from foreplan.ops.index import gather
from foreplan.ops.interpolation import Coordinates, Interpolation
from foreplan.ops.map import elementwise


@dataclass(frozen=True)
class _Crop(Interpolation):
    """One axis, of which the part from `start` to `end` is resized; the axis reaches from 0 to 1."""

    start: float
    end: float

    @property
    def coordinates(self) -> Coordinates:
        """Where each element of the result lies."""
        last = self.before - 1
        if self.after == 1:
            return Coordinates(0.0, 0.0, 1.0, 0.5 * (self.start + self.end) * last)
        return Coordinates(0.0, (self.end - self.start) * last, self.after - 1, self.start * last)


def crop_and_resize(n: OnnxNode, sizes: Mapping[int, tuple[int, float]], value: float) -> Value:
    """Resize a known part of each axis. What lies outside of the tensor has one value.

    Args:
        n: the node, whose input 1 has the beginnings of the parts, and then their ends.
        sizes: axis → the extent of the result, and its scale; in the order of input 1.
        value: of the elements outside.
    """
    region = [float(each) for each in n.known(1).reshape(-1)]
    if len(region) != 2 * len(sizes):
        raise n.misshapen(f"its region must have {2 * len(sizes)} numbers for {len(sizes)} axes, and has {len(region)}")
    x, rank = n.value(0), len(n.shape(0))
    for (axis, (extent, scale)), start, end in zip(sizes.items(), region, region[len(sizes) :]):
        before = x.shape[axis]
        if extent == before and (start, end) == (0.0, 1.0):
            continue
        crop = _Crop(before, extent, scale, *_kernel(n), start, end)
        at = crop.coordinates.of(np.arange(extent, dtype=np.float64))
        shape = [extent if i == axis else 1 for i in range(rank)]
        x = _interpolated(n, x, crop, axis, shape)
        outside = ((at < 0) | (at > before - 1)).reshape(shape)
        if outside.any():
            mask = n.as_value(from_array(f"{n.output_names[0]}.outside", outside))
            x = elementwise(n.b, lambda a, o: where(o, value, a), x, mask, dtype=x.dtype)
    return x


def _kernel(n: OnnxNode) -> tuple[str, str, str, float, bool, bool]:
    """The attributes of an interpolation but for its extents."""
    mode, rounding = n.text("mode", "nearest"), n.text("nearest_mode", "round_prefer_floor")
    exclude, antialias = bool(n.integer("exclude_outside", 0)), bool(n.integer("antialias", 0))
    return mode, "align_corners", rounding, n.number("cubic_coeff_a", -0.75), exclude, antialias


def _interpolated(n: OnnxNode, x: Value, crop: _Crop, axis: int, shape: Sequence[int]) -> Value:
    """The weighted sum of the elements that each element of the result reads."""
    table, name = crop.table, n.output_names[0]
    found = None
    for i, places in enumerate(table.indices):
        term = gather(n.b, x, n.as_value(from_array(f"{name}.places", places)), axis)
        if table.weights is not None:
            weights = n.as_value(from_array(f"{name}.weights", table.weights[i].astype(np.float32).reshape(shape)))
            term = elementwise(n.b, lambda a, w: a * w, term, weights, dtype=x.dtype)
        found = term if found is None else elementwise(n.b, lambda a, b: a + b, found, term, dtype=x.dtype)
    assert found is not None
    return found
