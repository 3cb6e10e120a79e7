"""Loops whose body is planned once: bytes and instructions, plan files, poison, and another engine's kernels."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import foreplan as fp
from foreplan import nn
from foreplan.base.errors import PlanError
from foreplan.planner.no_reuse import without_reuse
from foreplan.runtime.planfile import digest_of
from foreplan.runtime.session import Session
from tests.runtime.test_planfile import sealed

ITEMS, SIZE = 4, 16


def compiled(steps: int, target: str = "numpy", **options: Any) -> fp.Compiled:
    def cell(h: Any, x: Any) -> Any:
        h = np.tanh(nn.linear(h, SIZE, name="state") + x)
        return h, h

    def model(x: Any) -> Any:
        return nn.linear(fp.scan(cell, np.zeros((ITEMS, SIZE)), nn.linear(x, SIZE, name="in"))[0], 3, name="head")

    graph = fp.trace(model, fp.spec((steps, ITEMS, 8)))
    return fp.compile(graph, fp.losses.cross_entropy, fp.optim.Momentum(0.1), target=target, **options)


def batch(steps: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((steps, ITEMS, 8)).astype(np.float32)
    return {"x": x, "target": rng.integers(0, 3, ITEMS)}


def losses(session: Session, steps: int) -> list[float]:
    return [float(session.step(batch(steps)).loss or 0.0) for _ in range(4)]


@pytest.mark.parametrize("target", ["numpy", "cpu:threads=1"])
def test_a_step_has_as_many_instructions_whatever_the_number_of_steps(target: str) -> None:
    blocks = (1, 2, 5)  # of rows: the scratch memory of products over all steps depends on how many rows are one block
    few, some, many = (compiled(512 // ITEMS * count, target) for count in blocks)
    assert len(few.plan.steps) == len(many.plan.steps) < 40
    each = (some.arena_bytes - few.arena_bytes) / (512 // ITEMS)  # the slice of x and two of the size of a carry
    assert each == ITEMS * (8 + 2 * SIZE) * 4
    assert many.arena_bytes == few.arena_bytes + 4 * (512 // ITEMS) * each


@pytest.mark.parametrize("target", ["numpy", "cpu:threads=1", "cpu:threads=2"])
def test_the_same_bits_whatever_lies_where(target: str) -> None:
    step = compiled(7, target)
    planned = losses(step.bind(seed=1), 7)
    assert losses(Session(step.program, without_reuse(step.plan, step.program), seed=1), 7) == planned
    assert losses(step.bind(seed=1, poison=True), 7) == planned


def test_engines_agree() -> None:
    numpys, ours = (losses(compiled(30, target).bind(seed=1), 30) for target in ("numpy", "cpu:threads=1"))
    np.testing.assert_allclose(ours, numpys, rtol=1e-5)


@pytest.mark.parametrize("target", ["numpy", "cpu:threads=1"])
def test_a_plan_file_names_the_body_and_its_workspace(target: str, tmp_path: Path) -> None:
    step, path = compiled(6, target), tmp_path / "step.plan"
    step.save(str(path))
    assert losses(fp.load_plan(str(path)).bind(seed=1), 6) == losses(step.bind(seed=1), 6)
    workspace = next(
        action.workspace
        for action, call in zip(step.program.actions, step.program.calls)
        if call.op.name == "loop" and action.workspace
    )
    head, _, body = path.read_text().partition(',\n"header"')
    assert f'"workspace":{workspace}' in body
    text = '"header"' + body.replace(f'"workspace":{workspace}', f'"workspace":{workspace - 64}').removesuffix("\n}\n")
    hostile = head.partition('"sha256"')[0] + f'"sha256": "{digest_of(text)}",\n{text}\n}}\n'
    path.write_text(hostile)
    with pytest.raises(PlanError, match="workspace"):
        fp.load_plan(str(path))


def shifted(plan: Any) -> Any:
    """A write in the arena moves behind its end."""
    step = next(step for step in plan["steps"] if step[2])
    step[2] = [place + plan["plan"]["heights"][-1] for place in step[2]]
    return plan


WRONG: dict[str, Callable[[Any], Any]] = {
    "no plan": lambda plan: [],
    "no steps": lambda plan: plan | {"steps": []},
    "a step less": lambda plan: plan | {"steps": plan["steps"][:-1]},
    "other order": lambda plan: plan | {"steps": plan["steps"][::-1]},
    "lower": lambda plan: plan | {"plan": plan["plan"] | {"heights": [*plan["plan"]["heights"][:-1], 0]}},
    "moved": shifted,
    "another problem": lambda plan: plan | {"plan": plan["plan"] | {"problem": "0" * 64}},
    "more": lambda plan: plan | {"more": 1},
    "words": lambda plan: plan | {"steps": "none"},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_hostile_plan_of_a_body_is_refused(wrong: str, tmp_path: Path) -> None:
    path = tmp_path / "step.plan"
    step = compiled(6)
    step.save(str(path))
    data = json.loads(path.read_text())
    path.write_text(sealed(data))
    fp.load_plan(str(path))
    record = next(record for record in data["actions"] if "grad/loop" in record["name"] and "payload" in record)
    plan = WRONG[wrong](json.loads(base64.b64decode(record["payload"])))
    record["payload"] = base64.b64encode(json.dumps(plan, separators=(",", ":")).encode()).decode()
    path.write_text(sealed(data))
    with pytest.raises(PlanError):
        fp.load_plan(str(path))


def test_a_loaded_loop_needs_no_planner(tmp_path: Path) -> None:
    """As in a container with little memory: neither the planner nor LLVM is loaded."""
    path = tmp_path / "step.plan"
    compiled(6).save(str(path))
    code = (
        "import sys, numpy, foreplan as fp\n"
        f"fp.load_plan({str(path)!r}).bind().step({{'x': numpy.ones((6, 4, 8), 'f'), 'target': [0, 1, 2, 0]}})\n"
        "print([name for name in ('llvmlite', 'foreplan.planner.order.search') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_loop_of_what_numpy_alone_has_is_written_out_on_cpu() -> None:
    graph = fp.trace(lambda x: fp.scan(lambda c, row: (np.sort(c + row), c), x[0], x)[1], fp.spec((4, 6)))
    step = fp.compile(graph, target="cpu:threads=1")
    names = [call.op.name for call in step.program.calls]
    assert "loop" not in names
    assert any("NumPy's kernels run" in note for note in step.program.notes)
    x = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)
    ours, theirs = (s.bind().step({"x": x}).outputs["output"] for s in (step, fp.compile(graph)))
    assert np.array_equal(ours, theirs)
