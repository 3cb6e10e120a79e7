"""export: ONNX files of ONNX models, of zoo models and of steps, with a checkpoint's weights."""

from __future__ import annotations

import numpy as np
import pytest

from tests.cli.shell import MODEL, answer, foreplan
from tests.export.runtime import near, run
from tests.oracle.peers import onnx

X = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)


def half_precision(path):
    """A model whose weights are float16."""
    h = onnx.helper
    w = np.random.default_rng(1).normal(size=(6, 3)).astype(np.float16)
    nodes = [
        h.make_node("Cast", ["x"], ["h"], to=10),
        h.make_node("MatMul", ["h", "w"], ["z"]),
        h.make_node("Cast", ["z"], ["y"], to=1),
    ]
    of = h.make_tensor_value_info
    graph = h.make_graph(nodes, "g", [of("x", 1, [4, 6])], [of("y", 1, [4, 3])], [onnx.numpy_helper.from_array(w, "w")])
    onnx.save(h.make_model(graph, opset_imports=[h.make_opsetid("", 17)], ir_version=8), path)
    return w


def test_a_zoo_model_with_the_weights_of_a_checkpoint(tmp_path, data):
    weights = tmp_path / "w.safetensors"
    foreplan("train", MODEL, "--data", data, "--steps", 3, "-o", weights)
    told = answer("export", MODEL, "--weights", weights, "-o", tmp_path / "out.onnx")
    assert told == {"form": "model", "files": {str(tmp_path / "out.onnx"): (tmp_path / "out.onnx").stat().st_size}}
    np.savez(tmp_path / "x.npz", x=X)
    foreplan("run", MODEL, "--weights", weights, "--data", tmp_path / "x.npz", "-o", tmp_path / "y.npz")
    assert near(run(tmp_path / "out.onnx", {"x": X})["logits"], np.load(tmp_path / "y.npz")["logits"])


def test_an_onnx_file_with_the_weights_of_a_checkpoint(tmp_path):
    """Trained in float32, they go back as float16."""
    from safetensors.numpy import load_file

    before = half_precision(tmp_path / "m.onnx")
    np.savez(tmp_path / "data.npz", x=np.tile(X, (3, 1)), target=np.arange(12) % 3)
    options = ("--data", tmp_path / "data.npz", "--lr", 1.0, "-o", tmp_path / "w.safetensors")
    foreplan("train", tmp_path / "m.onnx", *options)
    foreplan("export", tmp_path / "m.onnx", "--weights", tmp_path / "w.safetensors", "-o", tmp_path / "out.onnx")
    (tensor,) = onnx.load(tmp_path / "out.onnx").graph.initializer
    after, trained = onnx.numpy_helper.to_array(tensor), load_file(tmp_path / "w.safetensors")["w"]
    assert after.dtype == np.float16 and trained.dtype == np.float32
    assert np.array_equal(after, trained.astype(np.float16)) and not np.array_equal(after, before)
    told = foreplan("export", tmp_path / "m.onnx", "--graph", "-o", tmp_path / "graph.onnx")
    assert told.stdout.startswith(f"wrote {tmp_path / 'graph.onnx'} (")
    assert onnx.load(tmp_path / "graph.onnx").producer_name == "foreplan"


def test_a_step(tmp_path):
    options = ("--step", "--optimizer", "adam", "--lr", 0.1)
    foreplan("export", MODEL, *options, "-o", tmp_path / "step.onnx")
    found = run(tmp_path / "step.onnx", {"x": X, "target": np.arange(4) % 3})
    assert found["loss"] > 0 and found["step/next"] == 1
    assert np.abs(found["hidden0.weight/first_moment/next"]).max() > 0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--step", "--graph"), "--graph writes the model, and --step the step"),
        (("--step", "--infer"), "leave --infer out"),
        (("--step", "--accumulate", "2"), "accumulates gradients is two graphs"),
        (("--partial",), "give the file too"),
        (("--weights", "none.safetensors"), "there is no checkpoint"),
    ],
)
def test_what_cannot_be_written_is_told(tmp_path, arguments, told):
    assert told in foreplan("export", MODEL, *arguments, "-o", tmp_path / "out.onnx", code=2).stderr
    assert not (tmp_path / "out.onnx").exists()


def test_a_plan_and_a_folder_that_is_not_there(tmp_path):
    foreplan("plan", MODEL, "-o", tmp_path / "m.plan")
    assert "has no graph to write" in foreplan("export", tmp_path / "m.plan", "-o", tmp_path / "x.onnx", code=2).stderr
    assert "create the directory" in foreplan("export", MODEL, "-o", tmp_path / "no" / "x.onnx", code=2).stderr
