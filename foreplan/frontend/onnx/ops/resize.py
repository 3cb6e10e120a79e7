"""ONNX's Resize and the Upsample before it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from foreplan.frontend.onnx.node import OnnxNode, Operand, translates
from foreplan.frontend.onnx.ops.crop import crop_and_resize
from foreplan.ops.resize import resize


@translates("Upsample")
def _upsample(n: OnnxNode) -> Operand:
    shape = n.shape(0)
    if n.opset >= 9:
        scales = [float(s) for s in n.known(1).reshape(-1)]
    elif n.opset >= 7:
        scales = [float(s) for s in n.numbers("scales", [])]
    else:
        scales = [1.0, 1.0, n.number("height_scale"), n.number("width_scale")]
    return _scaled(n, shape, scales, n.text("mode", "nearest"), "asymmetric", "floor")


def _scaled(
    n: OnnxNode, shape: Sequence[int], scales: Sequence[float], mode: str, coordinate: str, rounding: str
) -> Operand:
    if len(scales) != len(shape):
        raise n.misshapen(f"{n.type(0)} needs one scale for each axis, and {len(scales)} are given")
    wanted = [math.floor(extent * scale) for extent, scale in zip(shape, scales)]
    mode = {"bilinear": "linear", "trilinear": "linear"}.get(mode, mode)
    return resize(n.b, n.value(0), wanted, mode=mode, coordinate=coordinate, scales=scales, rounding=rounding)


@translates("Resize")
def _resize(n: OnnxNode) -> Operand:
    shape, mode = n.shape(0), n.text("mode", "nearest")
    if n.opset < 11:
        return _scaled(n, shape, [float(s) for s in n.known(1).reshape(-1)], mode, "asymmetric", "floor")
    coordinate = n.text("coordinate_transformation_mode", "half_pixel")
    axes = n.axes(n.integers("axes", list(range(len(shape)))), len(shape))
    scales, wanted = [1.0] * len(shape), list(shape)
    if n.has(3) and n.type(3).size:
        given, found = _by_sizes(n, [shape[axis] for axis in axes], _sizes(n, axes))
    elif n.has(2) and n.type(2).size:
        found = [float(s) for s in n.known(2).reshape(-1)]
        given = [math.floor(shape[axis] * scale) for axis, scale in zip(axes, found)]
    else:
        raise n.fail("it has neither scales nor sizes")
    if not len(given) == len(found) == len(axes):
        raise n.misshapen(f"its scales or sizes do not fit the axes {list(axes)} of {n.type(0)}")
    if coordinate == "tf_crop_and_resize":
        sizes = {axis: (extent, scale) for axis, extent, scale in zip(axes, given, found)}
        return crop_and_resize(n, sizes, n.number("extrapolation_value", 0.0))
    for axis, extent, scale in zip(axes, given, found):
        wanted[axis], scales[axis] = extent, scale
    return resize(
        n.b,
        n.value(0),
        wanted,
        mode=mode,
        coordinate=coordinate,
        scales=scales,
        rounding=n.text("nearest_mode", "round_prefer_floor"),
        cubic_a=n.number("cubic_coeff_a", -0.75),
        exclude_outside=bool(n.integer("exclude_outside", 0)),
        antialias=bool(n.integer("antialias", 0)),
    )


def _sizes(n: OnnxNode, axes: Sequence[int]) -> list[int]:
    """The sizes asked for, with the new batch in place of the exported one."""
    written = n.known_ints(3)
    sizes = list(written)
    if n.batch is None:
        return sizes
    exported, before, now = n.batch.shapes.get(n.output_names[0]), n.batch.before(n, 0), n.shape(0)
    for i, axis in enumerate(axes[: len(sizes)]):
        if not n.batch.carries(n, 0, axis):
            continue
        if sizes[i] == before[axis]:
            sizes[i] = now[axis]
        elif exported is not None and sizes[i] == exported[axis]:
            raise n.batch.fixed(n, f"it resizes the batch from {before[axis]} to {sizes[i]}")
    if sizes != list(written):
        n.batch.note_rewritten(n, written, sizes)
    return sizes


def _by_sizes(n: OnnxNode, extents: Sequence[int], sizes: Sequence[int]) -> tuple[list[int], list[float]]:
    """(extents, scales) for the sizes asked for; a policy that keeps the aspect ratio makes one scale of all."""
    policy = n.text("keep_aspect_ratio_policy", "stretch")
    scales = [size / extent for size, extent in zip(sizes, extents)]
    if policy == "stretch":
        return list(sizes), scales
    if policy not in ("not_larger", "not_smaller"):
        raise n.fail(f"keep_aspect_ratio_policy {policy!r} is not stretch, not_larger or not_smaller")
    scale = min(scales) if policy == "not_larger" else max(scales)
    return [math.floor(scale * extent + 0.5) for extent in extents], [scale] * len(extents)
