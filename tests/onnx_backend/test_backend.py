"""foreplan as a backend of the onnx package."""

from __future__ import annotations

import unittest
from random import Random

import numpy as np
import onnx
import onnx.backend.test
import pytest
from onnx import TensorProto, helper

from foreplan import onnx_backend
from foreplan.base.errors import InputError, UnsupportedError, UsageError, ValueNeededError
from foreplan.onnx_backend import Backend
from foreplan.runtime.cuda.libraries import driver
from tests.frontend.onnx.models import info, model, node, random
from tests.frontend.onnx.suites import Case, cases
from tests.gpu.card import FakeCard
from tests.gpu.compiled import needs_gcc
from tests.profile import pick


def typed(proto: onnx.ModelProto, shape: tuple[str, ...] = ("a", "b"), **outputs: int) -> onnx.ModelProto:
    """With the element types and the axes of outputs, as onnx's checker wants them."""
    for value in proto.graph.output:
        value.CopyFrom(info(value.name, shape, outputs.get(value.name, TensorProto.FLOAT)))
    return proto


def tiled() -> onnx.ModelProto:
    proto = typed(model([node("Tile", "x times", "y"), node("Neg", "x", "z")], {"x": ("n", 3)}, ["y", "z"]))
    proto.graph.input.append(info("times", (2,), TensorProto.INT64))
    return proto


@pytest.mark.parametrize("device", ["CPU", "numpy", "cpu:threads=1"])
def test_a_model_runs_on_arrays_of_any_size(device: str) -> None:
    prepared = Backend.prepare(tiled(), device)
    for rows, times in ((2, (1, 2)), (2, (3, 1)), (5, (3, 1)), (2, (1, 2))):
        x = random(rows, 3)
        found = prepared.run([x, np.array(times)])
        np.testing.assert_array_equal(found.y, np.tile(x, times))
        np.testing.assert_array_equal(found["z"], -x)
        assert [*prepared.bound] == ["times"] and len(found) == 2


def test_a_model_is_compiled_once_for_the_same_shapes_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    whole = onnx_backend.compile
    monkeypatch.setattr(onnx_backend, "compile", lambda *args, **options: compiled.append(1) or whole(*args, **options))
    prepared = Backend.prepare(tiled(), "numpy")
    for seed in range(3):
        prepared.run({"times": np.array([1, 2]), "x": random(2, 3, seed=seed)})
    assert len(compiled) == 1
    prepared.run({"times": np.array([2, 2]), "x": random(2, 3)})
    assert len(compiled) == 2


def test_one_node_and_one_model_run_at_once() -> None:
    x, y = random(3, 4), random(4, 2)
    (product,) = Backend.run_node(helper.make_node("MatMul", ["a", "b"], ["c"]), [x, y], "numpy")
    np.testing.assert_allclose(product, x @ y, rtol=1e-6)
    (twice,) = Backend.run_node(
        helper.make_node("Add", ["a", "a"], ["c"]), [x], "numpy", [(np.dtype(np.float32), x.shape)], opset_version=14
    )
    np.testing.assert_array_equal(twice, x + x)
    proto = typed(model([node("Neg", "x", "y")], {"x": (3, 4)}, ["y"]))
    (negative,) = Backend.run_model(proto, x, "numpy")
    np.testing.assert_array_equal(negative, -x)


def test_devices_are_onnx_names_or_targets() -> None:
    assert Backend.supports_device("CPU") and Backend.supports_device("numpy")
    assert not Backend.supports_device("XPU") and not Backend.supports_device("CUDA:1")
    with pytest.raises(UsageError, match="target"):
        Backend.prepare(tiled(), "XPU")


def test_what_is_not_supported_is_told_at_once() -> None:
    proto = typed(model([node("StringConcat", "x x", "y")], {}, ["y"], opset=20), ("n",), y=TensorProto.STRING)
    proto.graph.input.append(info("x", (2,), TensorProto.STRING))
    assert not Backend.is_compatible(proto, "numpy") and Backend.is_compatible(tiled(), "numpy")
    with pytest.raises(UnsupportedError, match="STRING"):
        Backend.prepare(proto, "numpy")
    broken = model([node("Neg", "nobody", "y")], {"x": (2,)}, ["y"])
    assert not Backend.is_compatible(broken, "numpy")


def test_wrong_calls_are_told() -> None:
    prepared = Backend.prepare(tiled(), "numpy")
    with pytest.raises(UsageError, match="2 inputs, and 3 are given"):
        prepared.run([random(2, 3)] * 3)
    with pytest.raises(InputError, match="'times' is missing"):
        prepared.run({"x": random(2, 3)})
    with pytest.raises(UsageError, match="no option 'fast'"):
        prepared.run([random(2, 3)], fast=True)
    with pytest.raises(UsageError, match="no option 'fast'"):
        Backend.prepare(tiled(), fast=True)


def test_data_decide_no_shapes() -> None:
    nodes = [node("ReduceSum", "x", "s", keepdims=0), node("Range", "zero s one", "y")]
    proto = model(nodes, {"x": (40, 40)}, ["y"], {"zero": np.float32(0), "one": np.float32(1)})
    with pytest.raises(ValueNeededError, match="input 'x'"):
        Backend.prepare(typed(proto, ("n",)), "numpy").run([random(40, 40)])


@pytest.mark.thorough
def test_the_runner_of_onnx_passes() -> None:
    """Cases as the onnx package itself runs them."""
    tests = onnx.backend.test.BackendTest(Backend, __name__)
    tests.include("test_(slice|concat_1d|reshape|tile|range_int|quantizelinear|castlike_int4|expand)[a-z_0-9]*_cpu$")
    (suite,) = (found for name, found in tests.test_cases.items() if "NodeModel" in name)
    result = unittest.TestResult()
    for test in unittest.defaultTestLoader.loadTestsFromTestCase(suite):
        test(result)
    assert not result.failures and not result.errors, [text for _, text in (*result.failures, *result.errors)]


@pytest.fixture(scope="module")
def named() -> dict[str, Case]:
    """ONNX's cases of single nodes, which it makes in some seconds."""
    return {case.name: case for case in cases("node")}


@needs_gcc
def test_cases_on_a_card_that_is_not_there(named: dict[str, Case], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "card", lambda: FakeCard(False))
    chosen = ["test_tile", "test_cast_FLOAT_to_FLOAT8E4M3FN", "test_dequantizelinear_int4", "test_matmulinteger"]
    chosen += Random(0).sample(["test_relu", "test_slice", "test_softmax_axis_1", "test_qlinearconv"], pick(0, 2, 4))
    for name in chosen:
        ((inputs, expected),) = named[name].data_sets
        found = Backend.prepare(named[name].model, "cuda:h100").run(inputs)
        for got, wanted in zip(found, expected, strict=True):
            assert wanted is not None and got.dtype == wanted.dtype
            np.testing.assert_allclose(got.astype(np.float32), wanted.astype(np.float32), rtol=1e-5, err_msg=name)
