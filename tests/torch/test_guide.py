"""docs/from-pytorch.md: the loop before and after, run as they stand there, has the same losses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make setup-torch")

ROOT = Path(__file__).resolve().parents[2]


def test_the_step_has_the_losses_of_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "from-pytorch.md").read_text()
    before, after, large, loads = re.findall(r"```python\n(.*?)```", text, re.S)
    beginning, _, loop = before.partition("losses = []")
    theirs: dict[str, Any] = {}
    exec(compile(before, "before", "exec"), theirs)
    ours: dict[str, Any] = {}
    exec(compile(beginning, "beginning", "exec"), ours)
    exec(compile(after, "after", "exec"), ours)
    assert loop and len(ours["losses"]) == 20
    np.testing.assert_allclose(ours["losses"], theirs["losses"], rtol=1e-4)
    assert ours["losses"][-1] < 0.7 * ours["losses"][0]
    assert ours["right"] == pytest.approx(theirs["right"], abs=0.02)
    for name, weight in theirs["model"].state_dict().items():
        np.testing.assert_allclose(ours["model"].state_dict()[name], weight, rtol=1e-2, atol=2e-4, err_msg=name)
    _loads(ours["session"], loads)
    exec(compile(large, "large", "exec"), ours)


def _loads(session: Any, code: str) -> None:
    """Run each line of the last example on a file such as it speaks of."""
    from safetensors.numpy import save_file

    arrays = session.state_dict()
    renamed = {name.replace("8.", "fc."): array for name, array in arrays.items()}
    files = (
        {f"module.{name}": array for name, array in arrays.items()},
        renamed,
        {name: a.astype(np.float16) if a.dtype.kind == "f" else a for name, a in arrays.items() if name != "8.bias"},
    )
    lines = code.strip().splitlines()
    assert len(lines) == len(files)
    for line, file in zip(lines, files):
        save_file(file, "model.safetensors")
        exec(line.replace("head", "8"), {"session": session})
