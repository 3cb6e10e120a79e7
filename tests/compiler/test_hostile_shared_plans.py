"""Nobody is trusted who writes where plans are shared: what is no right answer is planned anew."""

from __future__ import annotations

import copy
import json
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foreplan.compiler import kept_plans
from foreplan.planner import driver, verify
from foreplan.planner.memory.order_bound import order_bound
from tests.compiler.sharing import HOSTILE, PROBLEM, Machine, only
from tests.planner.problems import training_chain
from tests.profile import few


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


def test_no_edited_field_becomes_a_wrong_figure(machine: Machine, folder_of_plans: Path) -> None:
    """An edited plan is refused, or is another right one whose figures are its own."""
    problem = training_chain(1)
    budget = driver.plan(problem).arena_bytes + 64
    right = machine.found(problem, budget, "auto", lambda _: 64)
    question = kept_plans._Question(problem, budget, "auto", lambda _: 64)
    whole = json.loads(only(folder_of_plans).read_bytes()[32:])
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


@pytest.mark.parametrize("what", few(HOSTILE, (0, 3, 6)))
def test_what_is_no_plan_is_planned_anew_and_replaced(
    what: str, machine: Machine, folder_of_plans: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    right = machine.found()
    content, file = only(folder_of_plans).read_bytes(), only(folder_of_plans)
    file.write_bytes(HOSTILE[what])
    assert machine.found() == right and machine.planned == 2
    assert file.read_bytes() == content and not capsys.readouterr().err


def test_damage_is_planned_anew(machine: Machine, folder_of_plans: Path) -> None:
    right = machine.found()
    content, file = only(folder_of_plans).read_bytes(), only(folder_of_plans)
    for planned, damaged in enumerate((content[:-1], content[:40], content[:100] + b"0" + content[101:]), 2):
        file.write_bytes(damaged)
        assert machine.found() == right and machine.planned == planned


def test_a_plan_of_another_question_is_not_taken(machine: Machine, folder_of_plans: Path) -> None:
    """Whoever may write can give a file another name, but no plan that was not asked for."""
    most = driver.plan(PROBLEM).arena_bytes
    questions = [(PROBLEM, None, "off"), (PROBLEM, most + 640, "auto"), (training_chain(2), None, "auto")]
    for problem, budget, remat in questions:
        machine.found(problem, budget, remat)
    contents = [file.read_bytes() for file in folder_of_plans.iterdir()]
    for problem, budget, remat in questions:
        right = machine.found(problem, budget, remat)
        for content in contents:
            for file in folder_of_plans.iterdir():
                file.write_bytes(content)
            assert machine.found(problem, budget, remat) == right


def make_link(path: Path) -> None:
    (path.parent.parent / "elsewhere").write_bytes(b"mine")
    path.symlink_to(path.parent.parent / "elsewhere")


@pytest.mark.parametrize("make", [os.mkfifo, make_link, Path.mkdir], ids=["pipe", "link", "folder"])
def test_what_is_no_file_is_not_read_nor_written_through(
    make: Callable[[Path], None], machine: Machine, folder_of_plans: Path, tmp_path: Path
) -> None:
    right = machine.found()
    file = only(folder_of_plans)
    file.unlink()
    make(file)
    assert machine.found() == right and machine.planned == 2
    assert file.is_dir() or stat.S_ISREG(file.lstat().st_mode)
    assert not (tmp_path / "elsewhere").exists() or (tmp_path / "elsewhere").read_bytes() == b"mine"
