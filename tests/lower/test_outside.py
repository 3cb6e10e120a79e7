"""What lies outside the arena on the host: what depends on the step follows the step, and each part says its basis."""

from __future__ import annotations

import mmap
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest

import foreplan as fp
from foreplan.base.calibration import Calibration, Table, own_file, record
from foreplan.base.errors import TargetError
from foreplan.base.outside import Part
from foreplan.lower.outside import Use, outside
from foreplan.runtime import processes as module
from foreplan.runtime.processes import PROCESSES, machine, outside_on_host, processes, versions_here
from tests.cpu.check import needs_onednn
from tests.views.small import small

FIGURES = MappingProxyType({name: 10**i for i, name in enumerate(PROCESSES.assumed)})
TABLE = Table(FIGURES)
ALWAYS = {"rest of the arena's last page", "what a step returns", "interpreter, NumPy, foreplan", "instructions"}
COMPILED = {"LLVM", "planner", "graph and actions"}


def sizes(parts: tuple[Part, ...]) -> dict[str, int]:
    return {part.name: part.nbytes for part in parts}


def step(target: str = "numpy", **options: object) -> fp.Compiled:
    graph = fp.models.build("mlp:batch=4,width=8,layers=2")
    return fp.compile(graph, fp.losses.cross_entropy, fp.optim.SGD(0.1), target=target, **options)


def test_a_process_that_loads_a_plan_holds_less(tmp_path: Path) -> None:
    made = step()
    made.save(tmp_path / "step.plan")
    loaded = fp.load_plan(tmp_path / "step.plan")
    assert set(sizes(made.memory.outside)) == ALWAYS | COMPILED
    assert set(sizes(loaded.memory.outside)) == ALWAYS
    assert loaded.memory.arena == made.memory.arena and loaded.memory.peak < made.memory.peak
    for each in (made, loaded):
        assert each.memory.peak == each.memory.arena + sum(part.nbytes for part in each.memory.outside)


def test_parts_follow_the_step() -> None:
    made = step()
    count, actions = len(made.plan.steps), len(made.program.actions)
    found = sizes(outside_on_host(made.program, made.plan, Use(), table=TABLE))
    assert found["rest of the arena's last page"] == -made.arena_bytes % mmap.PAGESIZE
    assert found["interpreter, NumPy, foreplan"] == FIGURES["interpreter_bytes"]
    assert found["instructions"] == count * FIGURES["numpy_bytes_per_instruction"]
    assert found["graph and actions"] == actions * FIGURES["planner_bytes_per_action"]
    assert outside(made.program, made.plan) == outside(made.program, made.plan, Use())
    other = fp.compile(fp.models.build("mlp:batch=2,width=4,layers=1"))
    more = sizes(outside_on_host(made.program, made.plan, Use(other=(other.program, other.plan)), table=TABLE))
    count, actions = len(other.plan.steps), len(other.program.actions)
    assert more["instructions"] - found["instructions"] == count * FIGURES["numpy_bytes_per_instruction"]
    assert more["graph and actions"] - found["graph and actions"] == actions * FIGURES["planner_bytes_per_action"]


@needs_onednn()
@pytest.mark.parametrize("threads", [1, 3])
def test_the_target_cpu_holds_its_libraries_and_threads(threads: int) -> None:
    made = step(f"cpu:threads={threads}")
    found = sizes(outside_on_host(made.program, made.plan, Use(compiles=False), threads, TABLE))
    assert set(found) == ALWAYS | {"LLVM", "oneDNN and compiled loops", "further threads"}
    assert found["further threads"] == (threads - 1) * FIGURES["thread_bytes"]
    assert found["instructions"] == len(made.plan.steps) * FIGURES["cpu_bytes_per_instruction"]


def test_what_a_step_returns_is_exact() -> None:
    made = step(outputs=list(fp.models.build("mlp:batch=4,width=8,layers=2").outputs))
    returned = made.bind().step({slot.name: _zeros(slot) for slot in made.program.inputs if slot.init is None})
    arrays = [*returned.outputs.values(), *returned.gradients.values()]
    (part,) = [part for part in made.memory.outside if part.name == "what a step returns"]
    assert part.basis == "exact" and part.nbytes == sum(array.nbytes for array in arrays) > 0


def test_gradients_and_micro_batches_are_returned() -> None:
    graph = fp.models.build("mlp:batch=4,width=8,layers=2")
    gradients = fp.compile(graph, fp.losses.cross_entropy)
    result = gradients.bind().step({slot.name: _zeros(slot) for slot in gradients.program.inputs if slot.init is None})
    parts = sizes(gradients.memory.outside)
    assert parts["what a step returns"] == sum(array.nbytes for array in result.gradients.values()) > 0
    name = next(iter(graph.outputs))
    whole = step(outputs=[name])
    halves = step(outputs=[name], accumulate=3)
    one, three = (sizes(each.memory.outside)["what a step returns"] for each in (whole, halves))
    assert three == 3 * one > 0
    assert halves.update is not None
    count = len(halves.plan.steps) + len(halves.update.plan.steps)
    assert sizes(halves.memory.outside)["instructions"] == count * processes().assumed["numpy_bytes_per_instruction"]


def _zeros(slot):
    import numpy as np

    return np.zeros(slot.operand.type.shape, slot.operand.type.dtype.numpy)


@pytest.mark.thorough
def test_copies_on_the_host_count_where_the_arena_is_there() -> None:
    graph = fp.models.build("mlp:batch=256,width=256,layers=4,inputs=16,classes=5")
    made = fp.compile(graph, fp.losses.cross_entropy, fp.optim.SGD(0.1), offload=True, remat="off", budget=0.8)
    assert made.host_bytes > 0
    assert sizes(made.memory.outside)["what is copied off the arena"] == made.host_bytes


def test_nothing_is_known_of_bare_problems_and_other_targets() -> None:
    problem, plan = small()
    assert fp.report.memory.Memory.of(problem, plan).outside == ()
    made = step()
    assert outside(replace(made.program, target="mine:fast"), made.plan) == ()


def test_a_calibration_of_this_machine_is_gone_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    made = step()
    assert {part.basis for part in made.memory.outside} == {"exact", "assumed"}
    record(Calibration(PROCESSES, machine(), dict(versions_here()), FIGURES))
    found = {part.name: part for part in made.memory.outside}
    assert {part.basis for part in found.values()} == {"exact", "calibrated"}
    assert found["planner"].nbytes == FIGURES["planner_bytes"] and "numpy" in found["planner"].source
    monkeypatch.setattr(module, "versions_here", lambda: {"python": "3.99"})
    found = {part.name: part for part in made.memory.outside}
    assert (found["planner"].nbytes, found["planner"].basis) == (FIGURES["planner_bytes"], "assumed")
    monkeypatch.setattr(module, "machine", lambda: "Plan9 vax")
    assert {part.name: part.nbytes for part in made.memory.outside}["planner"] == processes().assumed["planner_bytes"]
    path = own_file(PROCESSES)
    assert path is not None
    path.write_text("[[calibrated]]")
    with pytest.raises(TargetError, match=r"processes\.toml.*needs a machine"):
        made.estimate()


def test_a_budget_on_the_host_is_one_of_the_arena() -> None:
    made = step()
    least = step(budget=made.arena_bytes)
    assert least.plan.budget == made.arena_bytes >= least.arena_bytes
    with pytest.raises(fp.DoesNotFitError) as caught:
        step(budget="1KiB")
    error = caught.value
    assert error.plan is not None and error.needed == error.plan.arena_bytes < made.memory.peak
    assert f"({error.needed:,} bytes)" in str(error)


def test_the_text_tells_the_whole_process() -> None:
    memory = step().memory
    lines = str(memory).splitlines()
    assert f"{memory.peak:,} bytes" in lines[0] and "of the whole process" in lines[0]
    below = lines[lines.index("outside the arena:") :]
    for part in memory.outside:
        assert any(part.name in line and part.basis in line for line in below)


def test_asking_loads_nothing_that_the_process_would_not_hold() -> None:
    code = (
        "import sys, foreplan as fp\n"
        "from foreplan.runtime.processes import processes, versions_here\n"
        "processes(), versions_here()\n"
        "print([m for m in ('llvmlite', 'onnx') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("function", ["gelu", "tanh"])
def test_a_function_that_is_compiled_has_llvm_loaded(function: str, tmp_path: Path) -> None:
    """As for erf, of which gelu is made: also where a plan is loaded, which else needs no compiler."""
    graph = fp.trace(lambda x: {"y": getattr(fp.nn, function)(x)}, fp.spec((4, 4)))
    fp.compile(graph).save(path := tmp_path / "step.plan")
    parts = {part.name for part in fp.load_plan(path).memory.outside}
    code = (
        "import sys, numpy, foreplan as fp\n"
        f"fp.load_plan({str(path)!r}).bind().step({{'x': numpy.ones((4, 4), numpy.float32)}})\n"
        "print('llvmlite' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ("LLVM" in parts) == (done.stdout.strip() == "True") == (function == "gelu")
