"""Inputs that once ended raw, and a fixed draw of each kind: all of them are taken or refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from foreplan.frontend.onnx import importer
from tests.frontend.onnx import suites
from tests.fuzz import plan_files
from tests.fuzz.runner import fuzz, targets
from tests.profile import pick

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", list(targets()))
def test_untrusted_input_is_taken_or_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In little time: ONNX makes its cases of single nodes in four seconds, and loops are written out in as many."""
    monkeypatch.setattr(suites, "KINDS", pick(suites.KINDS[1:], suites.KINDS[1:], suites.KINDS))
    monkeypatch.setattr(importer, "_MOST_WRITTEN", pick(1 << 12, 1 << 12, importer._MOST_WRITTEN))
    target = targets()[name]
    tally = fuzz(target, seed=0, cases=target.sample // pick(20, 15, 2), seconds=None, jobs=1)
    assert tally.counts.total() > target.sample // 20
    assert not tally.failures, "\n".join(result.text for _, result in tally.failures.values())


def test_the_command_fuzzes(tmp_path: Path) -> None:
    arguments = ["devices", "--cases", "2", "--jobs", "1", "--out", str(tmp_path)]
    done = subprocess.run([sys.executable, "-m", "tests.fuzz", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 of" in done.stdout and not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", [f"{name} on {target}" for name in plan_files.SAVED for target in plan_files.TARGETS])
def test_plans_that_nobody_has_edited_are_taken(name: str, tmp_path: Path) -> None:
    """Else every edited one would be refused for what was wrong with it before."""
    plan_files.run(json.dumps({"saved": name, "edits": [], "repair": False}).encode(), tmp_path)
