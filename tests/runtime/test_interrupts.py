"""Ctrl-C at any moment: the process ends with KeyboardInterrupt or goes on, and what it leaves is whole."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import foreplan as fp
from tests.profile import pick

TIMES = 4  # interrupts of one process

# Binds, trains and saves without end; says what it does, so that interrupts come in the midst of it. Of several, the
# last one ends it.
WORK = """
import signal, sys
import numpy as np
import foreplan as fp
from tests.runtime.micro_batches import compiled, data_for, perceptron

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
target, path, times = sys.argv[1:]
step = compiled(perceptron(64), target=target, optimizer=fp.optim.Adam())
given = data_for(step, 0)
session = step.bind()
session.step(given)
session.save(path)
for left in reversed(range(int(times))):
    try:
        print("ready", flush=True)
        while True:
            session = step.bind(weights=path)
            for _ in range(5):
                session.step(given)
            for _ in session.steps([given] * 5):
                dict(session.parameters)
            session.save(path)
            session.load(path)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        try:
            before = session.steps_done
            session.step(given)
            assert session.steps_done == before + 1
            print("goes on", flush=True)
        except fp.SessionError as error:
            assert "interrupted" in str(error)
            session.load(path)
            session.step(given)
            print("loaded", flush=True)
        session.save(path)
        if not left:
            raise
"""


@pytest.mark.slow
@pytest.mark.parametrize("target", ["numpy", "cpu:threads=1"])
def test_ctrl_c_at_any_moment_ends_cleanly(target: str, tmp_path: Path) -> None:
    rng, path = random.Random(0), tmp_path / "saved.safetensors"
    graph = fp.models.build("mlp:batch=64,width=16,layers=2,inputs=12,classes=5")
    step = fp.compile(graph, fp.losses.cross_entropy, fp.optim.Adam())
    for _ in range(pick(1, 1, 4)):
        words = [sys.executable, "-c", WORK, target, str(path), str(TIMES)]
        child = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert child.stdout is not None
        told = []
        try:
            for _ in range(TIMES):
                told.append(child.stdout.readline())
                time.sleep(rng.uniform(0, 0.3))
                child.send_signal(signal.SIGINT)
                told += [child.stdout.readline(), child.stdout.readline()]
            out, err = child.communicate(timeout=300)
        finally:
            child.kill()
        # It ends by the exception itself, or by the signal, as Python does with one that nobody catches.
        assert child.returncode in (1, -signal.SIGINT), (child.returncode, err)
        assert "KeyboardInterrupt" in err.splitlines()[-1], err
        assert not out and told[::3] == ["ready\n"] * TIMES and told[1::3] == ["interrupted\n"] * TIMES, (told, err)
        assert set(told[2::3]) <= {"goes on\n", "loaded\n"}, (told, err)
        session = step.bind(weights=path)  # whole, whenever the interrupt came
        assert all(np.isfinite(array).all() for array in session.parameters.values())
        assert {each.name for each in tmp_path.iterdir()} == {path.name}  # nothing left beside it
