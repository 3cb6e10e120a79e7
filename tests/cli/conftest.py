"""What tests of several commands read."""

from __future__ import annotations

import numpy as np
import pytest


@pytest.fixture
def data(tmp_path):
    """40 samples of three classes that a small network can tell apart."""
    rng = np.random.default_rng(0)
    target = rng.integers(0, 3, 40)
    x = rng.standard_normal((40, 6)).astype(np.float32) + 4 * np.eye(6, dtype=np.float32)[target]
    np.savez(tmp_path / "data.npz", x=x, target=target)
    return tmp_path / "data.npz"
