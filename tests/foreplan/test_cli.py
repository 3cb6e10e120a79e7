"""The commands as people and scripts use them: results, errors, exit codes, and what is left on disk."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import pty
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from foreplan.cli import cli
from foreplan.cli_options import LOSSES, OPTIMIZERS, Settings, compile_model, parse_budget, parse_shapes, with_batch
from foreplan.cli_train import DivergedError, Saving
from foreplan.errors import UsageError
from tests.foreplan.shell import MODEL, answer, foreplan

PROGRAM = [sys.executable, "-m", "foreplan.cli"]


@pytest.fixture
def data(tmp_path):
    """40 samples of three classes that a small network can tell apart."""
    rng = np.random.default_rng(0)
    target = rng.integers(0, 3, 40)
    x = rng.standard_normal((40, 6)).astype(np.float32) + 4 * np.eye(6, dtype=np.float32)[target]
    np.savez(tmp_path / "data.npz", x=x, target=target)
    return tmp_path / "data.npz"


# ---- options ------------------------------------------------------------


def test_shapes():
    assert parse_shapes(("x:32x3x224x224",)) == {"x": (32, 3, 224, 224)}
    assert parse_shapes(("a:1,b:2x3", "c:0:4X5", "s:")) == {"a": (1,), "b": (2, 3), "c:0": (4, 5), "s": ()}
    assert parse_shapes(()) is None
    for bad in ("x", "32x3", ":3", "x:3x", "x:-1", "x:a", "x:1.5", "x:1,x:2", "x:²"):
        with pytest.raises(UsageError):
            parse_shapes((bad,))


def test_batch_in_a_zoo_name():
    assert with_batch("mlp", None) == "mlp"
    assert with_batch("mlp", 3) == "mlp:batch=3"
    assert with_batch("mlp:width=64,batch=16", 3) == "mlp:width=64,batch=3"


def test_budget():
    assert parse_budget(None) is None
    assert parse_budget("0.5") == 0.5
    assert parse_budget("2GiB") == "2GiB"
    for bad in ("lots", "-1", "nan", "2 parsecs"):
        with pytest.raises(UsageError):
            parse_budget(bad)


def test_choices_are_those_there_are():
    from foreplan import losses, optim

    assert set(LOSSES) == set(losses.LOSSES)
    assert all(hasattr(optim, name) for name in OPTIMIZERS.values())


@pytest.mark.parametrize("command", sorted(cli.commands))
def test_help_has_examples(command):
    text = foreplan(command, "--help").stdout
    assert "Example" in text and f"foreplan {command}" in text
    assert "\b" not in text


def test_help_is_fast_and_complete():
    started = time.perf_counter()
    done = subprocess.run([*PROGRAM, "--help"], capture_output=True, text=True, timeout=30, check=True)
    assert time.perf_counter() - started < 3
    for name in ("estimate", "plan", "verify", "view", "diff", "run", "train", "bench", "place", "models"):
        assert f"  {name} " in done.stdout


def test_help_imports_nothing_heavy():
    code = (
        "import sys, foreplan.cli\n"
        "print([m for m in ('numpy', 'numba', 'rich', 'onnx', 'scipy', 'networkx') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# ---- plans ------------------------------------------------------------


def test_estimate():
    figures = answer("estimate", MODEL)
    assert figures["mode"] == "training" and figures["target"] == "numpy"
    # Weights and biases of 6 → 8 → 8 → 3, and as much velocity; float32.
    parameters = 4 * (6 * 8 + 8 + 8 * 8 + 8 + 8 * 3 + 3)
    assert 2 * parameters <= figures["persistent_bytes"] <= 2 * parameters + 64
    assert figures["peak_bytes"] == figures["arena_bytes"] >= figures["lower_bound_bytes"] > figures["persistent_bytes"]
    assert sum(figures["categories"].values()) == figures["lower_bound_bytes"]
    assert set(figures["categories"]) == {
        *("parameters", "optimizer_state", "gradients", "activations", "workspace", "inputs", "outputs")
    }
    for key in ("model", "order_lower_bound_bytes", "flops", "extra_flops_ratio", "extra_seconds_ratio", "nodes",
                "instructions", "plan_seconds"):  # fmt: skip
        assert key in figures
    text = foreplan("estimate", MODEL).stdout
    assert f"{figures['arena_bytes']:,} bytes" in text and "peak at instruction" in text


def test_estimate_of_other_steps():
    infer = answer("estimate", MODEL, "--infer")
    sgd = answer("estimate", MODEL, "--optimizer", "sgd")
    adam = answer("estimate", MODEL, "--optimizer", "adamw")
    assert infer["mode"] == "inference" and infer["categories"]["optimizer_state"] == 0
    assert infer["peak_bytes"] < sgd["peak_bytes"] < adam["peak_bytes"]
    assert answer("estimate", MODEL, "--batch", 400)["peak_bytes"] > 10 * infer["peak_bytes"]


def test_a_budget_that_cannot_be_met():
    done = foreplan("estimate", MODEL, "--budget", "1KiB", code=3)
    assert done.stdout == ""
    assert "1.00 KiB" in done.stderr and "lower bound" in done.stderr and "peak" in done.stderr
    found = answer("estimate", MODEL, "--budget", "1KiB", code=3)
    assert found["capacity_bytes"] == 1024 and found["needed_bytes"] >= found["lower_bound_bytes"] > 1024


def test_plan_verify_view_diff(tmp_path):
    a, b = tmp_path / "a.plan", tmp_path / "b.plan"
    written = answer("plan", MODEL, "-o", a)
    foreplan("plan", MODEL, "--batch", 64, "-o", b)
    assert answer("verify", a)["verified"] is True
    assert "verified" in foreplan("verify", b).stdout
    assert answer("view", a)["arena_bytes"] == written["arena_bytes"]
    page = tmp_path / "map.html"
    foreplan("view", a, "-o", page)
    assert page.read_text().startswith("<!DOCTYPE html>")
    grown = answer("diff", a, b)["bytes"]["arena_bytes"]
    assert grown["before"] == written["arena_bytes"] < grown["after"]
    assert "arena" in foreplan("diff", a, MODEL).stdout
    foreplan("view", MODEL, "--dot", tmp_path / "g.dot")
    assert (tmp_path / "g.dot").read_text().startswith("digraph")
    assert "plan file does not hold" in foreplan("view", a, "--dot", tmp_path / "h.dot", code=2).stderr


def test_plan_explains_itself() -> None:
    told = answer("plan", MODEL, "--explain", "--remat", "off")
    names = ["program order", "order", "alias", "updates", "remat", "placement"]
    assert [stage["name"] for stage in told["stages"]] == names and told["file"] is None
    assert told["stages"][-1]["arena_bytes"] == told["arena_bytes"] and told["each_once_bytes"] > 0
    text = foreplan("plan", MODEL, "--explain").stdout
    assert all(f"\n{name} " in text for name in names) and "No schedule at all needs less than" in text
    assert "-o FILE" in foreplan("plan", MODEL, code=2).stderr


def test_a_plan_has_decided_already(tmp_path, data):
    path, other = tmp_path / "a.plan", tmp_path / "b.plan"
    foreplan("plan", MODEL, "--lr", 0.02, "-o", path)
    for option in (("--optimizer", "adam"), ("--batch", 3), ("--infer",), ("--budget", "1GiB")):
        assert f"has decided on {option[0].replace('infer', 'train')}" in foreplan("view", path, *option, code=2).stderr
    options = ("--data", data, "--steps", 12)
    by_plan = answer("train", path, *options)["losses"]
    assert by_plan == answer("train", MODEL, "--lr", 0.02, *options)["losses"]
    assert answer("train", path, "--lr", 0.03, *options)["losses"] != by_plan
    foreplan("plan", MODEL, "--infer", "-o", other)
    assert "plan for inference" in foreplan("train", other, *options, code=2).stderr
    assert "plan for training" in foreplan("run", path, "--data", data, code=2).stderr


def test_plans_are_deterministic(tmp_path):
    for name in ("a", "b"):
        foreplan("plan", MODEL, "-o", tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_damaged_plan_is_refused(tmp_path):
    path = tmp_path / "a.plan"
    foreplan("plan", MODEL, "-o", path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert "error: " in foreplan("verify", path, code=1).stderr
    assert answer("verify", path, code=1)["verified"] is False
    path.write_bytes(whole.replace(b"matmul", b"matnul", 1))
    foreplan("verify", path, code=1)


def test_models_are_listed():
    listed = answer("models")
    assert {"mlp", "resnet50", "gpt2_small"} <= set(listed)
    assert all(name in foreplan("models").stdout for name in listed)


# ---- the placer ------------------------------------------------------------


def test_place(tmp_path):
    table, out = tmp_path / "in.csv", tmp_path / "out.csv"
    rng = np.random.default_rng(1)
    lower = rng.integers(0, 50, 60)
    upper = lower + rng.integers(1, 20, 60)
    size = rng.integers(1, 100, 60)
    rows = [f"{i},{a},{b},{n}" for i, (a, b, n) in enumerate(zip(lower, upper, size))]
    table.write_text("id,lower,upper,size\n" + "\n".join(rows) + "\n")
    figures = answer("place", table, "-o", out)
    with open(out) as file:
        placed = [{key: int(value) for key, value in row.items()} for row in csv.DictReader(file)]
    assert [row["id"] for row in placed] == list(range(60))
    for i, p in enumerate(placed):
        for q in placed[:i]:
            together = p["lower"] < q["upper"] and q["lower"] < p["upper"]
            assert not (together and p["offset"] < q["offset"] + q["size"] and q["offset"] < p["offset"] + p["size"])
    highest = max(int(size[(lower <= t) & (t < upper)].sum()) for t in range(70))
    assert figures["lower_bound"] == highest
    assert figures["height"] == max(row["offset"] + row["size"] for row in placed)
    assert foreplan("place", table).stdout == out.read_text()
    out.unlink()
    assert "error" in foreplan("place", table, "--capacity", highest - 1, "-o", out, code=3).stderr
    assert not out.exists()


# ---- running ------------------------------------------------------------


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


@pytest.mark.parametrize("optimizer", ["nesterov", "adam"])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, data, optimizer):
    from safetensors.numpy import load_file

    options = ("train", MODEL, "--data", data, "--optimizer", optimizer)
    whole = answer(*options, "--steps", 25, "-o", tmp_path / "whole")
    half = answer(*options, "--steps", 13, "-o", tmp_path / "part")
    rest = answer(*options, "--steps", 25, "--resume", tmp_path / "part", "-o", tmp_path / "part")
    assert half["losses"] + rest["losses"] == whole["losses"]
    part, full = load_file(tmp_path / "part"), load_file(tmp_path / "whole")
    assert {name: array.tobytes() for name, array in part.items()} == {name: a.tobytes() for name, a in full.items()}
    assert "25 steps behind it" in foreplan(*options, "--steps", 20, "--resume", tmp_path / "part", code=2).stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_saves_and_says_so(tmp_path, data, number):
    from safetensors.numpy import load_file

    out = tmp_path / "w.safetensors"
    options = ["train", MODEL, "--data", str(data), "-o", str(out), "--json"]
    terminal, end = pty.openpty()  # progress goes to a terminal only, and says when steps are being run
    process = subprocess.Popen([*PROGRAM, *options, "--steps", "100000000"], stdout=subprocess.PIPE, stderr=end)
    os.close(end)
    stderr, deadline = "", time.monotonic() + 60
    while "loss" not in stderr and time.monotonic() < deadline:
        stderr += os.read(terminal, 4096).decode()
    process.send_signal(number)
    with contextlib.suppress(OSError):  # how a terminal says that the other end has been closed
        while piece := os.read(terminal, 4096):
            stderr += piece.decode()
    os.close(terminal)
    stdout = process.communicate(timeout=60)[0]
    assert process.returncode == 128 + number, stderr
    assert (
        "interrupted; step" in stderr and f"--resume {out}" in stderr.replace("\r\n", "") and "Traceback" not in stderr
    )
    done = json.loads(stdout)
    assert done["interrupted"] is True
    assert int(load_file(out)["step"]) == done["steps"] > 0
    more = answer(*options[:-1], "--steps", done["steps"] + 1, "--resume", out)
    assert more["steps"] == 1


def test_a_diverging_run_fails_and_keeps_the_checkpoint(tmp_path, data):
    out = tmp_path / "w"
    out.write_bytes(b"before")
    done = foreplan("train", MODEL, "--data", data, "--lr", "1e30", "--epochs", 5, "-o", out, code=1)
    assert "diverged" in done.stderr and "--lr" in done.stderr
    assert out.read_bytes() == b"before"


def test_gradients_are_clipped(tmp_path, data):
    from safetensors.numpy import load_file

    def after_a_step(rate: str, *more: object) -> np.ndarray:
        options = ("--optimizer", "sgd", "--lr", rate, "--steps", 1, "-o", tmp_path / "w", *more)
        foreplan("train", MODEL, "--data", data, *options)
        return np.concatenate([a.ravel() for n, a in load_file(tmp_path / "w").items() if a.dtype == np.float32])

    start = after_a_step("0")
    assert np.linalg.norm(after_a_step("1") - start) > 0.1
    assert np.linalg.norm(after_a_step("1", "--clip-norm", 0.01) - start) == pytest.approx(0.01, rel=1e-3)
    foreplan("plan", MODEL, "--clip-norm", 0.01, "-o", tmp_path / "a.plan")
    assert "decided on --clip-norm" in foreplan("view", tmp_path / "a.plan", "--clip-norm", 1, code=2).stderr
    for bad in ("0", "-1", "nan", "much"):
        foreplan("estimate", MODEL, "--clip-norm", bad, code=2)


def test_checkpoints_on_the_way(tmp_path, data):
    from safetensors.numpy import load_file

    options = ("train", MODEL, "--seed", 1, "--epochs", 2, "--save-every", 4)
    assert "needs -o" in foreplan(*options, "--data", data, code=2).stderr
    whole = answer(*options, "--data", data, "-o", tmp_path / "whole")["losses"]
    bad, out = tmp_path / "bad.npz", tmp_path / "w"
    arrays = dict(np.load(data))
    arrays["x"][5, 0] = np.nan  # comes up in one of the ten steps of an epoch
    np.savez(bad, **arrays)
    done = foreplan(*options, "--data", bad, "-o", out, code=1)
    failed = int(done.stderr.partition("at step ")[2].partition(":")[0])
    saved = (failed - 1) // 4 * 4
    assert saved, "another seed is needed"
    assert f"{out} holds step {saved}" in done.stderr and "sample 5 of 'x'" in done.stderr
    assert int(load_file(out)["step"]) == saved
    assert answer(*options, "--data", data, "--resume", out, "-o", out)["losses"] == whole[saved:]


def test_a_killed_run_leaves_a_whole_checkpoint(tmp_path, data):
    from safetensors.numpy import load_file

    out = tmp_path / "w.safetensors"
    options = ["train", MODEL, "--data", str(data), "-o", str(out), "--save-every", "1"]
    process = subprocess.Popen([*PROGRAM, *options, "--steps", "100000000"], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not out.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.2)
    process.kill()
    process.wait(timeout=60)
    done = int(load_file(out)["step"])
    assert answer(*options, "--steps", done + 1, "--resume", out)["steps"] == 1


def test_a_checkpoint_with_nan_takes_no_good_ones_place(tmp_path):
    session = compile_model(MODEL, Settings()).bind()
    saving = Saving(session, str(tmp_path / "w"), 2)
    saving.after(1)
    assert not (tmp_path / "w").exists()
    saving.after(2)
    before = (tmp_path / "w").read_bytes()
    name, array = next(iter(session.parameters.items()))
    array.flat[0] = np.nan
    session.parameters[name] = array
    with pytest.raises(DivergedError, match=f"'{name}' holds nan after step 4.* holds step 2"):
        saving.after(4)
    assert (tmp_path / "w").read_bytes() == before


def test_data_that_does_not_fit_the_model(tmp_path, data):
    arrays = dict(np.load(data))
    cases = {
        "no array 'target'": {"x": arrays["x"]},
        "'y' that no input takes": arrays | {"y": arrays["x"]},
        "each sample of 'x' must be float32[6]": arrays | {"x": arrays["x"][:, :5]},
        "different numbers of samples": arrays | {"x": arrays["x"][:30]},
        "has 3 samples": {name: array[:3] for name, array in arrays.items()},
        "holds 7": arrays | {"target": np.where(np.arange(40) == 1, 7, arrays["target"])},
    }
    for message, given in cases.items():
        np.savez(tmp_path / "bad.npz", **given)
        assert message in foreplan("train", MODEL, "--data", tmp_path / "bad.npz", code=2).stderr
    (tmp_path / "text.npz").write_text("no zip")
    np.savez(tmp_path / "objects.npz", x=np.array([{}], dtype=object))
    np.save(tmp_path / "one.npy", arrays["x"])
    for name in ("text.npz", "objects.npz", "one.npy", "missing.npz", ""):
        assert str(tmp_path / name) in foreplan("train", MODEL, "--data", tmp_path / name, code=2).stderr


def test_bench():
    figures = answer("bench", MODEL, "--steps", 4, "--threads", 1)
    assert figures["steps"] == 4
    assert 0 < figures["step_seconds_min"] <= figures["step_seconds_median"]
    assert figures["step_cpu_seconds"] > 0
    assert figures["planned_bytes"] == figures["peak_bytes"]
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
    small, large = (answer("estimate", path, "--batch", n, "--infer")["peak_bytes"] for n in (8, 8000))
    assert large > 100 * small
    assert answer("estimate", path, "--batch", 8)["categories"]["inputs"] > 0  # cross-entropy by default


# ---- errors ------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ["estimate", "no_such_model"],
        ["estimate", "mlp:colour=3"],
        ["estimate", "missing.onnx"],
        ["estimate", "mlp", "--shapes", "x:3"],
        ["estimate", "mlp", "--budget", "lots"],
        ["estimate", "mlp", "--optimizer", "magic"],
        ["estimate", "mlp", "--batch", "0"],
        ["estimate"],
        ["no-such-command"],
        ["plan", MODEL, "-o", "/no/such/place/a.plan"],
        ["view", MODEL, "-o", "/no/such/place/map.html"],
        ["place", "/no/such/table.csv"],
        ["run", MODEL, "--data", "/no/such/data.npz"],
        ["train", MODEL, "--data", "x.npz", "--infer"],
        ["diff", "/no/such/a.plan", "/no/such/b.plan"],
    ],
)
def test_wrong_use(arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = foreplan(*arguments, code=2)
    assert done.stdout == ""
    assert "rror: " in done.stderr
    assert os.listdir(tmp_path) == []


def test_files_that_are_something_else(tmp_path):
    (tmp_path / "a.plan").write_bytes(os.urandom(1000))
    (tmp_path / "a.onnx").write_bytes(os.urandom(1000))
    foreplan("verify", tmp_path / "a.plan", code=1)
    foreplan("verify", tmp_path / "missing.plan", code=1)
    foreplan("estimate", tmp_path / "a.onnx", code=2)
    foreplan("verify", tmp_path, code=1)


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (MemoryError(), 3, "too little memory"),
        (PermissionError(13, "Permission denied", "a file"), 2, "'a file': Permission denied"),
    ],
)
def test_what_is_no_error_of_ours_is_told_too(monkeypatch, error, code, text):
    from foreplan import models

    def fail():
        raise error

    monkeypatch.setattr(models, "describe", fail)
    assert text in foreplan("models", code=code).stderr


def test_a_closed_pipe_is_no_error():
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([*PROGRAM, "models"], stdout=write, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(write)
    assert done.returncode == 141 and done.stderr == ""


def test_a_full_disk_is_told(tmp_path):
    with open("/dev/full", "w") as full:
        done = subprocess.run([*PROGRAM, "models"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 2 and "No space left on device" in done.stderr and "Traceback" not in done.stderr


def test_the_map_may_go_to_standard_output():
    done = subprocess.run(
        [*PROGRAM, "view", MODEL, "-o", "/dev/stdout"], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.startswith("<!DOCTYPE html>") and done.stdout.rstrip().endswith("</html>")
