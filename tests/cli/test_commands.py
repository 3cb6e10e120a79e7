"""The commands as a whole: help, errors, exit codes, and streams that close."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from foreplan.cli import cli
from tests.cli.shell import MODEL, PROGRAM, foreplan


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
        "print([m for m in ('numpy', 'llvmlite', 'rich', 'onnx', 'scipy', 'networkx') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


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
