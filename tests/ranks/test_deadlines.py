"""A rank that does not come ends the others, which name it, where it runs and what they wait for."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import foreplan as fp
from foreplan.runtime.ranks import current, launch
from foreplan.runtime.ranks.deadlines import LateError, RankProcess, late, lost
from tests.ranks.differences import batch_for, stages_of, step_of
from tests.ranks.threads import Thread, run

KINDS: dict[str, Any] = {
    "all alike": lambda: [step_of(2)] * 2,
    "state in parts": lambda: [step_of(2, shard="state")] * 2,
    "parameters in parts": lambda: [step_of(2, shard="parameters")] * 2,
    "micro-batches": lambda: [step_of(2, accumulate=2)] * 2,
    "stages": lambda: stages_of(2),
}
HERE = RankProcess.here()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("leaves", ["before it binds", "before a step", "before a save", "before a load"])
@pytest.mark.parametrize("which", [0, 1])
def test_a_rank_that_leaves_is_named(tmp_path: Path, kind: str, leaves: str, which: int) -> None:
    steps, path = KINDS[kind](), tmp_path / "w.safetensors"

    def job(world: Thread) -> str:
        step = steps[world.rank]

        def comes(what: str) -> bool:
            return leaves != what or world.rank != which

        try:
            if not comes("before it binds"):
                return ""
            session, batch = step.bind(), batch_for(step, micro_batches=step.accumulate)
            session.step(batch)
            if not comes("before a step"):
                return ""
            session.step(batch)
            if not comes("before a save"):
                return ""
            session.save(path)
            if not comes("before a load"):
                return ""
            session.load(path)
        except LateError as error:
            assert error.ranks == (which,)
            return str(error)
        return ""

    errors = run(2, job)
    other = errors[1 - which]
    assert f"rank {1 - which} has waited " in other and "--deadline" in other, errors
    assert f"rank {which} (process {os.getpid()} on {socket.gethostname()}) has not come" in other, errors
    assert ("of node '" in other) == (leaves == "before a step"), errors
    assert errors[which] == ""


def test_groups_wait_for_a_deadline_too() -> None:
    def job(world: Thread) -> object:
        group = world.group(2, 2)  # ranks 0 and 2, ranks 1 and 3
        if world.rank == 2:
            return None
        try:
            return group.gather(1)
        except LateError as error:
            return error.ranks

    found = run(4, job)
    assert found == [(2,), [1, 1], None, [1, 1]]


def test_who_is_late() -> None:
    """Of those that take part, who does not wait; if all of them do, whoever else does not; else nobody."""
    who = [RankProcess("elsewhere", 10 + rank) for rank in range(4)]
    waits = {1: "a step", 2: "another"}
    assert late("a step", 0, 9.0, [0, 1, 2, 3], waits, who).ranks == (3,)
    chain = late("a step", 0, 9.0, [0, 2], waits, who)
    assert chain.ranks == (3,) and "rank 2 waits for another" in str(chain) and "rank 1 waits" not in str(chain)
    nobody = late("a step", 0, 9.0, [0, 2], waits | {3: "a save"}, who)
    assert nobody.ranks == () and "the same calls in the same order" in str(nobody)
    many = late("a step", 0, 9.0, range(20), {}, [RankProcess("elsewhere", rank) for rank in range(20)])
    assert "nor have 14 more ranks" in str(many)


def test_what_can_be_seen_of_a_process() -> None:
    """Whether it is stopped or has ended, on this machine; of another one, nothing."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    who = HERE._replace(process=process.pid)
    try:
        assert "which" not in str(who)
        process.send_signal(signal.SIGSTOP)
        _until(lambda: "is stopped" in str(who))
        assert (
            RankProcess(HERE.host, process.pid, "elsewhere").state()
            == RankProcess(HERE.host, process.pid).state()
            == ""
        )
    finally:
        process.kill()
    _until(lambda: "has ended" in str(who))  # nobody has waited for it yet
    process.wait()
    assert who.state() == "has ended"
    told = lost("a step", 0, RuntimeError("closed\nby peer"), [0, 1, 2], {2: "a step"}, [HERE, who, who])
    assert told.ranks == (1,) and "(closed)" in str(told)


def _until(holds: Any) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("wrong", [0, -1, float("nan"), float("inf"), True, "10"])
def test_a_deadline_is_a_number_of_seconds(wrong: Any) -> None:
    with pytest.raises(fp.UsageError, match="deadline must be in"):
        current(deadline=wrong)


def test_the_first_call_says_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    job = launch._Job()
    monkeypatch.setattr(launch, "_job", job)
    assert current(deadline=5).size == 1 and job.deadline == 5
    job.world = object()  # type: ignore[assignment]
    assert current(deadline=5) is job.world
    with pytest.raises(fp.UsageError, match="in the first call"):
        current(deadline=6)


def test_nothing_of_this_process_waits_in_the_library_when_python_ends() -> None:
    """A thread that C++ holds then ends the process as a fault, whatever it has trained."""
    code = (
        "import atexit, threading, time\n"
        "from types import SimpleNamespace\n"
        "from foreplan.runtime.ranks import gloo\n"
        "gloo._LONG = 0.05\n"
        "atexit.register(lambda: print([each.name for each in threading.enumerate()]))\n"
        "waits = gloo._Waits(SimpleNamespace(set=lambda name, what: time.sleep(0.2)), 0, 2, 60.0)\n"
        "waits._number, waits.what = 1, 'gradients'\n"
        "time.sleep(0.15)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['MainThread']"
