"""Targets by their names and options."""

from __future__ import annotations

import os

import pytest

from foreplan.errors import UsageError
from foreplan.graph import Graph
from foreplan.lower import lower, target_named


def test_an_unknown_target_is_refused() -> None:
    with pytest.raises(UsageError, match="choose one of numpy"):
        lower(Graph("g", (), (), (), {}), "abacus")


@pytest.mark.parametrize(
    "target", ["numpy:threads=2", "cpu:cores=2", "cpu:threads", "cpu:threads=", "cpu:threads=two", "cpu:threads=²"]
)
def test_an_option_that_a_target_does_not_have_is_refused(target: str) -> None:
    with pytest.raises(UsageError, match="has no option"):
        target_named(target)


def test_the_target_cpu_takes_the_processors_that_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {1, 4, 6} if process == 0 else {0})
    assert [target_named(text).name for text in ("cpu", "cpu:threads=2")] == ["cpu:threads=3", "cpu:threads=2"]
