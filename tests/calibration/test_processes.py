"""Processes are calibrated: every part is found back where processes hold what the parts say; real ones are near it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

import foreplan as fp
from foreplan.base.calibration import read_entries, record
from foreplan.base.errors import TargetError
from foreplan.calibration import processes as module
from foreplan.calibration.processes import ProcessMemory, calibrate_process, held_at_most
from foreplan.runtime.processes import PROCESSES
from tests.cpu.check import needs_onednn

MIB = 1 << 20
FIGURES = {
    "interpreter_bytes": 45 * MIB,
    "llvm_bytes": 110 * MIB,
    "planner_bytes": 33 * MIB,
    "planner_bytes_per_action": 50_000,
    "numpy_bytes_per_instruction": 10_000,
    "numpy_bytes_per_loop_call": 700,
    "cpu_bytes_per_loop_call": 1_300,
    "onednn_bytes": 20 * MIB,
    "cpu_bytes_per_instruction": 100_000,
    "thread_bytes": 2 * MIB,
}


def pretended(model: str, target: str, plan: str, load: bool = False) -> ProcessMemory:
    """A process as the parts have it."""
    Path(plan).touch()
    actions, instructions = (300, 280) if model == module.LARGE else (40, 35)
    calls = {module.LOOPS[0]: 400, module.LOOPS[1]: 50_000}.get(model, 0)
    f, cpu = FIGURES, target.startswith("cpu")
    engine = "cpu" if cpu else "numpy"
    held = f["interpreter_bytes"] + f[f"{engine}_bytes_per_instruction"] * instructions
    held += f[f"{engine}_bytes_per_loop_call"] * calls
    held += f["llvm_bytes"] if cpu or not load else 0
    held += (f["onednn_bytes"] + f["thread_bytes"] * target.endswith("2")) if cpu else 0
    held += 0 if load else f["planner_bytes"] + f["planner_bytes_per_action"] * actions
    return ProcessMemory(held, instructions, actions, calls)


@pytest.mark.parametrize("versions", [{"python": "3"}, {"python": "3", "onednn": "2025"}], ids=["numpy", "cpu"])
def test_every_part_is_found_back(versions: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_child", pretended)
    monkeypatch.setattr(module, "versions_here", lambda: versions)
    found = calibrate_process()
    assert found.versions == versions and found.kind is PROCESSES
    if "onednn" in versions:
        assert dict(found.figures) == FIGURES
        return
    # LLVM and the planner cannot be told apart where every process that holds one holds the other.
    together = FIGURES["llvm_bytes"] + FIGURES["planner_bytes"]
    always = (*PROCESSES.always, "numpy_bytes_per_loop_call")
    expected = {name: FIGURES[name] for name in always} | {"llvm_bytes": together, "planner_bytes": 0}
    assert dict(found.figures) == expected


def test_a_process_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SMALL", "no_such_model")
    with pytest.raises(TargetError, match=r"no_such_model on numpy could not be measured: .*no_such_model"):
        calibrate_process()


def test_a_machine_that_does_not_say(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="this needs Linux"):
        held_at_most(tmp_path)
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "status").write_text("Name:\tx\nVmHWM:\t    12 kB\n")
    assert held_at_most(tmp_path) == 12 * 1024


# What may be off, in bytes, where the machine was calibrated just before: no versions and no machine are in it.
# OpenBLAS touches up to 13 MiB of its buffer where a product has tens of thousands of rows, and the code that oneDNN
# makes takes a MiB or two for each kind of kernel.
OFF = 18 * MIB
MODELS = [
    "mlp:width=64,batch=16",
    "unet:batch=1,size=64,width=16",
    "gpt2_small:layers=2,batch=1,seq=64,width=128,heads=4,vocabulary=2000",
    "resnet18:batch=4,size=64",
    "lstm_lm:batch=4,seq=1500,layers=1,width=16,vocabulary=50",
]


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The settings of a user who has calibrated this machine."""
    folder = tmp_path_factory.mktemp("settings")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(folder))
        record(calibrate_process())
        yield folder


@pytest.mark.thorough
@needs_onednn()
@pytest.mark.parametrize(
    ("model", "target"),
    [
        (MODELS[0], "cpu:threads=2"),
        (MODELS[1], "numpy"),
        (MODELS[2], "cpu:threads=2"),
        (MODELS[3], "cpu:threads=1"),
        (MODELS[4], "numpy"),
    ],
)
def test_processes_hold_what_was_said(model: str, target: str, calibrated: Path, tmp_path: Path) -> None:
    plan = str(tmp_path / "step.plan")
    module._child(model, target, plan)  # which leaves compiled code in the cache
    made = module._child(model, target, plan)
    loaded = module._child(model, target, plan, True)
    memory = fp.load_plan(plan).memory
    assert {part.basis for part in memory.outside} == {"exact", "calibrated"}
    assert abs(memory.peak - memory.arena - loaded.beside) < OFF, (memory.outside, loaded)
    step = dataclasses.replace(fp.load_plan(plan), graph=fp.models.build(model))  # as a process that has compiled it
    assert abs(step.memory.peak - step.memory.arena - made.beside) < OFF, (step.memory.outside, made)


@pytest.mark.thorough
def test_a_figure_that_is_wrong_would_be_seen(calibrated: Path) -> None:
    """What every process holds is more than what may be off: it cannot be missing."""
    text = (calibrated / "foreplan" / "processes.toml").read_text()
    figures = read_entries(text, "", PROCESSES)[-1].figures
    assert figures["interpreter_bytes"] > OFF, figures
