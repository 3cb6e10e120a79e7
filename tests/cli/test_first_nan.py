"""A loss that is nan or infinite in the first steps of `foreplan train`: the error names the first tensor that is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from tests.cli.shell import foreplan
from tests.frontend.onnx.models import model, node


def files(folder: Path, nodes: list[onnx.NodeProto], weight: np.ndarray) -> list[str]:
    """A model y of x [4, 2] and a weight w, and data of two steps."""
    onnx.save(model(nodes, {"x": (4, 2)}, ["y"], {"w": weight.astype(np.float32)}), folder / "model.onnx")
    np.savez(folder / "data.npz", x=np.ones((8, 2), np.float32), target=np.full((8, 2), 5.0, np.float32))
    given = [str(folder / "model.onnx"), "--data", str(folder / "data.npz"), "--loss", "mse", "--target", "numpy"]
    return ["train", *given, "--epochs", "4", "--optimizer", "sgd"]


WEIGHT = np.array([[2.0, 1.0], [1.0, 3.0]])


@pytest.mark.parametrize("accumulate", ["1", "2"])
def test_the_tensor_that_is_nan_first_is_named(tmp_path: Path, accumulate: str) -> None:
    """A step that is too long makes a number negative, of which the root is taken in the next one."""
    nodes = [node("MatMul", "x w", "h", "product"), node("Sqrt", "h", "r", "root"), node("MatMul", "r w", "y", "last")]
    command = [*files(tmp_path, nodes, WEIGHT), "--lr", "30", "--accumulate", accumulate]
    told = foreplan(*command, code=1).stderr
    assert "the first tensor that holds nan is" in told and "'root' (Sqrt)" in told and "in step 2" in told, told


def test_a_weight_that_is_nan_from_the_beginning_is_named(tmp_path: Path) -> None:
    nodes = [node("MatMul", "x w", "y", "product")]
    told = foreplan(*files(tmp_path, nodes, np.array([[1.0, np.nan], [0.0, 1.0]])), code=1).stderr
    assert "'w' holds nan before the first step" in told


def test_the_tensor_that_is_infinite_first_is_named(tmp_path: Path) -> None:
    nodes = [node("MatMul", "x w", "h", "product"), node("Exp", "h", "e", "power"), node("MatMul", "e w", "y", "last")]
    told = foreplan(*files(tmp_path, nodes, 100 * WEIGHT), code=1).stderr
    assert "the first tensor that" in told and "power" in told and "step 1" in told
