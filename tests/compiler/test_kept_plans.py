"""Plans are kept on disk: used again for the same question alone, and never without proof."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import foreplan as fp
from foreplan.base import disk_cache
from foreplan.compiler import kept_plans
from foreplan.compiler.kept_plans import kept_plan
from foreplan.planner import driver
from tests.cache import kept_files


@pytest.fixture
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The questions that are planned from now on; all plans are kept, in a folder of their own."""
    asked: list[object] = []
    monkeypatch.setattr(kept_plans, "in_use", True)
    monkeypatch.setattr(kept_plans, "LEAST", 0)
    monkeypatch.setattr(disk_cache, "_folder", lambda: tmp_path / "kept")

    def counted(problem: fp.Problem, budget: Any, remat: str, beside: Any = None) -> fp.Plan:
        asked.append((problem.digest, budget, remat))
        return driver.plan(problem, budget, remat, beside=beside)

    monkeypatch.setattr(kept_plans, "plan", counted)
    return asked


def program(width: int = 8, target: str = "numpy") -> fp.Program:
    graph = fp.models.build(f"mlp:batch=4,width={width},layers=2")
    return fp.lower(fp.differentiate(graph, fp.losses.cross_entropy, fp.optim.Nesterov(0.1)), target)


def file(tmp_path: Path) -> Path:
    (only,) = kept_files(tmp_path / "kept")
    return only


def test_a_plan_is_found_once(found: list[object]) -> None:
    plans = [kept_plan(program(), budget, "auto") for budget in (None, None, 1.0, 1.0, "1GiB", 1 << 30, 1.5)]
    assert len(found) == 4  # none, a share, bytes, another share
    assert plans[0] == plans[1] == driver.plan(program()) and plans[2] == plans[3] and plans[4] == plans[5]
    assert [plan.budget for plan in plans[4:6]] == [1 << 30] * 2


def test_other_questions_are_other_plans(found: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    kept_plan(program(), None, "auto")
    kept_plan(program(16), None, "auto")
    kept_plan(program(), None, "off")
    assert len(found) == 3
    monkeypatch.setattr(kept_plans, "sources", lambda package: "another planner")
    kept_plan(program(), None, "auto")
    assert len(found) == 4


def test_what_is_no_right_plan_is_not_used(found: list[object], tmp_path: Path) -> None:
    right = kept_plan(program(), None, "auto")
    whole = json.loads(file(tmp_path).read_bytes()[32:])
    name = file(tmp_path).name

    def with_offset(offset: int) -> bytes:
        action, reads, _, workspace = whole["steps"][0]
        step = [action, reads, [offset], workspace]
        return json.dumps(whole | {"steps": [step, *whole["steps"][1:]]}).encode()

    def with_about(**fields: object) -> bytes:
        return json.dumps(whole | {"plan": whole["plan"] | fields}).encode()

    about = whole["plan"]
    wrong = [with_offset(1), with_offset(-64), with_offset(1 << 40), b"", b"[]", b"{}", b"null", b"nonsense"]
    wrong += [json.dumps(whole | {key: None}).encode() for key in whole]
    wrong += [with_about(**{key: None}) for key in about if key != "budget"]
    wrong += [
        with_about(arena_bytes=about["arena_bytes"] - 64),
        with_about(budget=about["arena_bytes"]),
        with_about(x=1),
        json.dumps(whole | {"counted": 1}).encode(),
        json.dumps(whole).encode(),  # with spaces
    ]
    for number, content in enumerate(wrong):
        disk_cache.keep(name, content)
        assert kept_plan(program(), None, "auto") == right
        assert len(found) == 2 + number, content[:80]
    assert kept_plan(program(), None, "auto") == right and len(found) == 1 + len(wrong)


def test_what_counts_beside_the_arena_must_be_as_it_was(found: list[object]) -> None:
    least = driver.plan(program(), None, "auto").arena_bytes
    for extra, times in ((100, 1), (100, 1), (200, 2), (100, 3)):
        plan = kept_plan(program(), least + 200, "auto", lambda _, extra=extra: extra)
        assert len(found) == times and plan.budget == least + 200
    kept_plan(program(), least + 200, "auto")
    assert len(found) == 4


def test_plans_that_are_found_soon_are_not_kept(
    found: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_plans, "LEAST", 100.0)
    kept_plan(program(), None, "auto")
    assert not list((tmp_path / "kept").glob("*.json"))


def test_where_plans_are_not_in_use_each_is_found_and_none_is_kept(
    found: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that processes that are measured are alike, whatever ran before them."""
    kept_plan(program(), None, "auto")
    monkeypatch.setattr(kept_plans, "in_use", False)
    for width in (8, 16):
        kept_plan(program(width), None, "auto")
    assert len(found) == 3 and file(tmp_path)


def test_what_lies_outside_the_arena_is_told_as_for_a_process_that_plans(found: list[object]) -> None:
    """A process that reads its plan holds less; the figure is one that a container's limit may be set by, each time."""
    graph = fp.models.build("mlp:batch=4,width=8,layers=2")
    told = [fp.compile(graph, fp.losses.cross_entropy, fp.optim.SGD(0.1)).memory.outside for _ in range(2)]
    assert len(found) == 1 and told[0] == told[1] and {"LLVM", "planner"} <= {part.name for part in told[1]}


def test_what_does_not_fit_is_told_each_time(found: list[object]) -> None:
    for _ in range(2):
        with pytest.raises(fp.DoesNotFitError, match="needs"):
            fp.plan(program(), "1KiB")
    assert len(found) == 2


def test_compile_takes_plans_from_disk(found: list[object]) -> None:
    graph = fp.models.build("mlp:batch=4,width=8,layers=2")
    steps = [fp.compile(graph, fp.losses.cross_entropy, fp.optim.SGD(0.1), budget=1.0) for _ in range(2)]
    assert len(found) == 1 and steps[0].plan == steps[1].plan
