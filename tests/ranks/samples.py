"""Data that jobs train on, and what they come to."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

SAMPLES = 48


def learnable(folder: Path) -> str:
    """The path of a file with samples whose labels can be learned."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((SAMPLES, 784), np.float32)
    path = folder / "d.npz"
    np.savez(path, x=x, target=(x @ rng.standard_normal((784, 10))).argmax(1))
    return str(path)


def assert_checkpoints_close(found: Path, wanted: Path) -> None:
    """Check that two files have the same tensors, to rounding."""
    many, one = load_file(found), load_file(wanted)
    assert one.keys() == many.keys()
    for name, array in one.items():
        np.testing.assert_allclose(many[name].astype(float), array.astype(float), atol=1e-4, err_msg=name)
