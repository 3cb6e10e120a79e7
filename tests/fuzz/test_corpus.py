"""Inputs that once ended raw, and a fixed draw of each kind: all of them are taken or refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.runner import targets
from tests.profile import pick

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", list(targets()))
def test_untrusted_input_is_taken_or_refused(name: str, tmp_path: Path) -> None:
    arguments = [name, "--cases", str(targets()[name].sample // pick(6, 6, 2)), "--jobs", "1", "--out", str(tmp_path)]
    done = subprocess.run([sys.executable, "-m", "tests.fuzz", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
