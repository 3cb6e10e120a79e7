"""run and bench: outputs by NumPy, figures, and models from ONNX files."""

from __future__ import annotations

import numpy as np
import pytest

from tests.cli.shell import MODEL, answer, foreplan


def mlp_by_numpy(weights: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    names = [name for name in weights if name.endswith("weight") and weights[name].ndim == 2]
    by_input = {weights[name].shape[1]: name for name in names if weights[name].shape[0] != weights[name].shape[1]}
    square = next(name for name in names if weights[name].shape == (8, 8))
    for name in (by_input[6], square):
        x = np.maximum(x @ weights[name].T + weights[name.replace("weight", "bias")], 0)
    last = by_input[8]
    return x @ weights[last].T + weights[last.replace("weight", "bias")]


def test_train_then_run(tmp_path, data):
    from safetensors.numpy import load_file

    out = tmp_path / "w.safetensors"
    done = answer("train", MODEL, "--data", data, "--epochs", 8, "--lr", 0.05, "-o", out)
    assert done["steps"] == 80 and len(done["losses"]) == 80
    assert abs(done["first_loss"] - np.log(3)) < 1.5
    assert np.mean(done["losses"][-10:]) < 0.3 * np.mean(done["losses"][:10])
    # All 40 samples, ten steps of 4, against NumPy; then 7 samples, which fill no two batches.
    arrays, weights = np.load(data), load_file(out)
    for count in (40, 7, 4):
        np.savez(tmp_path / "x.npz", x=arrays["x"][:count])
        foreplan("run", MODEL, "--data", tmp_path / "x.npz", "--weights", out, "-o", tmp_path / "y.npz")
        (y,) = np.load(tmp_path / "y.npz").values()
        np.testing.assert_allclose(y, mlp_by_numpy(weights, arrays["x"][:count]), rtol=1e-4, atol=1e-5)
    (shown,) = answer("run", MODEL, "--data", tmp_path / "x.npz", "--weights", out).values()
    assert shown["shape"] == [4, 3] and shown["max"] == pytest.approx(float(y.max()))


def test_bench():
    figures = answer("bench", MODEL, "--steps", 4, "--threads", 1)
    assert figures["steps"] == 4
    assert 0 < figures["step_seconds_min"] <= figures["step_seconds_median"]
    assert figures["step_cpu_seconds"] > 0
    assert figures["planned_bytes"] == figures["arena_bytes"] < figures["peak_bytes"]
    assert figures["max_rss_bytes"] > 2**20
    assert figures["bind_seconds"] > 0 and figures["first_step_seconds"] > 0
    assert "median" in foreplan("bench", MODEL, "--infer", "--steps", 3).stdout


@pytest.fixture
def onnx_file(tmp_path):
    """y = relu(x · w) with a batch that is a symbol."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    w = np.arange(6, dtype=np.float32).reshape(3, 2) - 2
    nodes = [helper.make_node("MatMul", ["x", "w"], ["z"]), helper.make_node("Relu", ["z"], ["y"])]
    graph = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 2])],
        [numpy_helper.from_array(w, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, tmp_path / "small.onnx")
    return tmp_path / "small.onnx", w


def test_an_onnx_model(tmp_path, onnx_file):
    path, w = onnx_file
    x = np.random.default_rng(0).standard_normal((5, 3)).astype(np.float32)
    np.savez(tmp_path / "x.npz", x=x)
    foreplan("run", path, "--data", tmp_path / "x.npz", "-o", tmp_path / "y.npz")
    np.testing.assert_allclose(np.load(tmp_path / "y.npz")["y"], np.maximum(x @ w, 0), rtol=1e-6)
    assert answer("estimate", path, "--shapes", "x:7x3", "--loss", "mean")["mode"] == "training"
    small, large = (answer("estimate", path, "--batch", n, "--infer")["arena_bytes"] for n in (8, 8000))
    assert large > 100 * small
    assert answer("estimate", path, "--batch", 8)["categories"]["inputs"] > 0  # cross-entropy by default


def test_weights_of_another_tool(tmp_path, onnx_file):
    from safetensors.numpy import save_file

    path, w = onnx_file
    x = np.random.default_rng(0).standard_normal((5, 3)).astype(np.float32)
    np.savez(tmp_path / "x.npz", x=x)
    out, theirs = tmp_path / "y.npz", tmp_path / "w.safetensors"
    save_file({"net.fc": np.ascontiguousarray(-w.T), "net.other": w}, theirs)
    command = ("run", path, "--data", tmp_path / "x.npz", "-o", out, "--weights", theirs)
    wrong = foreplan(*command, code=2).stderr
    assert "it has no 'w'" in wrong and "Traceback" not in wrong
    said = foreplan(*command, "--prefix", "net", "--rename", "fc=w", "--partial").stderr
    assert "in the file, and not in the model: other" in said and "transposed: w" in said
    np.testing.assert_allclose(np.load(out)["y"], np.maximum(x @ -w, 0), rtol=1e-5, atol=1e-6)
    assert "PART=NEW" in foreplan(*command, "--rename", "fc", code=2).stderr
    assert "give the file too" in foreplan(*command[:-2], "--prefix", "net", code=2).stderr
