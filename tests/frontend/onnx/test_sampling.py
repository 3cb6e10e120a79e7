"""Ops that read and write images at computed places, and Fourier transforms. ONNX Runtime is the judge."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import onnx
import onnx.utils
import pytest
from onnx import TensorProto, helper, numpy_helper

from foreplan.base.errors import ShapeError, UnsupportedError
from foreplan.frontend import from_onnx
from tests.frontend.onnx.models import model, node, random, run, same_as_onnxruntime
from tests.profile import pick

SEEDS = range(pick(1, 2, 12))


def _check(made: Any, constants: dict[str, np.ndarray] | None = None, opset: int = 18, **inputs: np.ndarray) -> None:
    shapes = {name: x.shape for name, x in inputs.items()}
    same_as_onnxruntime(model([made], shapes, ["y"], constants, opset=opset), **inputs)


@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("align", [0, 1])
def test_grid_sample(mode: str, padding: str, align: int) -> None:
    rng = Random(f"{mode} {padding} {align}")
    n, c, h, w, rows, columns = (rng.randint(least, 6) for least in (1, 1, 2, 2, 1, 1))
    grid = np.random.default_rng(rng.getrandbits(16)).uniform(-1.6, 1.6, (n, rows, columns, 2)).astype(np.float32)
    made = node("GridSample", "x grid", "y", mode=mode, padding_mode=padding, align_corners=align)
    _check(made, x=random(n, c, h, w), grid=grid)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mode", ["avg", "max"])
def test_roi_align(mode: str, seed: int) -> None:
    rng = Random(f"{mode} {seed}")
    n, c, count = rng.randint(1, 3), rng.randint(1, 3), rng.randint(1, 4)
    corner = np.random.default_rng(seed).uniform(-1, 8, (count, 2))
    regions = np.concatenate([corner, corner + np.random.default_rng(seed + 1).uniform(0.5, 9, (count, 2))], 1)
    made = node(
        "RoiAlign",
        "x rois images",
        "y",
        mode=mode,
        output_height=rng.randint(1, 3),
        output_width=rng.randint(1, 3),
        sampling_ratio=rng.randint(1, 3),
        spatial_scale=rng.choice([1.0, 0.5]),
        coordinate_transformation_mode=rng.choice(["half_pixel", "output_half_pixel"]),
    )
    images = {"images": np.array([rng.randrange(n) for _ in range(count)])}
    _check(made, images, x=random(n, c, rng.randint(2, 9), rng.randint(2, 9)), rois=regions.astype(np.float32))


def test_roi_align_that_lets_the_data_choose_how_many_points_it_reads_is_refused() -> None:
    made = node("RoiAlign", "x rois images", "y", output_height=2, output_width=2)
    proto = model([made], {"x": (1, 1, 4, 4), "rois": (1, 4)}, ["y"], {"images": np.array([0])})
    with pytest.raises(UnsupportedError, match="sampling_ratio=2"):
        from_onnx(proto)


@pytest.mark.parametrize("seed", SEEDS)
def test_columns_to_images(seed: int) -> None:
    rng = Random(seed)
    n, c, kernel = rng.randint(1, 2), rng.randint(1, 3), [rng.randint(1, 3) for _ in range(2)]
    strides, gaps, pads = ([rng.choice(few) for _ in range(k)] for few, k in (((1, 2), 2), ((1, 2), 2), ((0, 1), 4)))
    image = [gap * (taps - 1) + 1 + rng.randint(0, 4) for gap, taps in zip(gaps, kernel)]
    counts = [(image[i] + pads[i] + pads[2 + i] - gaps[i] * (kernel[i] - 1) - 1) // strides[i] + 1 for i in range(2)]
    made = node("Col2Im", "x image block", "y", strides=strides, dilations=gaps, pads=pads)
    x = random(n, c * kernel[0] * kernel[1], counts[0] * counts[1], seed=seed)
    _check(made, {"image": np.array(image), "block": np.array(kernel)}, x=x)


@pytest.mark.parametrize("seed", SEEDS)
def test_places_of_maxima_and_back(seed: int) -> None:
    """Windows apart: those of pooling that share an element are in ONNX's own cases."""
    rng = Random(seed)
    kernel = [rng.randint(1, 3) for _ in range(2)]
    shape = (rng.randint(1, 2), rng.randint(1, 3), *(taps * rng.randint(1, 4) for taps in kernel))
    pool = node("MaxPool", "x", "m at", kernel_shape=kernel, strides=kernel)
    back = node("MaxUnpool", "m at", "y", kernel_shape=kernel, strides=kernel)
    same_as_onnxruntime(model([pool, back], {"x": shape}, ["y"]), x=random(*shape, seed=seed))


@pytest.mark.parametrize("seed", SEEDS)
def test_transforms_of_frames(seed: int) -> None:
    rng = Random(seed)
    length, onesided = rng.randint(2, 16), rng.randint(0, 1)
    constants = {"step": np.array(rng.randint(1, 5)), "window": random(length), "length": np.array(length)}
    x = random(rng.randint(1, 3), length + rng.randint(0, 20), 1, seed=seed)
    made = node("STFT", "x step window length", "y", onesided=onesided)
    _check(made, constants, x=x)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("how", ["none", "add", "mul", "min", "max"])
def test_elements_are_scattered(how: str, seed: int) -> None:
    """Indices from both ends; of those that replace, none twice."""
    rng = np.random.default_rng(seed)
    shape = tuple(int(n) for n in rng.integers(1, 6, 3))
    axis = int(rng.integers(3))
    less = tuple(int(rng.integers(1, n + 1)) for n in shape)
    order = np.argsort(rng.random([shape[axis] if i == axis else n for i, n in enumerate(less)]), axis)
    picked = order.take(range(less[axis]), axis) if how == "none" else rng.integers(0, shape[axis], less)
    indices = np.where(rng.random(less) < 0.5, picked, picked - shape[axis])
    made = node("ScatterElements", "x at u", "y", axis=axis, **({} if how == "none" else {"reduction": how}))
    _check(made, {"at": indices}, x=random(*shape), u=random(*less, seed=1))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("how", ["mul", "min", "max"])
def test_slices_are_scattered(how: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    shape, depth = tuple(int(n) for n in rng.integers(1, 6, 3)), int(rng.integers(1, 4))
    at = np.stack([rng.integers(-n, n, 5) for n in shape[:depth]], -1)
    made = node("ScatterND", "x at u", "y", reduction=how)
    _check(made, {"at": at}, x=random(*shape), u=random(5, *shape[depth:], seed=1))


@pytest.mark.parametrize("n", [1, 2, 3, 4, 6, 9])
def test_determinants(n: int) -> None:
    _check(node("Det", "x", "y"), x=random(2, 3, n, n))


def test_boxes_that_only_data_can_select_are_refused_and_constant_ones_are_selected() -> None:
    constants = {
        "boxes": np.array([[[0, 0, 1, 1], [0, 0.1, 1, 1.1], [0, 10, 1, 11]]], np.float32),
        "scores": np.array([[[0.9, 0.75, 0.6]]], np.float32),
        "most": np.array([3]),
        "iou": np.array([0.5], np.float32),
    }
    made = [helper.make_node("Constant", [], [k], value=numpy_helper.from_array(v)) for k, v in constants.items()]
    nodes = [
        node("NonMaxSuppression", "boxes scores most iou", "s", "pick"),
        node("Cast", "s", "f", to=TensorProto.FLOAT),
    ]
    nodes.append(node("MatMul", "f x", "y"))
    same_as_onnxruntime(model([*made, *nodes], {"x": (3, 2)}, ["y"]), x=random(3, 2))
    data = model([*made[1:], *nodes], {"x": (3, 2), "boxes": (1, 3, 4)}, ["y"])
    told = r"node 'pick' \(NonMaxSuppression\).*how many boxes it selects depends on the data.*'boxes' and 'scores'"
    with pytest.raises(UnsupportedError, match=told):
        from_onnx(data)


def test_a_detector_is_cut_before_it_selects_boxes(tmp_path: Path) -> None:
    """As files use it: boxes are gathered by what is selected. The error says how to cut the file."""
    thresholds = {"most": np.array([3]), "iou": np.array([0.5], np.float32), "box": np.array(2), "rest": np.array([-1])}
    nodes = [
        node("MatMul", "x w", "boxes"),
        node("ReduceSum", "boxes rest", "s", keepdims=0),
        node("Unsqueeze", "s one", "scores"),
        node("NonMaxSuppression", "boxes scores most iou", "chosen", "pick"),
        node("Gather", "chosen box", "places", axis=1),
        node("Gather", "boxes places", "y", axis=1),
    ]
    constants = {**thresholds, "w": random(8, 4), "one": np.array([1])}
    proto = model(nodes, {"x": (1, 5, 8)}, ["y"], constants)
    with pytest.raises(UnsupportedError, match="extract_model writes one with the outputs 'boxes' and"):
        from_onnx(proto)
    onnx.save(onnx.shape_inference.infer_shapes(proto), tmp_path / "whole.onnx")
    onnx.utils.extract_model(tmp_path / "whole.onnx", tmp_path / "cut.onnx", ["x"], ["boxes", "scores"])
    x = random(1, 5, 8)
    found = run(from_onnx(tmp_path / "cut.onnx"), x=x)
    np.testing.assert_allclose(found["boxes"], x @ constants["w"], rtol=1e-4, atol=1e-5)
    assert found["scores"].shape == (1, 1, 5)


@pytest.mark.parametrize("mode", ["linear", "nearest", "cubic"])
@pytest.mark.parametrize(
    "region, sizes, value",
    [
        ((0.375, 0.5625, 0.625, 0.8125), (3, 3), 0.0),
        ((0.0, 0.25, 1.0, 0.75), (7, 4), 0.0),
        ((0.125, 0.625, 1.25, 1.6875), (4, 3), 10.0),
        ((-0.5, 0.1875, 0.6875, 0.9375), (5, 1), -1.5),
        ((0.8125, 0.9375, 0.3125, 0.125), (3, 5), 0.5),
        ((0.0, 0.0, 1.0, 1.0), (6, 9), 1.0),
    ],
)
def test_a_part_is_cropped_and_resized(
    mode: str, region: tuple[float, ...], sizes: tuple[int, int], value: float
) -> None:
    """The regions are short in binary: ONNX Runtime computes coordinates in float32, and foreplan in float64."""
    begins, ends = region[:2], region[2:]
    known = {
        "roi": np.array([0, 0, *begins, 1, 1, *ends], np.float32),
        "sizes": np.array([2, 3, *sizes]),
    }
    crop = {"coordinate_transformation_mode": "tf_crop_and_resize", "extrapolation_value": value, "mode": mode}
    _check(node("Resize", "x roi - sizes", "y", **crop), known, x=random(2, 3, 6, 9))
    if mode == "linear":
        known = {"roi": np.array(region, np.float32), "sizes": np.array(sizes)}
        _check(node("Resize", "x roi - sizes", "y", axes=[2, 3], **crop), known, x=random(2, 3, 6, 9))


def test_a_region_of_a_crop_is_one_number_for_each_end() -> None:
    crop = node("Resize", "x roi - sizes", "y", coordinate_transformation_mode="tf_crop_and_resize", axes=[2, 3])
    constants = {"roi": np.zeros(3, np.float32), "sizes": np.array([3, 3])}
    with pytest.raises(ShapeError, match="its region must have 4 numbers for 2 axes, and has 3"):
        from_onnx(model([crop], {"x": (1, 1, 4, 4)}, ["y"], constants))
