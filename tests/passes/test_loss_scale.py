"""Dynamic loss scaling in float16: what it rescues, when it leaves an update out, and how the scale moves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import foreplan as fp
from foreplan.frontend import spec
from foreplan.graph import Graph, GraphBuilder, TensorType
from foreplan.graph.types import BOOL
from foreplan.passes.loss_scale import FIRST, GROWTH, LEAST, MOST, LossScale
from foreplan.runtime.session import Session
from tests.ops.check import evaluate

MODEL = "mlp:batch=8,width=16,layers=2,inputs=12,classes=3"
UNIT = 2.0**-11  # the most that one rounding to float16 changes a number by, beside its size


def data(seed: int = 0, times: float = 1.0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {"x": (times * rng.standard_normal((8, 12))).astype(np.float32), "target": rng.integers(0, 3, 8)}


TARGET = spec((8,), "int64")


def scaled_loss(factor: float) -> Any:
    def loss(logits, target=TARGET):  # type: ignore[no-untyped-def]
        return fp.losses.cross_entropy(logits, target) * factor

    return loss


def session(loss: Any, optimizer: Any, precision: str = "fp16", **more: Any) -> Session:
    return fp.compile(fp.models.build(MODEL), loss, optimizer, precision=precision, **more).bind(seed=2)


def contents(session: Session) -> dict[str, bytes]:
    return {name: session.stored[name].tobytes() for name in session.stored if "loss_scale" not in name}


@pytest.mark.parametrize(
    "optimizer",
    [
        fp.optim.SGD(0.1),
        fp.optim.Nesterov(0.1, clip_norm=0.01),
        fp.optim.Adam(0.01),
        fp.optim.AdamW(0.01, clip_norm=1.0),
    ],
    ids=lambda rule: type(rule).__name__,
)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_updates_are_those_of_float32_but_for_roundings(optimizer: Any, accumulate: int) -> None:
    sessions = [
        session(fp.losses.cross_entropy, optimizer, precision, accumulate=accumulate)
        for precision in ("float32", "fp16")
    ]
    given = [data(seed) for seed in range(accumulate)]
    one = given[0] if accumulate == 1 else {name: np.stack([each[name] for each in given]) for name in given[0]}
    before = {name: sessions[0].parameters[name] for name in sessions[0].parameters}
    for each in sessions:
        for _ in range(3):
            each.step(one)
    change = np.concatenate([(sessions[0].parameters[n] - x).ravel() for n, x in before.items()])
    found = np.concatenate([(sessions[1].parameters[n] - x).ravel() for n, x in before.items()])
    # Adam divides by the size of a gradient, however small, and so magnifies the errors of small ones.
    tolerance = 0.02 if isinstance(optimizer, fp.optim.Adam) else 16 * UNIT
    assert np.linalg.norm(found - change) <= tolerance * np.linalg.norm(change)
    assert sessions[1].steps_done == 3
    assert sessions[1].stored["loss_scale"] == FIRST
    assert sessions[1].stored["loss_scale/good_steps"] == 3


def test_gradients_that_would_be_zero_are_not() -> None:
    """Gradients below 2^-25 are zero in float16; a scale of 2^16 makes normal numbers of them."""
    plain, narrow = (session(scaled_loss(1e-7), fp.optim.SGD(1e6), precision) for precision in ("float32", "fp16"))
    before = plain.parameters["hidden0.weight"]
    for each in (plain, narrow):
        each.step(data())
    change = plain.parameters["hidden0.weight"] - before
    assert np.abs(change / 1e6).max() < 2.0**-24
    assert np.linalg.norm(narrow.parameters["hidden0.weight"] - before - change) <= 0.01 * np.linalg.norm(change)


@pytest.mark.parametrize("optimizer", [fp.optim.Nesterov(0.1), fp.optim.Adam(0.01, clip_norm=1.0)], ids=["", "clipped"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_overflow_leaves_the_update_out_and_halves_the_scale(optimizer: Any, accumulate: int) -> None:
    narrow = session(scaled_loss(30.0), optimizer, accumulate=accumulate)
    given = data() if accumulate == 1 else {name: np.stack([x, x]) for name, x in data().items()}
    before = contents(narrow)
    scales = [float(narrow.stored["loss_scale"])]
    while contents(narrow) == before:
        narrow.step(given)
        scales.append(float(narrow.stored["loss_scale"]))
        assert len(scales) < 20
    assert len(scales) > 2  # 30 · 2^16 is too much for float16, whose greatest number is 65,504
    assert scales == [FIRST / 2**i for i in range(len(scales) - 1)] + [scales[-2]]
    assert narrow.steps_done == 1 and narrow.stored["loss_scale/good_steps"] == 1
    assert all(np.isfinite(narrow.stored[name]).all() for name in narrow.parameters)


def test_good_steps_double_the_scale() -> None:
    narrow = session(fp.losses.cross_entropy, fp.optim.SGD(0.1))
    narrow.stored["loss_scale"] = np.float32(1024)
    narrow.stored["loss_scale/good_steps"] = np.int64(GROWTH - 2)
    found = []
    for _ in range(3):
        narrow.step(data())
        found.append((float(narrow.stored["loss_scale"]), int(narrow.stored["loss_scale/good_steps"])))
    assert found == [(1024, GROWTH - 1), (2048, 0), (2048, 1)]


@pytest.mark.parametrize(
    ("scale", "good", "finite", "expected"),
    [
        (LEAST, 5, False, (LEAST, 0)),
        (MOST, GROWTH - 1, True, (MOST, 0)),
        (8.0, GROWTH - 1, False, (4.0, 0)),
        (8.0, 7, True, (8.0, 8)),
    ],
)
def test_its_bounds(scale: float, good: int, finite: bool, expected: tuple[float, int]) -> None:
    b = GraphBuilder("g")
    ok = b.input("ok", TensorType(BOOL, ()))
    made = LossScale.stored(b)
    updates = made.updates(b, ok)
    graph = b.finish({}, updates)
    stored = {"loss_scale": np.float32(scale), "loss_scale/good_steps": np.int64(good)}
    found = evaluate(graph, {"ok": np.bool_(finite)}, stored)
    assert tuple(float(found[value]) for value in updates.values()) == expected


def test_a_checkpoint_goes_on_where_it_was(tmp_path) -> None:  # type: ignore[no-untyped-def]
    first = session(scaled_loss(30.0), fp.optim.Adam(0.01))
    for _ in range(4):
        first.step(data())
    first.save(tmp_path / "half")
    second = session(scaled_loss(30.0), fp.optim.Adam(0.01))
    second.load(tmp_path / "half")
    losses = [each.step(data()).loss for each in (first, second)]
    assert losses[0] == losses[1]
    assert contents(first) == contents(second)
    assert first.stored["loss_scale"] == second.stored["loss_scale"] < FIRST


def graph_of(precision: str) -> Graph:
    return fp.differentiate(fp.models.build(MODEL), fp.losses.cross_entropy, fp.optim.SGD(0.1), precision=precision)


def test_only_float16_is_scaled() -> None:
    assert {name: "loss_scale" in graph_of(name).as_text() for name in ("float32", "bf16", "fp16")} == {
        "float32": False,
        "bf16": False,
        "fp16": True,
    }
    gradients = fp.differentiate(fp.models.build(MODEL), fp.losses.cross_entropy, precision="fp16")
    assert "loss_scale" not in gradients.as_text()  # nothing would divide by it
