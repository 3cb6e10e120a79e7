"""Plans that many processes share: one of them plans, and all have the same."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import foreplan as fp
from foreplan.base import disk_cache
from foreplan.base.errors import DoesNotFitError
from foreplan.compiler import kept_plans, shared_plans
from foreplan.compiler.kept_plans import kept_plan
from foreplan.planner import Plan, driver
from tests.compiler.sharing import PROBLEM, Machine, only
from tests.profile import pick


def alike(shared: Plan, found: Plan) -> bool:
    """Whether two plans are the same but for how they were found."""
    return replace(shared, certificate=found.certificate) == found and shared.certificate == replace(
        found.certificate, placement="shared", order="shared", stages=()
    )


# Many processes.

PROCESS = """
import hashlib, sys, time
from pathlib import Path
from foreplan.compiler import kept_plans
from tests.planner.problems import training_chain

problem, folder, me = training_chain(1), Path(sys.argv[1]), sys.argv[2]
plan = kept_plans.plan

def planned(*question, **options):
    with open(folder / "planned" / me, "x"):
        time.sleep(0.5)
    return plan(*question, **options)

kept_plans.plan = planned
(folder / "ready" / me).touch()
while not (folder / "go").exists():
    time.sleep(0.02)
found = kept_plans.kept_plan(problem, sys.argv[3] if sys.argv[3:] else None, "auto")
text = found.as_text(problem) + repr(found)  + repr(found.certificate) + str(found.order_lower_bound_bytes)
(folder / "done" / me).write_text(hashlib.sha256(text.encode()).hexdigest())
"""


def at_once(folder: Path, plans: Path | str, count: int, budget: str = "", **environment: str) -> list[int]:
    """Processes that ask for one plan at the same time; what each exits with."""
    for name in ("ready", "planned", "done"):
        (folder / name).mkdir()
    command = [sys.executable, "-c", PROCESS, str(folder)]
    processes = [
        subprocess.Popen(
            [*command, str(i), *[budget] * bool(budget)],
            env=os.environ
            | {shared_plans.VARIABLE: str(plans)}
            | {name: value.format(i) for name, value in environment.items()},
            stderr=subprocess.PIPE,
        )
        for i in range(count)
    ]
    while len(os.listdir(folder / "ready")) < count:
        assert all(process.poll() is None for process in processes)
        time.sleep(0.02)
    (folder / "go").touch()
    said = [process.communicate(timeout=300)[1] for process in processes]
    codes = [process.returncode for process in processes]
    assert not any(said) or any(codes), b"".join(said).decode()
    return codes


@pytest.mark.slow
def test_of_processes_that_start_at_once_one_plans(tmp_path: Path, folder_of_plans: Path) -> None:
    """With a private cache each, as on many machines. What plans is not compiled: that takes longer than to plan."""
    count = pick(4, 8, 64)
    private = {disk_cache.VARIABLE: str(tmp_path / "private{}"), "FOREPLAN_JIT": "off"}
    assert at_once(tmp_path, folder_of_plans, count, **private) == [0] * count
    assert len(os.listdir(tmp_path / "planned")) == 1
    done = [file.read_text() for file in (tmp_path / "done").iterdir()]
    assert len(done) == count and len(set(done)) == 1
    content = only(folder_of_plans).read_bytes()  # no lock and nothing unfinished is left
    assert {only(tmp_path / f"private{i}").read_bytes() for i in range(count)} == {content}


@pytest.mark.slow
def test_what_fits_no_budget_fails_in_all_processes_at_once(tmp_path: Path, folder_of_plans: Path) -> None:
    """The first takes its time; the others, who have waited for it, do not wait for one another."""
    started = time.monotonic()
    assert at_once(tmp_path, folder_of_plans, 4, "1KiB") == [1] * 4
    assert len(os.listdir(tmp_path / "planned")) == 4 and not list(folder_of_plans.iterdir())
    assert time.monotonic() - started < 60


HOLDER = """
from foreplan.compiler import shared_plans
with shared_plans.turn("a"):
    print("held", flush=True)
    input()
"""


@pytest.mark.parametrize("killed", [True, False])
def test_nobody_waits_for_a_killed_process_nor_for_ever(
    machine: Machine, folder_of_plans: Path, killed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_plans, "PATIENCE", 60.0 if killed else 0.5)
    command = [sys.executable, "-c", HOLDER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"held\n"
        if killed:
            other.kill()
        waited = []
        for _ in range(2):
            started = time.monotonic()
            with shared_plans.turn("a") as later:
                assert later
            waited.append(time.monotonic() - started)
        assert (waited[0] >= 0.5) != killed and waited[1] < 0.4  # whoever has waited in vain waits no more
        assert [file.name for file in folder_of_plans.iterdir()] == ([] if killed else [f"a.{os.geteuid()}.lock"])
        other.kill()


def test_who_has_waited_takes_the_plan_that_has_come(
    machine: Machine, folder_of_plans: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = machine.found()
    content = only(folder_of_plans).read_bytes()
    name = only(folder_of_plans).name
    only(folder_of_plans).unlink()
    read = shared_plans.shared

    def late(asked: str) -> bytes | None:
        found = read(asked)
        (folder_of_plans / name).write_bytes(content)  # another process is done
        return found

    monkeypatch.setattr(shared_plans, "shared", late)
    assert machine.found() == right and machine.planned == 1


def test_where_nothing_can_be_locked_nobody_waits(
    machine: Machine, folder_of_plans: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*_: Any) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refused)
    plans = [machine.found() for _ in range(2)]
    assert plans[0] == plans[1] and machine.planned == 1 and not capsys.readouterr().err


# What is shared.


def test_plans_are_those_of_the_planner(machine: Machine, folder_of_plans: Path) -> None:
    most = driver.plan(PROBLEM).arena_bytes
    questions = [(None, "auto"), (None, "off"), (most - 4096, "auto"), (most, "off")]
    for budget, remat in questions * 2:
        found = driver.plan(PROBLEM, budget, remat)
        assert alike(machine.found(PROBLEM, budget, remat), found)
    assert machine.planned == len(questions) == len(list(folder_of_plans.iterdir()))


def test_plans_of_programs_are_shared(machine: Machine, folder_of_plans: Path) -> None:
    graph = fp.models.build("mlp:batch=4,width=8,layers=2")
    steps = []
    for _ in range(2):
        machine.next()
        steps.append(fp.compile(graph, fp.losses.cross_entropy, fp.optim.SGD(0.1), accumulate=2))
    assert machine.planned == 2 and steps[0].plan == steps[1].plan
    assert steps[0].update.plan == steps[1].update.plan


def test_the_private_cache_is_asked_first_and_filled(machine: Machine, folder_of_plans: Path) -> None:
    right = machine.found()
    assert only(machine.private()).read_bytes() == only(folder_of_plans).read_bytes()
    only(folder_of_plans).write_bytes(b"nonsense")
    assert kept_plan(PROBLEM, None, "auto") == right and machine.planned == 1
    assert only(folder_of_plans).read_bytes() == b"nonsense"


def test_a_plan_that_was_kept_before_says_no_more_than_a_shared_one(
    machine: Machine, folder_of_plans: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(shared_plans.VARIABLE)
    monkeypatch.setattr(kept_plans, "LEAST", 0)
    found = machine.found()
    assert found.certificate.stages and not list(folder_of_plans.iterdir())
    monkeypatch.setenv(shared_plans.VARIABLE, str(folder_of_plans))
    assert alike(kept_plan(PROBLEM, None, "auto"), found) and machine.planned == 1


def test_a_share_as_budget_is_not_shared(machine: Machine, folder_of_plans: Path) -> None:
    """What it comes to in bytes cannot be proved."""
    assert [machine.found(PROBLEM, 1.0) for _ in range(2)] == [driver.plan(PROBLEM, 1.0)] * 2
    assert machine.planned == 2 and not list(folder_of_plans.iterdir())


def test_what_lies_beside_the_arena_must_be_as_it_was(machine: Machine, folder_of_plans: Path) -> None:
    most = driver.plan(PROBLEM).arena_bytes
    for extra, planned in ((100, 1), (100, 1), (200, 2), (200, 2)):
        machine.found(PROBLEM, most + 300, "auto", lambda _, extra=extra: extra)
        assert machine.planned == planned
    for extra in (100, 200):  # which is nothing to a plan without a budget
        machine.found(PROBLEM, None, "auto", lambda _, extra=extra: extra)
    assert machine.planned == 3


def test_text_depends_on_the_problem_alone(machine: Machine, folder_of_plans: Path) -> None:
    """And names nothing of it but its digest."""
    texts = set()
    for _ in range(2):
        machine.found()
        texts.add(only(folder_of_plans).read_bytes())
        only(folder_of_plans).unlink()
    (text,) = texts
    words = set(json.loads(text[32:])["plan"]) | {"plan", "starts", "steps", "ends", "counted"}
    assert words == {
        *("problem", "budget", "arena_bytes", "lower_bound_bytes", "heights", "certificate"),
        *("plan", "starts", "steps", "ends", "counted"),
    }
    assert not any(value.name.encode() in text for value in PROBLEM.values if len(value.name) > 2)


def test_an_error_of_the_planner_is_the_planners(machine: Machine, folder_of_plans: Path) -> None:
    for planned in (1, 2):
        with pytest.raises(DoesNotFitError, match="needs"):
            machine.found(PROBLEM, "1KiB")
        assert machine.planned == planned and not list(folder_of_plans.iterdir())


def test_a_file_that_is_too_large_is_not_written(
    machine: Machine, folder_of_plans: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_plans, "LARGEST", 100)
    assert machine.found() == machine.found() and machine.planned == 2 and not list(folder_of_plans.iterdir())
