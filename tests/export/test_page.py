"""The page on export: its code runs, as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.export.runtime import run

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "export.md").read_text()


def test_the_page_runs_and_what_it_writes_is_what_was_trained(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    found = {}
    for example in re.findall(r"```python\n(.*?)```", PAGE, re.S):
        exec(compile(example, "export.md", "exec"), found)
    scores = run("trained.onnx", {"x": found["samples"]})["scores"]
    assert (scores.argmax(1) == found["labels"]).mean() > 0.5
    losses = [found["session"].step({"x": found["samples"], "target": found["labels"]}).loss for _ in range(3)]
    assert float(capsys.readouterr().out) == pytest.approx(losses[-1], rel=1e-4)
