"""ONNX files: their bytes and their structure, and the numbers that well-formed ones give."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from onnx import helper

import foreplan as fp
from foreplan.base.errors import ForeplanError
from foreplan.graph import Graph, Value
from tests.fuzz.damage import bytes_changed, structure_changed
from tests.fuzz.drawn_graphs import drawn
from tests.fuzz.target import Target

MOST_BYTES = 32 << 20  # of an arena that is bound and run
_ORDERING = ("ReduceMax", "ReduceMin", "MaxPool", "GlobalMaxPool", "ArgMax", "ArgMin", "TopK", "Max", "Min", "Clip")
WRONG = 1e-3  # relative to the largest number of an output


@cache
def _models() -> tuple[bytes, ...]:
    """ONNX's small cases of single nodes."""
    from tests.frontend.onnx.suites import KINDS, cases

    found = [case.model.SerializeToString() for kind in KINDS for case in cases(kind)]
    return tuple(model for model in found if len(model) < 4096)


def draw(rng: random.Random) -> bytes:
    """A line of JSON that says how the model is run, and the model."""
    how: dict[str, Any] = {"seed": rng.getrandbits(32), "edge": rng.random() < 0.3, "cpu": rng.random() < 0.4}
    if rng.random() < 0.1:
        how["batch"] = rng.choice((1, 2, 3, 8))
    kind = rng.random()
    if kind < 0.35:
        how |= {"edge": False, "compare": True}
        how.pop("batch", None)
        return _case(how, drawn(rng).SerializeToString())
    whole = rng.choice(_models()) if rng.random() < 0.5 else drawn(rng).SerializeToString()
    if kind < 0.5:
        return _case(how, bytes_changed(rng, whole))
    model = onnx.ModelProto.FromString(whole)
    if rng.random() < 0.3:
        _undeclare(model)
    structure_changed(rng, model)
    return _case(how, model.SerializeToString())


def _undeclare(model: onnx.ModelProto) -> None:
    """Drop what is declared of outputs, so that a change is not refused for that alone."""
    for info in model.graph.output:
        info.ClearField("type")


def _case(how: dict[str, Any], model: bytes) -> bytes:
    return json.dumps(how).encode() + b"\n" + model


def run(content: bytes, folder: Path) -> None:
    """Import, compile, bind and run a step on each engine, then train.

    Raises:
        ForeplanError: the first refusal.
        AssertionError: engines differ, or ONNX Runtime gives something else.
    """
    head, _, model = content.partition(b"\n")
    how = json.loads(head)
    (folder / "held.bin").write_bytes(bytes(range(256)) * 8)
    (folder.parent / "outside.bin").write_bytes(bytes(64))
    (folder / "link").symlink_to(folder.parent / "outside.bin")
    path = folder / "model.onnx"
    path.write_bytes(model)
    graph = fp.from_onnx(path, batch=how.get("batch"))
    rng = np.random.default_rng(how["seed"])
    refusals: list[ForeplanError] = []
    found = []
    inputs: dict[str, np.ndarray] = {}
    targets = ("numpy", "cpu:threads=1") if how["cpu"] else ("numpy",)
    for target in targets:
        try:
            compiled = fp.compile(graph, target=target)
            if not _is_small(compiled):
                return
            inputs = inputs or {value.name: _numbers(value, rng, how["edge"]) for value in graph.inputs}
            found.append(_step(compiled.bind(), inputs))
        except ForeplanError as error:
            refusals.append(error)
    if how.get("compare") and found:
        _same(found[-1], found[0], "cpu and numpy")
        # Of no elements, ONNX Runtime's reductions have other shapes, and ONNX says of no mean what it is.
        values = (*graph.inputs, *(value for node in graph.nodes for value in node.outputs))
        if all(value.type.size for value in values) and not _skips(path):
            _compare(path, inputs, found[0])
    _train(graph, targets, inputs, refusals)
    if refusals:
        raise refusals[0]


def _skips(path: Path) -> bool:
    """Whether SAME padding has pools skip elements: ONNX Runtime takes pads below zero then, or refuses them; its
    convolutions, like TensorFlow, take none.
    """
    for node in onnx.load(path).graph.node:
        told = {each.name: helper.get_attribute_value(each) for each in node.attribute}
        taps, steps = told.get("kernel_shape", []), told.get("strides", [])
        same = told.get("auto_pad", b"").startswith(b"SAME") and node.op_type.endswith("Pool")
        if same and any(step > n for n, step in zip(taps, steps)):
            return True
    return False


def _is_small(compiled: Any) -> bool:
    return compiled.plan.arena_bytes <= MOST_BYTES


def _step(session: Any, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return dict(session.step(inputs).outputs)


def _train(graph: Graph, targets: Sequence[str], inputs: dict[str, np.ndarray], refusals: list[ForeplanError]) -> None:
    first = next(iter(graph.outputs.values()))
    if not first.dtype.is_float:
        return
    for target in targets:
        try:
            compiled = fp.compile(graph, loss=_mean, optimizer=fp.optim.SGD(0.1), target=target)
            if _is_small(compiled) and set(inputs) >= {value.name for value in compiled.graph.inputs}:
                _step(compiled.bind(), {value.name: inputs[value.name] for value in compiled.graph.inputs})
        except ForeplanError as error:
            refusals.append(error)


def _mean(*outputs: Any) -> Any:
    return outputs[0].mean()


def _numbers(value: Value, rng: np.random.Generator, edge: bool) -> np.ndarray:
    dtype, shape = value.dtype.numpy, value.shape
    if value.dtype.name == "bool":
        return rng.random(shape) < 0.5
    if "int" in value.dtype.name:
        limits = ml_dtypes.iinfo(dtype)
        chosen = [limits.min, limits.max, 0, 1, 2, 10] if edge else [max(limits.min, -3), -1, 0, 1, 2, 3, 7]
        held = [n for n in chosen if limits.min <= n <= limits.max]
        return np.array(held, dtype)[rng.integers(len(held), size=shape)]
    found = rng.standard_normal(shape).astype(np.float32)
    if edge:
        odd = np.array([np.nan, np.inf, -np.inf, 1e38, 2.0**-149, 0.0, -0.0, 1e18], np.float32)
        found = np.where(rng.random(shape) < 0.3, rng.choice(odd, shape), found)
    with np.errstate(all="ignore"):
        return found.astype(dtype)


def _same(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray], who: str) -> None:
    for name, b in wanted.items():
        a = found[name]
        assert (a.shape, a.dtype) == (b.shape, b.dtype), f"{who}: {name} is {a.dtype}{a.shape} and {b.dtype}{b.shape}"
        if b.dtype.kind in "iub":
            assert np.array_equal(a, b), f"{who} differ at {name}: {a.reshape(-1)[:9]} and {b.reshape(-1)[:9]}"
            continue
        a, b = a.astype(np.float64), b.astype(np.float64)
        finite = np.isfinite(b)
        scale = max(float(np.abs(b[finite]).max(initial=0.0)), 1.0)
        rough = 20 if wanted[name].dtype == np.float16 else 1
        if not math.isfinite(scale) or scale > 1e30:
            continue
        near = np.isclose(a, b, WRONG, WRONG * scale * rough, equal_nan=True)
        assert near.all(), f"{who} differ at {name}: {a[~near][:5]} and {b[~near][:5]}"


def _compare(path: Path, inputs: dict[str, np.ndarray], found: dict[str, np.ndarray]) -> None:
    """The outputs against ONNX Runtime's, where it takes the model."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    names = list(found)
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        wanted = dict(zip(names, session.run(names, inputs)))
    except Exception:  # it has no kernel for it
        return
    if any(node.op_type in _ORDERING for node in onnx.load(path).graph.node):  # ONNX says nothing of NaN there
        for name in names:
            a, b = found[name], wanted[name]
            if a.shape == b.shape and a.dtype == b.dtype and a.dtype.kind == "f":
                found = {**found, name: np.where(np.isnan(a) | np.isnan(b), 0, a)}
                wanted[name] = np.where(np.isnan(a) | np.isnan(b), 0, b)
    _same(found, wanted, "foreplan and ONNX Runtime")


def _prepare() -> None:
    """Load the models, and every engine."""
    import onnxruntime  # noqa: F401

    _models()
    graph = fp.from_onnx(drawn(random.Random(0)))
    for target in ("numpy", "cpu:threads=1"):
        fp.compile(graph, target=target).bind()


TARGET = Target("onnx", draw, run, _prepare, sample=60)
