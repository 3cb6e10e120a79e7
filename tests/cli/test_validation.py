"""train with data to measure on, and logs: figures by hand, partial batches, resuming, and what does not fit."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.cli.shell import MODEL, answer, foreplan
from tests.cli.test_run import mlp_by_numpy


def held_out(folder: Path, count: int, seed: int = 7) -> tuple[Path, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    target = rng.integers(0, 3, count)
    x = rng.standard_normal((count, 6)).astype(np.float32) + 4 * np.eye(6, dtype=np.float32)[target]
    np.savez(folder / "held_out.npz", x=x, target=target)
    return folder / "held_out.npz", x, target


@pytest.mark.parametrize("count", [3, 4, 11])  # a step takes 4
@pytest.mark.parametrize("target", ["numpy", "cpu"])
def test_the_loss_and_metrics_are_means_over_all_samples(tmp_path, data, count, target):
    path, x, labels = held_out(tmp_path, count)
    out = tmp_path / "w.safetensors"
    options = ("--validation", path, "--metrics", "accuracy", "--metrics", "top5", "-o", out, "--target", target)
    done = answer("train", MODEL, "--data", data, "--epochs", 2, *options)
    assert [each["step"] for each in done["validations"]] == [10, 20]
    last = done["validations"][-1]
    scores = mlp_by_numpy(load_file(out), x)
    shifted = scores - scores.max(1, keepdims=True)
    log = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    assert last["loss"] == pytest.approx(-log[np.arange(count), labels].mean(), rel=1e-4)
    assert last["accuracy"] == pytest.approx((scores.argmax(1) == labels).mean())
    assert last["top5"] == pytest.approx(1)


def test_measuring_changes_no_step(tmp_path, data):
    path, _, _ = held_out(tmp_path, 6)
    options = ("train", MODEL, "--data", data, "--steps", 25, "--optimizer", "adam")
    plain, measured = answer(*options), answer(*options, "--validation", path)
    assert plain["losses"] == measured["losses"]
    assert [each["step"] for each in measured["validations"]] == [10, 20, 25]
    text = foreplan(*options, "--validation", path).stdout
    assert text.count("validation loss") == 3 and "epoch 3, step 25" in text


def test_averages_of_weights_are_what_is_measured(tmp_path, data):
    path, x, labels = held_out(tmp_path, 11)
    out, averages = tmp_path / "w.safetensors", tmp_path / "averages.safetensors"
    common = ("--data", data, "--epochs", 3, "--lr", 0.1, "--metrics", "accuracy", "--validation", path, "-o", out)
    done = answer("train", MODEL, *common, "--optimizer", "sgd:ema=0.95", "--save-averages", averages)
    plain = answer("train", MODEL, *common, "--optimizer", "sgd")
    assert done["losses"] == plain["losses"] and done["averages"] == str(averages)
    scores = mlp_by_numpy(load_file(averages), x)
    shifted = scores - scores.max(1, keepdims=True)
    loss = (np.log(np.exp(shifted).sum(1)) - shifted[np.arange(11), labels]).mean()
    assert done["validations"][-1]["loss"] == pytest.approx(loss, rel=1e-4)
    assert plain["validations"][-1]["loss"] != pytest.approx(loss, rel=1e-2)
    refused = foreplan("train", MODEL, *common, "--optimizer", "sgd", "--save-averages", averages, code=2)
    assert "keeps averages" in refused.stderr


def test_micro_batches_and_a_budget_are_measured_too(tmp_path, data):
    path, _, _ = held_out(tmp_path, 6)
    options = ("--accumulate", 2, "--epochs", 1, "--validation", path, "--metrics", "accuracy", "--freeze", "hidden0")
    assert 0 <= answer("train", MODEL, "--data", data, *options)["validations"][0]["accuracy"] <= 1


def test_samples_that_fill_no_step_are_told(tmp_path, data):
    arrays = np.load(data)
    np.savez(tmp_path / "odd.npz", x=arrays["x"][:38], target=arrays["target"][:38])
    assert "note: 2 of 38 samples fill no step" in foreplan("train", MODEL, "--data", tmp_path / "odd.npz").stderr
    assert "fill no step" not in foreplan("train", MODEL, "--data", data).stderr


@pytest.fixture
def fixed_batch(tmp_path):
    """A model that adds a number of its own to each of its 4 samples."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    rng = np.random.default_rng(0)
    nodes = [
        helper.make_node("Add", ["x", "each"], ["added"]),
        helper.make_node("Gemm", ["added", "fc.weight", "fc.bias"], ["y"], transB=1),
    ]
    tensors = {
        "each": np.arange(4, dtype=np.float32).reshape(4, 1),
        "fc.weight": rng.normal(size=(3, 6)).astype(np.float32),
        "fc.bias": np.zeros(3, np.float32),
    }
    graph = helper.make_graph(
        nodes,
        "fixed",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 6])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [4, 3])],
        [numpy_helper.from_array(array, name) for name, array in tensors.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), tmp_path / "m.onnx")
    return tmp_path / "m.onnx"


def test_a_model_of_a_fixed_batch_leaves_samples_out_and_says_so(tmp_path, data, fixed_batch):
    path, _, _ = held_out(tmp_path, 6)
    done = foreplan("train", fixed_batch, "--data", data, "--validation", path)
    assert "note: 2 samples of the validation fill no step" in done.stderr
    path, _, _ = held_out(tmp_path, 3)
    assert "give more" in foreplan("train", fixed_batch, "--data", data, "--validation", path, code=2).stderr


@pytest.fixture
def narrow_weights(tmp_path):
    """A model whose weights are float16."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    rng = np.random.default_rng(0)
    nodes = [
        helper.make_node("Cast", ["x"], ["narrow"], to=TensorProto.FLOAT16),
        helper.make_node("Gemm", ["narrow", "body.weight"], ["hidden"], transB=1),
        helper.make_node("Gemm", ["hidden", "fc.weight", "fc.bias"], ["scores"], transB=1),
        helper.make_node("Cast", ["scores"], ["y"], to=TensorProto.FLOAT),
    ]
    shapes = {"body.weight": (6, 6), "fc.weight": (3, 6), "fc.bias": (3,)}
    graph = helper.make_graph(
        nodes,
        "narrow",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 6])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 3])],
        [numpy_helper.from_array(rng.normal(size=s).astype(np.float16), name) for name, s in shapes.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), tmp_path / "m.onnx")
    return tmp_path / "m.onnx"


@pytest.mark.parametrize("options", [(), ("--freeze", "body"), ("--narrow-weights",), ("--precision", "bf16")])
def test_weights_of_any_type_are_shared(tmp_path, data, narrow_weights, options):
    path, x, labels = held_out(tmp_path, 11)
    out = tmp_path / "w.safetensors"
    common = ("--batch", 4, "--epochs", 2, "--validation", path, "--metrics", "accuracy", "-o", out)
    (_, last) = answer("train", narrow_weights, "--data", data, "--lr", 1e-4, *common, *options)["validations"]
    weights = {name: array.astype(np.float32) for name, array in load_file(out).items()}
    scores = x @ weights["body.weight"].T @ weights["fc.weight"].T + weights["fc.bias"]
    assert last["accuracy"] == pytest.approx((scores.argmax(1) == labels).mean(), abs=0.1)
    foreplan("train", MODEL, "--data", data, *common[2:], *(("--precision", "bf16") if "bf16" in options else ()))


def test_a_log_has_a_line_a_step_and_goes_on_where_a_run_goes_on(tmp_path, data):
    path, _, _ = held_out(tmp_path, 6)
    log, out = tmp_path / "run.csv", tmp_path / "w.safetensors"
    options = ("train", MODEL, "--data", data, "--validation", path, "--metrics", "accuracy", "--log", log, "-o", out)
    first = answer(*options, "--steps", 13)
    log.write_text(log.read_text() + "14,2,9.0,0.1,,\n")  # a step after the checkpoint, before the run was killed
    rest = answer(*options, "--steps", 20, "--resume", out)
    rows = list(csv.DictReader(log.open()))
    assert [int(row["step"]) for row in rows] == list(range(1, 21))
    assert [float(row["loss"]) for row in rows] == first["losses"] + rest["losses"]
    assert [row["epoch"] for row in rows] == ["1"] * 10 + ["2"] * 10
    measured = {int(row["step"]): float(row["validation_accuracy"]) for row in rows if row["validation_accuracy"]}
    assert measured == {each["step"]: each["accuracy"] for each in first["validations"] + rest["validations"]}
    plain = ("train", MODEL, "--data", data, "--log", log, "--steps", 21, "--resume", out)
    assert "has other columns" in foreplan(*plain, code=2).stderr
    assert len(log.read_text().splitlines()) == 21


def test_tensorboard_reads_what_is_written(tmp_path, data):
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed: make setup-torch")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    path, _, _ = held_out(tmp_path, 6)
    folder = tmp_path / "runs"
    options = ("--validation", path, "--tensorboard", folder, "--epochs", 2)
    done = answer("train", MODEL, "--data", data, *options)
    events = EventAccumulator(str(folder))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == list(range(1, 21))
    np.testing.assert_allclose([event.value for event in events.Scalars("loss")], done["losses"], rtol=1e-6)
    (ten, twenty) = events.Scalars("validation/loss")
    assert (ten.step, twenty.step) == (10, 20)
    assert twenty.value == pytest.approx(done["validations"][-1]["loss"], rel=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--metrics", "accuracy"), "give it too"),
        (("--validation", "none.npz"), "cannot read 'none.npz'"),
        (("--validation", "DATA", "--metrics", "acuracy"), "there is no metric 'acuracy'"),
        (("--log", "nowhere/run.csv"), "nowhere"),
    ],
)
def test_what_cannot_be_measured_is_told(data, options, message):
    options = [data if option == "DATA" else option for option in options]
    done = foreplan("train", MODEL, "--data", data, *options, code=2)
    assert message in done.stderr and "Traceback" not in done.stderr


def test_a_plan_has_no_validation(tmp_path, data):
    foreplan("plan", MODEL, "-o", tmp_path / "p.plan")
    done = foreplan("train", tmp_path / "p.plan", "--data", data, "--validation", data, code=2)
    assert "is a plan" in done.stderr
