"""ONNX's own suites by foreplan and by ONNX Runtime: the table in docs/onnx.md, and the tests' lists of refusals.

    python -m benchmarks.onnx_suites

foreplan's cases run on `numpy` and `cpu` as `tests/frontend/onnx/test_suites.py` runs them, and the real models as
onnx's own runner does. ONNX Runtime runs by that runner, through its own backend.
"""

from __future__ import annotations

import importlib
import unittest
import warnings
from typing import Any

import onnx
import onnx.backend.test

from benchmarks.pages import put
from tests.frontend.onnx.test_suites import write

SUITES = {
    "node": "NodeModel",
    "simple": "SimpleModel",
    "pytorch-operator": "PyTorchOperator",
    "pytorch-converted": "PyTorchConverted",
    "real": "RealModel",
}


def by_the_runner(backend: Any, suite: str) -> int:
    """How many cases of a suite pass on the processor when onnx's runner runs them."""
    found = onnx.backend.test.BackendTest(backend, __name__).test_cases
    (cases,) = (each for name, each in found.items() if SUITES[suite] in name)
    passed = 0
    for case in unittest.defaultTestLoader.loadTestsFromTestCase(cases):
        if case.id().endswith("_cpu"):
            result = unittest.TestResult()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                case(result)
            passed += result.wasSuccessful() and not result.skipped
    return passed


def main() -> None:
    """Count, and write the table."""
    onnxruntime = importlib.import_module("onnxruntime")
    onnxruntime.set_default_logger_severity(4)
    peer = importlib.import_module("onnxruntime.backend.backend").OnnxRuntimeBackend
    backend = importlib.import_module("foreplan.onnx_backend").Backend
    counts = write()
    real = by_the_runner(backend, "real")
    counts["real"] = (9, real, real, real)
    lines = [
        "| suite | cases | nothing bound | as they are | small inputs as constants | ONNX Runtime, as they are |",
        "|---|---|---|---|---|---|",
    ]
    for suite in SUITES:
        figures = [*counts[suite], by_the_runner(peer, suite)]
        lines.append(f"| {suite} | {' | '.join(f'{each:,}' for each in figures)} |")
    put(
        "docs/onnx.md",
        "suites",
        "\n".join([*lines, "", f"onnx {onnx.__version__}, ONNX Runtime {onnxruntime.__version__}."]),
    )


if __name__ == "__main__":
    main()
