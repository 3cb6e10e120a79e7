"""Targets by their names and options."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pytest

import foreplan as fp
from foreplan.base.errors import TargetError, UsageError
from foreplan.base.processor import cores
from foreplan.frontend import Tensor, nn, scan, spec, trace
from foreplan.graph import Graph
from foreplan.lower import ENGINES, engine_info, lower, target_named, targets
from foreplan.ops.loop import Loop
from foreplan.options import Options
from foreplan.runtime.cpu import machine, target
from foreplan.runtime.loop import loop_of
from tests.cpu.check import notes_of

RESOLVED = targets.resolved  # before tests/conftest.py gives tests another default


def test_an_unknown_target_is_refused() -> None:
    with pytest.raises(UsageError, match="choose one of numpy"):
        lower(Graph("g", (), (), (), {}), "abacus")


@pytest.mark.parametrize(
    "target", ["numpy:threads=2", "cpu:cores=2", "cpu:threads", "cpu:threads=", "cpu:threads=two", "cpu:threads=²"]
)
def test_an_option_that_a_target_does_not_have_is_refused(target: str) -> None:
    with pytest.raises(UsageError, match="has no option"):
        target_named(target)


def test_the_target_cpu_takes_the_processors_that_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "cores", cores)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {1, 4, 6} if process == 0 else {0})
    assert [target_named(text).name for text in ("cpu", "cpu:threads=2")] == ["cpu:threads=3", "cpu:threads=2"]


@pytest.fixture
def usual_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target `auto` as users have it; see tests/conftest.py."""
    monkeypatch.setattr(targets, "resolved", RESOLVED)


def convolution() -> Graph:
    """16 × 16 images, 64 channels, 3 × 3 taps: Winograd's algorithm is the fastest where there is a choice."""
    return trace(lambda x: nn.conv(x, 64, kernel=3, padding=1, bias=False), spec((8, 64, 16, 16)), name="one")


@pytest.mark.usefixtures("usual_default")
def test_the_default_is_the_processor_by_onednn() -> None:
    program = lower(convolution())
    assert program.target.startswith("cpu:threads=") and not notes_of(program)
    assert engine_info("auto") is ENGINES["cpu"] and target_named("auto").name == target_named("cpu").name


@pytest.mark.usefixtures("usual_default")
def test_the_default_without_onednn_is_numpy_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise TargetError("the target cpu needs oneDNN: it is not installed")

    monkeypatch.setattr(machine, "this_machine", missing)
    targets.why_numpy.cache_clear()
    try:
        step = fp.compile(convolution())
        assert step.program.target == "numpy" and Options().to_json()["target"] == "numpy"
        (note,) = step.program.notes
        assert re.match("the target is numpy, whose steps take .* as long: the target cpu needs oneDNN", note)
        assert not fp.compile(convolution(), target="numpy").program.notes  # who asks for it knows
    finally:
        targets.why_numpy.cache_clear()


def test_strict_accuracy_leaves_out_transforms_on_a_processor() -> None:
    usual, strict = (lower(convolution(), "cpu:threads=1", accuracy=text) for text in ("default", "strict"))
    assert "winograd" in {call.kernel for call in usual.calls}
    assert strict.calls and "winograd" not in {call.kernel for call in strict.calls}
    assert strict.target == "cpu:threads=1,strict"


@pytest.mark.parametrize("target", ["numpy", "cpu", "cpu:threads=2", "cpu:threads=2,strict"])
def test_the_name_of_a_strict_target_means_the_same_target(target: str) -> None:
    made = target_named(target, accuracy="strict")
    assert target_named(made.name).name == made.name
    assert target_named(made.name, accuracy="strict").name == made.name
    assert made.name.endswith("strict") == target.startswith("cpu")


def test_a_strict_step_is_kept_in_plan_files(tmp_path: Path) -> None:
    step = fp.compile(convolution(), target="cpu:threads=1", accuracy="strict")
    step.save(tmp_path / "step.plan")
    read = fp.load_plan(tmp_path / "step.plan")
    assert read.program.target == "cpu:threads=1,strict" and read.options.accuracy == "strict"
    x = {"x": np.random.default_rng(0).normal(size=(8, 64, 16, 16)).astype(np.float32)}
    (ours,), (wanted,) = (
        s.bind(seed=0).step(x).outputs.values() for s in (read, fp.compile(convolution(), target="numpy"))
    )
    np.testing.assert_allclose(ours, wanted, rtol=1e-5, atol=1e-5)


def test_accuracy_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(UsageError, match="there is no accuracy 'high'; choose one of default, strict"):
        lower(convolution(), "cpu", accuracy="high")
    with pytest.raises(UsageError, match="for a target by name"):
        lower(convolution(), target_named("cpu"), accuracy="strict")
    with pytest.raises(UsageError, match="tf32 rounds more"):
        lower(convolution(), "cuda:h100,tf32", accuracy="strict")


def test_a_loop_in_a_strict_step_is_strict() -> None:
    def model(x: Tensor) -> Tensor:
        def step(carry: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
            after = nn.conv(carry, 64, kernel=3, padding=1, bias=False, name="same")
            return after, after

        return scan(step, x, np.zeros((2, 1), np.float32))[0]

    found = {}
    for accuracy in ("default", "strict"):
        program = lower(trace(model, spec((8, 64, 16, 16))), "cpu:threads=1", accuracy=accuracy)
        (call,) = (call for call in program.calls if isinstance(call.op, Loop))
        body = loop_of(call.op, program.target, call.payload).body
        found[accuracy] = {each.kernel for each in body.program.calls}
    assert "winograd" in found["default"] and "winograd" not in found["strict"]
