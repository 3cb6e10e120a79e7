"""ONNX Runtime as the tests of exported files call it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.oracle.peers import onnx, onnxruntime


def opened(path: Path | str) -> Any:
    """A session of ONNX Runtime on a file that ONNX's checker has passed."""
    onnx.checker.check_model(str(path), full_check=True)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def run(path: Path | str, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What the file gives, by the names of its outputs; inputs that it does not have are left out."""
    session = opened(path)
    names = {each.name for each in (*session.get_inputs(), *session.get_overridable_initializers())}
    found = session.run(None, {name: np.asarray(array) for name, array in inputs.items() if name in names})
    return dict(zip([each.name for each in session.get_outputs()], found))


def near(found: np.ndarray, wanted: np.ndarray, tolerance: float = 1e-5) -> bool:
    """Whether two arrays are equal within a share of the largest number."""
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    size = max(1e-30, float(np.abs(wanted).max(initial=0.0)))
    return bool(np.abs(found.astype(np.float64) - wanted).max(initial=0.0) <= tolerance * size)
