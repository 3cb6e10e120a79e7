"""Inputs that once ended raw, and a fixed draw of each kind: all of them are taken or refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz import plan_files
from tests.fuzz.runner import targets
from tests.profile import pick

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", list(targets()))
def test_untrusted_input_is_taken_or_refused(name: str, tmp_path: Path) -> None:
    arguments = [name, "--cases", str(targets()[name].sample // pick(20, 15, 2)), "--jobs", "1", "--out", str(tmp_path)]
    done = subprocess.run([sys.executable, "-m", "tests.fuzz", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", [f"{name} on {target}" for name in plan_files.SAVED for target in plan_files.TARGETS])
def test_plans_that_nobody_has_edited_are_taken(name: str, tmp_path: Path) -> None:
    """Else every edited one would be refused for what was wrong with it before."""
    plan_files.run(json.dumps({"saved": name, "edits": [], "repair": False}).encode(), tmp_path)
