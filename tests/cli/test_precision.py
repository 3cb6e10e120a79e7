"""`--precision` in the commands that take it, and as `compile` takes it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import foreplan as fp
from foreplan.base.errors import UsageError
from tests.cli.shell import MODEL, answer, foreplan

WIDE = "unet:batch=4,size=64,width=4"  # whose activations are most of its memory
BF16 = ("--precision", "bf16")
PRECISIONS = ("float32", "bf16")


def test_half_the_activations() -> None:
    plain, narrow = (answer("estimate", WIDE, "--remat", "off", *more)["categories"] for more in ((), BF16))
    assert narrow["activations"] < 0.6 * plain["activations"]
    assert narrow["parameters"] == plain["parameters"]
    assert narrow["optimizer_state"] == plain["optimizer_state"]


def test_training_writes_float32(tmp_path: Path, data: Path) -> None:
    from safetensors.numpy import load_file

    options = ("--data", data, "--steps", 20, "--lr", 0.1)
    losses = [answer("train", MODEL, *options, *more, "-o", tmp_path / "w")["losses"] for more in ((), BF16)]
    assert losses[1][-1] < 0.7 * losses[1][0]
    np.testing.assert_allclose(losses[1], losses[0], atol=0.05)
    assert {str(array.dtype) for name, array in load_file(tmp_path / "w").items() if "weight" in name} == {"float32"}


def test_a_plan_has_decided_on_it(tmp_path: Path) -> None:
    path = tmp_path / "step.plan"
    foreplan("plan", MODEL, *BF16, "-o", path)
    foreplan("verify", path)
    assert "--precision already" in foreplan("estimate", path, *BF16, code=2).stderr
    program = fp.load_plan(path).program
    assert any(str(operand.type.dtype) == "bfloat16" for call in program.calls for operand in call.outputs)


def test_a_saved_step_gives_the_same_bits(tmp_path: Path) -> None:
    step = fp.compile(fp.models.build(MODEL), fp.losses.cross_entropy, fp.optim.Adam(0.1), precision="bf16")
    step.save(tmp_path / "step.plan")
    rng = np.random.default_rng(0)
    data = {"x": rng.standard_normal((4, 6)).astype(np.float32), "target": rng.integers(0, 3, 4)}
    sessions = [each.bind(seed=3) for each in (step, fp.load_plan(tmp_path / "step.plan"))]
    losses = [[session.step(data).loss for _ in range(3)] for session in sessions]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("command", ["estimate", "bench"])
def test_a_wrong_one(command: str) -> None:
    assert (
        "'bf8' is not one of 'float32', 'bf16', 'fp16'" in foreplan(command, MODEL, "--precision", "bf8", code=2).stderr
    )
    with pytest.raises(UsageError, match="no precision None"):
        fp.compile(fp.models.build(MODEL), precision=None)  # type: ignore[arg-type]


def test_inference_returns_float32() -> None:
    graph, x = fp.models.build(MODEL), np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)
    plain, narrow = (fp.compile(graph, precision=p).bind(seed=1).step({"x": x}).outputs["logits"] for p in PRECISIONS)
    assert narrow.dtype == np.float32
    assert not np.array_equal(plain, narrow)
    np.testing.assert_allclose(narrow, plain, atol=4 * 2.0**-8 * np.abs(plain).max())
