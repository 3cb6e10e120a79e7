"""What `benchmarks/cpu.py` takes for a step that does the work of the others."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script."""
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.delitem(sys.modules, "cpu", raising=False)
    import cpu

    return cpu


def figures(**changed: Any) -> dict[str, dict[str, Any]]:
    """Three contenders that train alike, but for one."""
    usual = {"first": 2.3, "last": 1.9, "still": [], "processor": 0.1}
    return {"foreplan": usual | changed, "pytorch eager": dict(usual), "pytorch compile": dict(usual)}


def test_equal_steps_count(cpu: ModuleType) -> None:
    found = figures(first=2.3001)
    cpu.judge(True, found)
    assert not any("failed" in figure for figure in found.values())


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"first": 2.31}, "computes something else: 2.31 where others have 2.3"),
        ({"first": float("nan")}, "computes something else"),
        ({"last": 2.3}, "its loss does not fall"),
        ({"last": float("nan")}, "its loss does not fall"),
        ({"still": ["layer.weight_hh_l0"]}, "does not train 1 weights, layer.weight_hh_l0 among them"),
    ],
)
def test_what_does_other_work_is_left_out(cpu: ModuleType, changed: dict[str, Any], why: str) -> None:
    """As PyTorch's compiled LSTM, whose recurrent weights stayed as they were."""
    found = figures(**changed)
    cpu.judge(True, found)
    assert why in found["foreplan"]["failed"] and "failed" not in found["pytorch eager"]


def test_weights_that_nobody_changes_count_for_nobody(cpu: ModuleType) -> None:
    found = figures()
    for figure in found.values():
        figure["still"] = ["scaled.weight"]
    found["pytorch eager"]["still"] = ["scaled.weight", "other.weight"]
    cpu.judge(True, found)
    assert [key for key, figure in found.items() if "failed" in figure] == ["pytorch eager"]
    assert found["pytorch eager"]["failed"] == "it does not train 1 weights, other.weight among them"


def test_the_best_peer_is_the_fastest_that_counts(cpu: ModuleType) -> None:
    found = figures()
    row = {"instructions": "AVX-512", "contenders": found}
    found["pytorch compile"]["processor"] = 0.05
    assert cpu.best(row) == "pytorch compile"
    found["pytorch compile"]["still"] = ["a"]
    cpu.judge(True, found)
    assert cpu.best(row) == "pytorch eager"


def test_onnx_runtime_is_no_peer_where_others_are_held_to_avx2(cpu: ModuleType) -> None:
    """It takes AVX-512 whatever it is told."""
    found = figures()
    found["onnxruntime"] = {"processor": 0.01}
    assert cpu.best({"instructions": "AVX-512", "contenders": found}) == "onnxruntime"
    assert cpu.best({"instructions": "AVX2", "contenders": found}) != "onnxruntime"
