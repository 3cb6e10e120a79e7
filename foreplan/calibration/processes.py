"""Measures the memory outside the arena in processes on this machine: `foreplan devices --calibrate`.

Run as a program, it is one of the processes that are measured.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType

from foreplan.base.calibration import Calibration
from foreplan.base.errors import TargetError
from foreplan.runtime.processes import PROCESSES, machine, versions_here

SMALL, LARGE = "conv_chain:size=16", "resnet18:batch=2,size=32"  # whose training steps are run
LOOPS = tuple(f"lstm_lm:batch=1,seq={steps},layers=1,width=16,vocabulary=16" for steps in (16, 2048))
STEPS = 3


@dataclass(frozen=True)
class ProcessMemory:
    """The memory that one process held.

    Attributes:
        beside: the most bytes that were resident, without the arena and the inputs.
        instructions: of the plan.
        actions: of the program.
        calls: of the loops of the plan.
    """

    beside: int
    instructions: int
    actions: int
    calls: int


def calibrate_process() -> Calibration:
    """Measure processes that compile a training step and run it, and others that load its plan and run it: a small step
    and a large one, and a short loop and a long one, on each engine. The differences between them are the figures of
    their parts.

    Raises:
        TargetError: this machine does not say what a process holds, or one has failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        numpy = _Engine("numpy", folder)
        figures = {
            "interpreter_bytes": numpy.loaded,
            "llvm_bytes": numpy.compiled - numpy.loaded,
            "planner_bytes": 0,
            "planner_bytes_per_action": numpy.per_action,
            "numpy_bytes_per_instruction": numpy.per_instruction,
            "numpy_bytes_per_loop_call": numpy.per_call,
        }
        if "onednn" in versions_here():
            cpu = _Engine("cpu:threads=1", folder)
            further = cpu.run(SMALL, True, "cpu:threads=2").beside - cpu.small.beside
            # LLVM is in both that compile and in both that run compiled loops.
            figures["planner_bytes"] = cpu.compiled - cpu.loaded
            figures["llvm_bytes"] -= figures["planner_bytes"]
            figures["onednn_bytes"] = cpu.loaded - numpy.loaded - figures["llvm_bytes"]
            figures["cpu_bytes_per_instruction"] = cpu.per_instruction
            figures["cpu_bytes_per_loop_call"] = cpu.per_call
            figures["thread_bytes"] = further
    found = {name: max(0, nbytes) for name, nbytes in figures.items()}
    return Calibration(PROCESSES, machine(), MappingProxyType(dict(versions_here())), MappingProxyType(found))


class _Engine:
    """The processes of one engine.

    Attributes:
        small: a process that has loaded the small step.
        loaded: bytes of that, but for what goes by a step's size.
        compiled: likewise of one that has compiled it.
        per_instruction: bytes for each instruction.
        per_call: bytes for each call of a loop.
        per_action: further bytes for each action where the process has compiled the step.
    """

    def __init__(self, target: str, folder: str) -> None:
        self.target, self.folder = target, folder
        compiled, loaded = ([self.run(model, load) for model in (SMALL, LARGE)] for load in (False, True))
        self.small, large = loaded
        per_instruction = (large.beside - self.small.beside) // (large.instructions - self.small.instructions)
        self.per_instruction = max(0, per_instruction)
        short, long = (self.run(model, True) for model in LOOPS)
        self.per_call = max(0, (long.beside - short.beside) // (long.calls - short.calls))
        more = [own.beside - other.beside for own, other in zip(compiled, loaded)]
        self.per_action = max(0, (more[1] - more[0]) // (compiled[1].actions - compiled[0].actions))
        self.loaded = self.small.beside - self.per_instruction * self.small.instructions
        self.compiled = self.loaded + more[0] - self.per_action * compiled[0].actions

    def run(self, model: str, load: bool, target: str = "") -> ProcessMemory:
        """The memory of a process that has compiled a step, or has loaded its plan. One that compiles also makes the
        compiled code that the cache lacks.
        """
        target = target or self.target
        plan = os.path.join(self.folder, f"{target} {model}.plan")
        if not os.path.exists(plan):
            _child(model, target, plan)  # which leaves compiled code and a plan, and counts for nothing
        return _child(model, target, plan, load)


def _child(model: str, target: str, plan: str, load: bool = False) -> ProcessMemory:
    given = json.dumps([model, target, plan, load])
    path = os.pathsep.join(each for each in sys.path if each)
    done = subprocess.run(
        [sys.executable, "-m", "foreplan.calibration.processes", given],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]
        raise TargetError(f"a process with a step of {model} on {target} could not be measured: {last}")
    return ProcessMemory(**json.loads(done.stdout.splitlines()[-1]))


def held_at_most(proc: Path = Path("/proc")) -> int:
    """The most bytes of this process that were resident.

    Raises:
        TargetError: the machine does not say. Source: proc_pid_status(5), VmHWM.
    """
    try:
        lines = (proc / "self" / "status").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise TargetError(f"{proc / 'self' / 'status'} does not say what a process holds: this needs Linux")


def _measured(model: str, target: str, plan: str, load: bool) -> Mapping[str, int]:
    import foreplan as fp
    from foreplan.compiler import kept_plans
    from foreplan.runtime.inputs import made_up
    from foreplan.runtime.loop import calls_of_loops

    kept_plans.in_use = False  # each process that compiles has to plan
    if load:
        step = fp.load_plan(plan)
    else:
        loss = getattr(fp.losses, fp.models.default_loss(model))
        step = fp.compile(fp.models.build(model), loss, fp.optim.Nesterov(0.1), target=target)
        step.save(plan)
    session, inputs = step.bind(), made_up(step.program)
    for _ in range(STEPS):
        session.step(inputs)
    beside = held_at_most() - step.arena_bytes - sum(array.nbytes for array in inputs.values())
    calls = calls_of_loops(step.program, step.plan)
    return asdict(ProcessMemory(beside, len(step.plan.steps), len(step.program.actions), calls))


if __name__ == "__main__":
    print(json.dumps(_measured(*json.loads(sys.argv[1]))))
