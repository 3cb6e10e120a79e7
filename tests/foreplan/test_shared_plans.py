"""Plans that many processes share: one of them plans, and nobody is trusted with what is written there."""

from __future__ import annotations

import copy
import fcntl
import hashlib
import importlib.util
import json
import os
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest

import foreplan as fp
from foreplan import disk_cache, kept_plans, shared_plans
from foreplan.errors import DoesNotFitError
from foreplan.kept_plans import kept_plan
from foreplan.planner import Plan, Problem, driver, verify
from foreplan.planner.memory.order_bound import order_bound
from tests.planner.problems import training_chain, training_net

PROBLEM = training_net(4)


class Machine:
    """Where this process seems to run: with a private cache of its own, and a note of what it plans."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.number, self.planned = folder, 0, 0

    def private(self) -> Path:
        return self.folder / f"private{self.number}"

    def next(self) -> None:
        """Go on as a process of another machine."""
        self.number += 1
        shared_plans._place.cache_clear()
        shared_plans._told = False

    def plan(self, *question: Any, **options: Any) -> Plan:
        self.planned += 1
        return driver.plan(*question, **options)

    def found(self, problem: Problem = PROBLEM, budget: Any = None, remat: str = "auto", beside: Any = None) -> Plan:
        """A plan as another machine finds it."""
        self.next()
        return kept_plan(problem, budget, remat, beside)


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """What the planner runs is compiled, as it is in any process that has the usual cache."""
    driver.plan(PROBLEM, driver.plan(PROBLEM).arena_bytes - 4096)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    made = Machine(tmp_path)
    monkeypatch.setattr(kept_plans, "in_use", True)
    monkeypatch.setattr(kept_plans, "plan", made.plan)
    monkeypatch.setattr(disk_cache, "_folder", made.private)
    made.next()
    yield made
    made.next()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of shared plans."""
    (tmp_path / "plans").mkdir()
    monkeypatch.setenv(shared_plans.VARIABLE, str(tmp_path / "plans"))
    return tmp_path / "plans"


def only(folder: Path) -> Path:
    (file,) = folder.iterdir()
    return file


def alike(shared: Plan, found: Plan) -> bool:
    """Whether two plans are the same but for how they were found."""
    return replace(shared, certificate=found.certificate) == found and shared.certificate == replace(
        found.certificate, placement="shared", order="shared", stages=()
    )


# Many processes.

PROCESS = """
import hashlib, sys, time
from pathlib import Path
from foreplan import kept_plans
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


def at_once(folder: Path, plans: Path, count: int, budget: str = "", **environment: str) -> list[int]:
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
    said = [process.communicate(timeout=60)[1] for process in processes]
    codes = [process.returncode for process in processes]
    assert not any(said) or any(codes), b"".join(said).decode()
    return codes


@pytest.mark.slow
def test_of_64_processes_that_start_at_once_one_plans(tmp_path: Path, folder: Path) -> None:
    """With a private cache each, as on 64 machines. What plans is not compiled, which takes longer than to plan."""
    private = {disk_cache.VARIABLE: str(tmp_path / "private{}"), "FOREPLAN_JIT": "off"}
    assert at_once(tmp_path, folder, 64, **private) == [0] * 64
    assert len(os.listdir(tmp_path / "planned")) == 1
    done = [file.read_text() for file in (tmp_path / "done").iterdir()]
    assert len(done) == 64 and len(set(done)) == 1
    content = only(folder).read_bytes()  # no lock and nothing unfinished is left
    assert {only(tmp_path / f"private{i}").read_bytes() for i in range(64)} == {content}


@pytest.mark.slow
def test_what_fits_no_budget_fails_in_all_processes_at_once(tmp_path: Path, folder: Path) -> None:
    """The first takes its time; the others, who have waited for it, do not wait for one another."""
    started = time.monotonic()
    assert at_once(tmp_path, folder, 4, "1KiB") == [1] * 4
    assert len(os.listdir(tmp_path / "planned")) == 4 and not list(folder.iterdir())
    assert time.monotonic() - started < 60


HOLDER = """
from foreplan import shared_plans
with shared_plans.turn("a"):
    print("held", flush=True)
    input()
"""


@pytest.mark.parametrize("killed", [True, False])
def test_nobody_waits_for_a_killed_process_nor_for_ever(
    machine: Machine, folder: Path, killed: bool, monkeypatch: pytest.MonkeyPatch
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
        assert [file.name for file in folder.iterdir()] == ([] if killed else [f"a.{os.geteuid()}.lock"])
        other.kill()


def test_who_has_waited_takes_the_plan_that_has_come(
    machine: Machine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = machine.found()
    content = only(folder).read_bytes()
    name = only(folder).name
    only(folder).unlink()
    read = shared_plans.shared

    def late(asked: str) -> bytes | None:
        found = read(asked)
        (folder / name).write_bytes(content)  # another process is done
        return found

    monkeypatch.setattr(shared_plans, "shared", late)
    assert machine.found() == right and machine.planned == 1


def test_where_nothing_can_be_locked_nobody_waits(
    machine: Machine, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*_: Any) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refused)
    plans = [machine.found() for _ in range(2)]
    assert plans[0] == plans[1] and machine.planned == 1 and not capsys.readouterr().err


# What is shared.


def test_plans_are_those_of_the_planner(machine: Machine, folder: Path) -> None:
    most = driver.plan(PROBLEM).arena_bytes
    questions = [(None, "auto"), (None, "off"), (most - 4096, "auto"), (most, "off")]
    for budget, remat in questions * 2:
        found = driver.plan(PROBLEM, budget, remat)
        assert alike(machine.found(PROBLEM, budget, remat), found)
    assert machine.planned == len(questions) == len(list(folder.iterdir()))


def test_plans_of_programs_are_shared(machine: Machine, folder: Path) -> None:
    graph = fp.models.build("mlp:batch=4,width=8,layers=2")
    steps = []
    for _ in range(2):
        machine.next()
        steps.append(fp.compile(graph, fp.losses.cross_entropy, fp.optim.SGD(0.1), accumulate=2))
    assert machine.planned == 2 and steps[0].plan == steps[1].plan
    assert steps[0].update.plan == steps[1].update.plan


def test_the_private_cache_is_asked_first_and_filled(machine: Machine, folder: Path) -> None:
    right = machine.found()
    assert only(machine.private()).read_bytes() == only(folder).read_bytes()
    only(folder).write_bytes(b"nonsense")
    assert kept_plan(PROBLEM, None, "auto") == right and machine.planned == 1
    assert only(folder).read_bytes() == b"nonsense"


def test_a_plan_that_was_kept_before_says_no_more_than_a_shared_one(
    machine: Machine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(shared_plans.VARIABLE)
    monkeypatch.setattr(kept_plans, "LEAST", 0)
    found = machine.found()
    assert found.certificate.stages and not list(folder.iterdir())
    monkeypatch.setenv(shared_plans.VARIABLE, str(folder))
    assert alike(kept_plan(PROBLEM, None, "auto"), found) and machine.planned == 1


def test_a_share_as_budget_is_not_shared(machine: Machine, folder: Path) -> None:
    """What it comes to in bytes cannot be proved."""
    assert [machine.found(PROBLEM, 1.0) for _ in range(2)] == [driver.plan(PROBLEM, 1.0)] * 2
    assert machine.planned == 2 and not list(folder.iterdir())


def test_what_lies_beside_the_arena_must_be_as_it_was(machine: Machine, folder: Path) -> None:
    most = driver.plan(PROBLEM).arena_bytes
    for extra, planned in ((100, 1), (100, 1), (200, 2), (200, 2)):
        machine.found(PROBLEM, most + 300, "auto", lambda _, extra=extra: extra)
        assert machine.planned == planned
    for extra in (100, 200):  # which is nothing to a plan without a budget
        machine.found(PROBLEM, None, "auto", lambda _, extra=extra: extra)
    assert machine.planned == 3


def test_text_depends_on_the_problem_alone(machine: Machine, folder: Path) -> None:
    """And names nothing of it but its digest."""
    texts = set()
    for _ in range(2):
        machine.found()
        texts.add(only(folder).read_bytes())
        only(folder).unlink()
    (text,) = texts
    words = set(json.loads(text[32:])["plan"]) | {"plan", "starts", "steps", "ends", "counted"}
    assert words == {
        *("problem", "budget", "arena_bytes", "lower_bound_bytes", "heights", "certificate"),
        *("plan", "starts", "steps", "ends", "counted"),
    }
    assert not any(value.name.encode() in text for value in PROBLEM.values if len(value.name) > 2)


# Hostile content.


def sealed(content: bytes) -> bytes:
    return hashlib.sha256(content).digest() + content


def texts(data: Any) -> Iterator[bytes]:
    """A record with one field edited, or left out, or one more; as text."""
    others: tuple[Any, ...] = (None, True, 1.0, "", "\x1b[2J", [], {}, 1 << 61, 1 << 62, 10**30, -1)

    def edited(at: list[Any], change: Callable[[Any, Any], None]) -> bytes:
        made = copy.deepcopy(data)
        holder = made
        for key in at[:-1]:
            holder = holder[key]
        change(holder, at[-1])
        return json.dumps(made, separators=(",", ":")).encode()

    def walk(item: Any, at: list[Any]) -> Iterator[bytes]:
        if at:
            near = [item + by for by in (-4096, -64, -1, 1, 64, 4096)] if type(item) is int else []
            for other in [*near, *others]:
                yield edited(at, lambda holder, key, other=other: holder.__setitem__(key, other))
            yield edited(at, lambda holder, key: holder.pop(key))
            if isinstance(at[-1], int):
                yield edited(at, lambda holder, key: holder.insert(key, copy.deepcopy(holder[key])))
        pairs = item.items() if isinstance(item, dict) else enumerate(item) if isinstance(item, list) else ()
        for key, value in pairs:
            yield from walk(value, [*at, key])

    yield from walk(data, [])
    yield json.dumps(data).encode()
    yield json.dumps(data | {"more": 1}, separators=(",", ":")).encode()


def test_no_edited_field_becomes_a_wrong_figure(machine: Machine, folder: Path) -> None:
    """An edited plan is refused, or is another right one whose figures are its own."""
    problem = training_chain(1)
    budget = driver.plan(problem).arena_bytes + 64
    right = machine.found(problem, budget, "auto", lambda _: 64)
    question = kept_plans._Question(problem, budget, "auto", lambda _: 64)
    whole = json.loads(only(folder).read_bytes()[32:])
    assert question.answer(question.written(right)) == right
    tried, others = 0, 0
    for content in texts(whole):
        tried += 1
        found = question.answer(content)
        if found is not None and kept_plans._without_history(found) != right:
            others += 1
            verify(found, problem)
            figures = replace(right, steps=found.steps, starts=found.starts, ends=found.ends, heights=found.heights)
            assert found.budget == budget and found.order_lower_bound_bytes == order_bound(problem)
            assert found.certificate.peak_step == right.certificate.peak_step
            assert replace(found, arena_bytes=right.arena_bytes, certificate=right.certificate) == figures
    assert tried > 1000 and others < tried / 20


HOSTILE = {
    "nothing": b"",
    "a digest": bytes(32),
    "no digest": b"{}",
    "no JSON": sealed(b"nonsense"),
    "an empty object": sealed(b"{}"),
    "a list": sealed(b"[]"),
    "null": sealed(b"null"),
    "too deep": sealed(b"[" * 1_000_000),
    "too many digits": sealed(b"1" * 100_000),
    "no number": sealed(b"NaN"),
    "no UTF-8": sealed(b'"\xff"'),
    "too large": sealed(b" " * shared_plans.LARGEST),
    "many lists": sealed(b'{"plan":[' + b"[]," * 1_000_000 + b"[]]}"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_what_is_no_plan_is_planned_anew_and_replaced(
    what: str, machine: Machine, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    right = machine.found()
    content, file = only(folder).read_bytes(), only(folder)
    file.write_bytes(HOSTILE[what])
    assert machine.found() == right and machine.planned == 2
    assert file.read_bytes() == content and not capsys.readouterr().err


def test_damage_is_planned_anew(machine: Machine, folder: Path) -> None:
    right = machine.found()
    content, file = only(folder).read_bytes(), only(folder)
    for planned, damaged in enumerate((content[:-1], content[:40], content[:100] + b"0" + content[101:]), 2):
        file.write_bytes(damaged)
        assert machine.found() == right and machine.planned == planned


def test_a_plan_of_another_question_is_not_taken(machine: Machine, folder: Path) -> None:
    """Whoever may write can give a file another name, but no plan that was not asked for."""
    most = driver.plan(PROBLEM).arena_bytes
    questions = [(PROBLEM, None, "off"), (PROBLEM, most + 640, "auto"), (training_chain(2), None, "auto")]
    for problem, budget, remat in questions:
        machine.found(problem, budget, remat)
    contents = [file.read_bytes() for file in folder.iterdir()]
    for problem, budget, remat in questions:
        right = machine.found(problem, budget, remat)
        for content in contents:
            for file in folder.iterdir():
                file.write_bytes(content)
            assert machine.found(problem, budget, remat) == right


def make_link(path: Path) -> None:
    (path.parent.parent / "elsewhere").write_bytes(b"mine")
    path.symlink_to(path.parent.parent / "elsewhere")


@pytest.mark.parametrize("make", [os.mkfifo, make_link, Path.mkdir], ids=["pipe", "link", "folder"])
def test_what_is_no_file_is_not_read_nor_written_through(
    make: Callable[[Path], None], machine: Machine, folder: Path, tmp_path: Path
) -> None:
    right = machine.found()
    file = only(folder)
    file.unlink()
    make(file)
    assert machine.found() == right and machine.planned == 2
    assert file.is_dir() or stat.S_ISREG(file.lstat().st_mode)
    assert not (tmp_path / "elsewhere").exists() or (tmp_path / "elsewhere").read_bytes() == b"mine"


# Places.


@pytest.mark.parametrize("mode", [0o700, 0o777, 0o1777])
def test_a_folder_and_files_that_others_may_write_serve(mode: int, machine: Machine, folder: Path) -> None:
    folder.chmod(mode)
    mask = os.umask(0o077)
    try:
        right = machine.found()
    finally:
        os.umask(mask)
    assert only(folder).stat().st_mode & 0o777 == 0o644  # whatever the umask: others shall read it
    only(folder).chmod(0o666)
    assert machine.found() == right and machine.planned == 1


AS_ANOTHER = """
import encodings.ascii, os, sys, filelock
from pathlib import Path
from foreplan import disk_cache, kept_plans
from tests.planner.problems import training_chain
plan, planned = kept_plans.plan, []
plan(training_chain(2))  # which loads what the other user may not be able to read
os.setgroups([]), os.setgid(54321), os.setuid(54321)
disk_cache._folder = lambda: Path(sys.argv[1])
kept_plans.plan = lambda *question, **options: planned.append(1) or plan(*question, **options)
for layers in (1, 2, 3):
    kept_plans.kept_plan(training_chain(layers), None, "auto")
    print(len(planned))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("mode", [0o755, 0o777, 0o1777])
def test_another_user_reads_and_writes_as_the_folder_allows(
    mode: int, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as above:  # pytest's own folder is closed to other users
        os.chmod(above, 0o777)
        plans = Path(above, "plans")
        plans.mkdir()
        plans.chmod(mode)
        monkeypatch.setenv(shared_plans.VARIABLE, str(plans))
        machine.found(training_chain(1))
        command = [sys.executable, "-c", AS_ANOTHER, f"{above}/private"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.stdout.split() == ["0", "1", "2"], done.stderr
        notes = done.stderr.splitlines()
        if mode == 0o755:
            (note,) = notes
            assert "cannot be written to the place that FOREPLAN_PLANS names (Permission denied)" in note
        assert mode == 0o755 or not notes
        assert len(list(plans.iterdir())) == (1 if mode == 0o755 else 3), list(plans.iterdir())


def note_of(capsys: pytest.CaptureFixture[str]) -> str:
    (note,) = capsys.readouterr().err.splitlines()
    assert note.startswith("note: plans cannot be ") and "so this process plans for itself; let it name" in note
    return str(note)


@pytest.mark.parametrize(
    "place, reason",
    [
        ("missing", "No such file or directory"),
        ("file", "Not a directory"),
        ("nonsense://key:hidden@host/plans", "fsspec knows no such URL"),
        ("file:///dev/null/hidden", "Not a directory"),
    ],
)
def test_a_place_that_cannot_be_used_is_told_once(
    place: str, reason: str, machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(machine.folder)
    Path("file").touch()
    monkeypatch.setenv(shared_plans.VARIABLE, place)
    machine.next()
    for layers in (1, 2):
        kept_plan(training_chain(layers), None, "auto")
    note = note_of(capsys)
    assert f"({reason})" in note and "hidden" not in note and str(machine.folder) not in note
    assert machine.planned == 2 and not Path("missing").exists()


@pytest.mark.skipif(importlib.util.find_spec("s3fs") is not None, reason="s3fs is installed")
def test_a_library_for_an_object_store_is_asked_for(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(shared_plans.VARIABLE, "s3://key:hidden@bucket/plans")
    machine.found()
    note = note_of(capsys)
    assert "s3fs" in note and "hidden" not in note and "bucket" not in note


@pytest.mark.parametrize("library, place", [("filelock", "plans"), ("fsspec", "memory://plans")])
def test_a_missing_library_is_asked_for(
    library: str,
    place: str,
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.setenv(shared_plans.VARIABLE, place)
    machine.found()
    assert f"({library} is missing: pip install 'foreplan[shared]')" in note_of(capsys)
    assert machine.planned == 1


@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_a_url_of_fsspec(
    scheme: str, machine: Machine, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"file://{folder}" if scheme == "file" else f"memory://plans/{os.getpid()}/"
    monkeypatch.setenv(shared_plans.VARIABLE, url)
    files, path = fsspec.core.url_to_fs(url)
    plans = [machine.found() for _ in range(2)]
    (name,) = files.ls(path, detail=False)
    assert plans[0] == plans[1] and machine.planned == 1
    content = files.cat_file(name)
    for hostile in (b"", content[:-1], HOSTILE["too large"], HOSTILE["too deep"]):
        files.pipe_file(name, hostile)
        assert machine.found() == plans[0]
        assert files.cat_file(name) == content
    assert machine.planned == 5 and not capsys.readouterr().err


def test_whatever_an_object_store_raises_is_told_without_its_text(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class OutOfOrderError(Exception):
        pass

    def fails(*_: Any, **__: Any) -> None:
        raise OutOfOrderError("key:hidden")

    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "cat_file", fails)
    monkeypatch.setenv(shared_plans.VARIABLE, "memory://plans")
    machine.found()
    note = note_of(capsys)
    assert "read from" in note and "(OutOfOrderError)" in note and "hidden" not in note


def test_an_error_of_the_planner_is_the_planners(machine: Machine, folder: Path) -> None:
    for planned in (1, 2):
        with pytest.raises(DoesNotFitError, match="needs"):
            machine.found(PROBLEM, "1KiB")
        assert machine.planned == planned and not list(folder.iterdir())


def test_a_file_that_is_too_large_is_not_written(
    machine: Machine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_plans, "LARGEST", 100)
    assert machine.found() == machine.found() and machine.planned == 2 and not list(folder.iterdir())
