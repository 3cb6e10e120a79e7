"""What can go wrong on the command line: each error names its cause and the way out, and nothing is lost."""

from __future__ import annotations

import json
import pickle
import zipfile

import numpy as np
import pytest

import foreplan as fp
from tests.cli.shell import MODEL, answer, foreplan


@pytest.fixture
def onnx_file(tmp_path):
    """relu(x @ w) with a free batch, and w."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    w = np.random.default_rng(1).standard_normal((3, 4)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Relu", ["h"], ["y"])],
        "small",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(w, "w")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), tmp_path / "s.onnx")
    return tmp_path / "s.onnx", w


@pytest.fixture
def labels(tmp_path):
    def write(name="data.npz", **changed):
        rng = np.random.default_rng(0)
        arrays = {"x": rng.standard_normal((20, 6), dtype=np.float32), "target": rng.integers(0, 3, 20)}
        np.savez(tmp_path / name, **(arrays | changed))
        return tmp_path / name

    return write


@pytest.mark.parametrize("label", [-1, 3, -99])
def test_a_wrong_label_is_found_before_training_begins(tmp_path, labels, label):
    data = labels(target=np.where(np.arange(20) == 17, label, 2))
    done = foreplan("train", MODEL, "--data", data, "-o", tmp_path / "w.safetensors", code=2)
    assert f"'target' holds {label} at [17], and the model takes 0 to 2 or -100" in done.stderr
    assert not (tmp_path / "w.safetensors").exists()
    foreplan("train", MODEL, "--data", labels(target=np.where(np.arange(20) == 17, -100, 2)))


def test_data_that_are_no_numbers_are_named(labels):
    x = np.zeros((20, 6), np.float32)
    x[13, 5] = np.nan
    assert "sample 13 of 'x' holds nan" in foreplan("train", MODEL, "--data", labels(x=x), code=1).stderr


@pytest.mark.parametrize("rate", ["nan", "inf", "-1", "1e39"])
def test_a_learning_rate_that_is_none_is_refused_before_training_begins(tmp_path, labels, rate):
    plan = tmp_path / "plan.json"
    foreplan("plan", MODEL, "-o", plan)
    for model in (MODEL, plan):
        for more in ((), ("--schedule", "cosine:steps=2")) if model == MODEL else ((),):
            done = foreplan("train", model, "--data", labels(), "--lr", rate, "--steps", 1, *more, code=2)
            assert "learning" in done.stderr and "is " in done.stderr and "loss" not in done.stdout


def test_files_of_arrays_that_are_none(tmp_path, labels):
    with zipfile.ZipFile(labels("members.npz"), "a") as archive:
        archive.writestr("notes", "hello")
    assert "'notes' in it is no array" in foreplan("train", MODEL, "--data", tmp_path / "members.npz", code=2).stderr
    with open(tmp_path / "pickle.npz", "wb") as file:
        pickle.dump([1, 2], file)
    said = foreplan("train", MODEL, "--data", tmp_path / "pickle.npz", code=2).stderr
    assert "pickled objects" in said and "unsafely" not in said
    empty = labels("empty.npz", x=np.zeros((0, 6), np.float32), target=np.zeros(0, np.int64))
    assert "no samples" in foreplan("train", MODEL, "--data", empty, code=2).stderr
    rate = labels("rate.npz", learning_rate=np.float32(1))
    assert "'learning_rate' that no input takes" in foreplan("train", MODEL, "--data", rate, code=2).stderr


@pytest.mark.parametrize(
    ("arguments", "code", "kind"),
    [
        (["estimate", MODEL, "--budget", "1"], 3, "does not fit"),
        (["estimate", "no_such_model"], 2, "usage"),
        (["estimate", MODEL, "--batch", "0"], 2, "bad parameter"),
        (["estimate", MODEL, "--no-such-option"], 2, "no such option"),
        (["run", MODEL, "--data", "/no/such/file"], 2, "usage"),
    ],
)
def test_errors_are_one_json_object_too(arguments, code, kind):
    done = foreplan(*arguments, "--json", code=code)
    told = json.loads(done.stdout)
    assert told["error"] == kind and told["exit_code"] == code and told["message"] in done.stderr


def test_a_budget_that_cannot_be_met_shows_the_peak_and_what_to_try():
    done = foreplan("estimate", MODEL, "--budget", "0.5", code=3)
    arena = answer("estimate", MODEL)["arena_bytes"]
    needed = answer("estimate", MODEL, "--budget", "0.5", code=3)["needed_bytes"]
    assert arena // 2 < needed <= arena
    assert f"({needed:,} bytes)" in done.stderr and f"({arena // 2:,} bytes)" in done.stderr
    for said in ("lower bound", "peak at instruction", "largest buffers", "hidden0.weight", "try next:"):
        assert said in done.stderr


def test_where_a_checkpoint_cannot_go_is_told_before_training(tmp_path, labels):
    done = foreplan("train", MODEL, "--data", labels(), "-o", tmp_path / "no" / "w.safetensors", code=2)
    assert done.stdout == "" and "create the directory" in done.stderr


def test_weights_start_another_optimizer_and_a_resumed_run_keeps_its_own(tmp_path, labels):
    data, weights = labels(), tmp_path / "w.safetensors"
    foreplan("train", MODEL, "--data", data, "-o", weights)
    foreplan("train", MODEL, "--data", data, "--weights", weights, "--optimizer", "adam")
    for other in ("adam", "sgd"):
        again = ("--resume", weights, "--optimizer", other, "--epochs", 9)
        done = foreplan("train", MODEL, "--data", data, *again, code=2)
        assert "state of another optimizer" in done.stderr and "--weights" in done.stderr


def test_plan_files_are_known_by_their_content(tmp_path):
    path = tmp_path / "plan"
    foreplan("plan", MODEL, "-o", path)
    assert answer("estimate", path)["arena_bytes"] == answer("estimate", MODEL)["arena_bytes"]
    assert "is a plan already" in foreplan("plan", path, "-o", tmp_path / "other", code=2).stderr


def test_a_directory_named_like_a_zoo_model_is_not_in_the_way(tmp_path, monkeypatch):
    (tmp_path / "mlp").mkdir()
    monkeypatch.chdir(tmp_path)
    assert answer("estimate", "mlp", "--infer")["model"] == "mlp"


def test_an_onnx_model_takes_what_it_needs_from_a_file(tmp_path, onnx_file):
    path, w = onnx_file
    x = np.random.default_rng(0).standard_normal((5, 3)).astype(np.float32)
    np.savez(tmp_path / "xt.npz", x=x, target=np.zeros(5, np.int64))
    foreplan("run", path, "--data", tmp_path / "xt.npz", "-o", tmp_path / "y.npz")
    np.testing.assert_allclose(np.load(tmp_path / "y.npz")["y"], np.maximum(x @ w, 0), rtol=1e-6)


def test_an_onnx_model_with_a_batch_of_its_own_runs_in_batches(tmp_path, onnx_file):
    import onnx

    path, w = onnx_file
    model = onnx.load(path)
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 2
    onnx.save(model, tmp_path / "two.onnx")
    x = np.random.default_rng(0).standard_normal((5, 3)).astype(np.float32)
    np.savez(tmp_path / "x.npz", x=x)
    foreplan("run", tmp_path / "two.onnx", "--data", tmp_path / "x.npz", "-o", tmp_path / "y.npz")
    np.testing.assert_allclose(np.load(tmp_path / "y.npz")["y"], np.maximum(x @ w, 0), rtol=1e-6)


def test_the_loss_of_an_onnx_model_reads_its_first_output(tmp_path, onnx_file):
    import onnx
    from onnx import TensorProto, helper

    model = onnx.load(onnx_file[0])
    model.graph.node.append(helper.make_node("Relu", ["y"], ["z"]))
    model.graph.output.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, None))
    onnx.save(model, tmp_path / "two.onnx")
    assert answer("estimate", tmp_path / "two.onnx", "--batch", 4)["mode"] == "training"
    assert answer("estimate", tmp_path / "two.onnx", "--batch", 4, "--output", "z", "--loss", "mse")["nodes"] > 5


def test_the_error_of_a_budget_keeps_its_numbers():
    graph = fp.models.mlp(batch=4, width=8)
    whole = fp.compile(graph)
    with pytest.raises(fp.DoesNotFitError, match="its largest buffers") as caught:
        fp.compile(graph, budget=0.5)
    error = caught.value
    assert error.capacity == whole.plan.arena_bytes // 2 < error.needed <= whole.plan.arena_bytes
    assert error.plan.arena_bytes == error.needed and error.lower_bound <= error.needed and error.advice


@pytest.mark.parametrize(
    "name", ["mlp:width=1000000000", "mlp:batch=99999999999999999999", "gpt2_small:seq=1" + 40 * "0"]
)
def test_sizes_beyond_every_machine(name):
    assert "no machine holds it" in foreplan("estimate", name, code=2).stderr


def test_many_tensors_beyond_every_machine():
    def model(x):
        for _ in range(2000):
            x = fp.nn.softmax(x)
        return x

    with pytest.raises(fp.ShapeError, match="no machine holds it"):
        fp.lower(fp.inference(fp.trace(model, fp.spec((2**25, 2**25)))), "numpy")


@pytest.mark.parametrize("path", [None, 3, b"name"])
def test_a_path_is_a_text_or_a_path(path: object, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    step = fp.compile(fp.models.build("mlp:batch=4,width=8,layers=2"), fp.losses.mean, fp.optim.SGD(0.1))
    session = step.bind()
    for use in (step.save, step.view, session.save, session.load, fp.load_plan, fp.from_onnx):
        with pytest.raises(fp.UsageError):
            use(path)
    assert not list(tmp_path.iterdir())
