"""The examples: each trains for a few steps, and its loss falls."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from tests.cpu.check import needs_onednn

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
NAMES = sorted(path.stem for path in EXAMPLES.glob("train_*.py"))

pytestmark = [pytest.mark.thorough, needs_onednn()]


@pytest.mark.parametrize("name", NAMES)
def test_a_short_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    losses, _ = importlib.import_module(name).train(epochs=2, steps=12)
    assert len(losses) == 2
    assert losses[1] < losses[0]
