"""train: resuming, interrupting, diverging, checkpoints on the way, and data that does not fit."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import time

import numpy as np
import pytest

from foreplan.cli.compiling import compile_model
from foreplan.cli.settings import Settings
from foreplan.cli.training import DivergedError, Saving
from tests.cli.shell import MODEL, PROGRAM, answer, foreplan


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


def test_a_resumed_run_has_the_rates_of_the_uninterrupted_one(tmp_path, data):
    from safetensors.numpy import load_file

    more = ("--lr", 0.2, "--optimizer", "nadam:ema=0.9", "--schedule", "cosine:steps=20,warmup=5", "--clip-value", 0.05)
    options = ("train", MODEL, "--data", data, *more)
    whole = answer(*options, "--steps", 12, "-o", tmp_path / "whole")
    half = answer(*options, "--steps", 7, "-o", tmp_path / "part")
    rest = answer(*options, "--steps", 12, "--resume", tmp_path / "part", "-o", tmp_path / "part")
    assert half["losses"] + rest["losses"] == whole["losses"]
    assert (tmp_path / "part").read_bytes() == (tmp_path / "whole").read_bytes()
    assert {"momentum_product", "step"} < set(load_file(tmp_path / "part"))
    # Where it does not say where it ends, it ends with the run.
    short = answer(*options[:-3], "cosine:warmup=5", "--steps", 12, *more[-2:])["losses"]
    assert short[:3] == whole["losses"][:3] and short[8:] != whole["losses"][8:]
    assert "cosine:steps=" in foreplan("estimate", MODEL, "--schedule", "cosine", code=2).stderr
    foreplan("plan", MODEL, *more, "-o", tmp_path / "a.plan")
    run = ("train", tmp_path / "a.plan", "--data", data, "--steps", 12)
    assert answer(*run)["losses"] == whole["losses"]
    assert "leave --lr out" in foreplan(*run, "--lr", 1, code=2).stderr
    assert "decided on --schedule" in foreplan(*run, "--schedule", "constant", code=2).stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_saves_and_says_so(tmp_path, data, number):
    from safetensors.numpy import load_file

    out = tmp_path / "w.safetensors"
    options = ["train", MODEL, "--data", str(data), "-o", str(out), "--json"]
    terminal, end = pty.openpty()  # progress goes to a terminal only, and says when steps are being run
    with open(tmp_path / "stdout", "w") as answer_file:  # the losses of all steps are more than a pipe holds
        process = subprocess.Popen([*PROGRAM, *options, "--steps", "100000000"], stdout=answer_file, stderr=end)
    os.close(end)
    stderr, deadline = "", time.monotonic() + 60
    while "loss" not in stderr and time.monotonic() < deadline:
        stderr += os.read(terminal, 4096).decode()
    process.send_signal(number)
    with contextlib.suppress(OSError):  # how a terminal says that the other end has been closed
        while piece := os.read(terminal, 4096):
            stderr += piece.decode()
    os.close(terminal)
    assert process.wait(timeout=60) == 128 + number, stderr
    assert (
        "interrupted; step" in stderr and f"--resume {out}" in stderr.replace("\r\n", "") and "Traceback" not in stderr
    )
    done = json.loads((tmp_path / "stdout").read_text())
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
