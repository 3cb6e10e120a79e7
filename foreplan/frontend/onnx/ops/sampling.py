"""ONNX ops that read images between their elements."""

from __future__ import annotations

from foreplan.frontend.onnx.node import OnnxNode, Operand, translates
from foreplan.frontend.onnx.ops.nn import window
from foreplan.ops.deform_conv import deform_conv
from foreplan.ops.grid_sample import PADDINGS, grid_sample
from foreplan.ops.roi_align import roi_align

_MODES = {"bilinear": "linear", "bicubic": "cubic", "linear": "linear", "cubic": "cubic", "nearest": "nearest"}


@translates("GridSample")
def _grid_sample(n: OnnxNode) -> Operand:
    mode = n.text("mode", "bilinear" if n.opset < 20 else "linear")
    padding = n.text("padding_mode", "zeros")
    if mode not in _MODES or padding not in PADDINGS:
        raise n.fail(f"there is no mode {mode!r} with padding_mode {padding!r}")
    return grid_sample(n.b, n.value(0), n.value(1), _MODES[mode], padding, bool(n.integer("align_corners", 0)))


@translates("RoiAlign")
def _roi_align(n: OnnxNode) -> Operand:
    points, how = n.integer("sampling_ratio", 0), n.text("mode", "avg")
    if points <= 0:
        raise n.unsupported(
            "sampling_ratio 0: how many points of a region are read depends on its size, which only the data tell; "
            "export it with sampling_ratio=2, say"
        )
    coordinates = n.text("coordinate_transformation_mode", "half_pixel" if n.opset >= 16 else "output_half_pixel")
    if how not in ("avg", "max") or coordinates not in ("half_pixel", "output_half_pixel"):
        raise n.fail(f"there is no mode {how!r} with coordinate_transformation_mode {coordinates!r}")
    return roi_align(
        n.b,
        n.value(0),
        n.value(1),
        n.value(2),
        (n.integer("output_height", 1), n.integer("output_width", 1)),
        points,
        how="mean" if how == "avg" else "max",
        scale=n.number("spatial_scale", 1.0),
        half_pixel=coordinates == "half_pixel",
    )


@translates("DeformConv")
def _deform_conv(n: OnnxNode) -> Operand:
    x, w, offset = (n.value(i) for i in range(3))
    bias, mask = (n.value(i) if n.has(i) else None for i in (3, 4))
    strides, dilations, pads = window(n, w.shape[2:])
    return deform_conv(
        n.b,
        x,
        w,
        offset,
        bias,
        mask,
        groups=n.integer("group", 1),
        offset_groups=n.integer("offset_group", 1),
        strides=strides,
        pads=pads,
        dilations=dilations,
    )
