"""What PyTorch took on an H100, phase by phase: `benchmarks/torch_memory.py` wrote it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MIB = 1 << 20
RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
CASES = json.loads((RESULTS / "pytorch-memory-nvidia-h100-80gb-hbm3.json").read_text())


def steps(case: dict[str, Any]) -> list[dict[str, float]]:
    """MiB after each phase, and the most since the one before."""
    ahead = [case["after_inputs"], case["after_model"]]
    return ahead + [step[phase] for step in case["steps"] for phase in ("forward", "backward", "update")]


def of_card(**wanted: Any) -> dict[str, Any]:
    """The case of a model and of what differs from the usual loop."""
    known = ("model", "adam", "zeroed", "foreach", "loss_kept", "cudnn_benchmark")
    (case,) = [case for case in CASES["cases"] if {k: v for k, v in case.items() if k in known} == wanted]
    return case
