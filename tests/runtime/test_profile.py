"""Profiles: where the time of a step goes, by kernel and by module."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import foreplan as fp
from foreplan.base.errors import UsageError
from foreplan.runtime.check import Timing
from foreplan.runtime.engine import Peak
from foreplan.runtime.inputs import made_up
from foreplan.runtime.profile import Profile
from tests.cli.shell import answer, foreplan
from tests.cpu.check import needs_onednn
from tests.profile import few

GPT = "gpt2_small:batch=2,seq=16,layers=2,width=32,heads=2,vocabulary=64"
CPU = "cpu:threads=1"
MEASURED = [("numpy", 2), pytest.param(CPU, 1, marks=needs_onednn())]
MEASURED += [("numpy", 1), pytest.param(CPU, 2, marks=needs_onednn())]


def timing(node: str, op: str, seconds: float, **more: float) -> Timing:
    figures = {"predicted_seconds": 2 * seconds, "nbytes": 1_000_000, "flops": 4_000_000} | more
    return Timing(node, op, "loops", seconds, **figures)


DRAWN = Profile(
    "cpu:threads=1",
    0.009,
    (
        timing("stem.conv/conv", "conv", 0.004),
        timing("stem.norm/map", "map", 0.001, flops=0),
        timing("head/matmul", "matmul", 0.002, nbytes=0),
        timing("head/matmul/grad/matmul", "matmul", 0.003),
        timing("tiny/map", "map", 1e-6),
    ),
    Peak(4_000_000_000, 1_000_000_000, "made up"),
)


def test_groups_add_up() -> None:
    kernels = {group.name: group for group in DRAWN.by_kernel()}
    assert [*kernels] == ["matmul loops", "conv loops", "map loops"]  # by time
    assert kernels["matmul loops"].count == 2 and kernels["matmul loops"].seconds == pytest.approx(0.005)
    assert kernels["matmul loops"].flops == 8_000_000 and kernels["matmul loops"].nbytes == 1_000_000
    assert sum(group.seconds for group in kernels.values()) == pytest.approx(DRAWN.seconds)
    assert DRAWN.predicted_seconds == pytest.approx(2 * DRAWN.seconds)
    # A millisecond each by operations or by bytes: of 4, 1, and 5 ms.
    assert [kernels[f"{op} loops"].peak_ratio for op in ("conv", "matmul")] == pytest.approx([1 / 4, 2 / 5])
    modules = {group.name: group for group in DRAWN.by_module()}
    assert modules["stem"].seconds == pytest.approx(0.005) and modules["stem"].count == 2
    assert modules["head"].count == modules["head/matmul"].count == 2
    assert modules["stem.norm/map"].seconds == 0.001


def test_tables_leave_out_what_says_nothing() -> None:
    text = str(DRAWN)
    rows = [line.split()[0] for line in text.splitlines() if line and line[0] != " "]
    assert "stem" in rows and "stem.conv" in rows and "head" in rows
    assert "head/matmul" not in rows  # all of `head`
    assert "stem.conv/conv" not in rows and "tiny" not in rows
    assert "4 GFLOP/s in float32 and 1.0 GB/s (made up)" in text


@pytest.mark.parametrize(("target", "accumulate"), few(MEASURED, (0, 1)))
def test_a_step_is_measured_whole(target: str, accumulate: int) -> None:
    graph, loss = fp.models.build(GPT), fp.losses.cross_entropy
    step = fp.compile(graph, loss, fp.optim.SGD(0.1), target=target, accumulate=accumulate)
    data = made_up(step.program, 0, accumulate)
    found = step.bind(seed=1).profile(data, steps=2)
    ran = len(step.plan.steps) * accumulate + (0 if step.update is None else len(step.update.plan.steps))
    assert len(found.instructions) == ran
    assert min(found.seconds, found.step_seconds) > 0
    assert found.peak.flops_per_second > 1e8 and found.peak.bytes_per_second > 1e8
    if accumulate == 1:
        planned = [step.program.actions[each.action] for each in step.plan.steps]
        assert [each.node for each in found.instructions] == [action.name for action in planned]
        assert found.predicted_seconds == pytest.approx(sum(action.nanoseconds for action in planned) / 1e9)
        assert sum(each.flops for each in found.instructions) == step.estimate()["flops"]
    assert json.loads(json.dumps(found.to_json()))["seconds"] == found.seconds


def test_the_command_tells_and_writes_a_timeline(tmp_path: Path) -> None:
    path = tmp_path / "step.trace.json"
    done = foreplan("profile", GPT, "--steps", 1, "-o", path)
    assert done.stdout.startswith("gpt2_small, training on numpy\na step takes ") and "h.1.mlp" in done.stdout
    events = json.loads(path.read_text())
    assert events["otherData"]["clock"] == "measured time"
    figures = answer("profile", GPT, "--steps", 1)
    assert figures["mode"] == "training" and {"kernels", "modules", "step_seconds", "peak"} <= figures.keys()
    slices = [event["name"] for event in events["traceEvents"] if event["ph"] == "X"]
    assert slices == [each["node"] for each in figures["instructions"]]
    assert answer("profile", GPT, "--steps", 1, "--infer")["mode"] == "inference"


@pytest.mark.parametrize(
    ("options", "told"),
    [(("-o", "step.json"), "name the file"), (("--accumulate", 2, "-o", "step.trace.json"), "micro-batches has two")],
)
def test_what_is_no_timeline(
    options: tuple[object, ...], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = foreplan("profile", GPT, *options, code=UsageError.exit_code)
    assert told in done.stderr and not list(tmp_path.iterdir())
