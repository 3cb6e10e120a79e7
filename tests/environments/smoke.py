"""What a new user does first, as a script: it needs foreplan as installed, and nothing of the repository.

It runs in an empty folder: all of it in a minute, with the argument `import` the import of a file alone, or with
`loops` two loops that are compiled. It exits with an error if anything is not as documented.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

import foreplan as fp
from foreplan.jit import compiled

STEPS = 5
PATIENCE = 60  # seconds that a forked process may take


def _model(x: Any) -> Any:
    x = fp.nn.relu(fp.nn.conv(x, 8, kernel=3, stride=2, padding="same", name="conv"))
    return fp.nn.linear(fp.nn.flatten(x), 10, name="head")


def _batch() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 10, 16)
    images = rng.normal(size=(16, 1, 8, 8)).astype(np.float32) + labels[:, None, None, None] / 3
    return {"x": images.astype(np.float32), "target": labels}


def _losses(target: str, precision: str = "float32") -> list[float]:
    """Of some steps of training."""
    graph = fp.trace(_model, fp.spec((16, 1, 8, 8)))
    step = fp.compile(
        graph,
        loss=fp.losses.cross_entropy,
        optimizer=fp.optim.Nesterov(0.05, momentum=0.9),
        target=target,
        precision=precision,
    )
    assert "lower bound" in str(step.memory)
    session, batch = step.bind(), _batch()
    losses = [float(result.loss) for result in session.steps([batch] * STEPS)]
    assert losses[-1] < losses[0], losses
    if precision == "float32":
        _come_back(step, session, target)
        _in_a_forked_process(session)
    return losses


def _come_back(step: fp.Compiled, session: Any, target: str) -> None:
    """A checkpoint and a plan file go on with the same step."""
    session.save(f"{target}.safetensors")
    step.save(f"{target}.plan")
    started = fp.load_plan(f"{target}.plan").bind(weights=f"{target}.safetensors")
    resumed = step.bind(seed=1)
    resumed.load(f"{target}.safetensors")
    for name, value in session.parameters.items():
        np.testing.assert_array_equal(started.parameters[name], value)
    assert resumed.steps_done == STEPS and started.steps_done == 0
    assert resumed.step(_batch()).loss == session.step(_batch()).loss


def _in_a_forked_process(session: Any) -> None:
    """A copy of the process runs a step of its copy of the session, with the result of the original."""
    child = os.fork()
    if not child:
        status = 1
        try:
            signal.alarm(PATIENCE)
            Path("forked").write_text(repr(session.step(_batch()).loss))
            status = 0
        finally:
            os._exit(status)
    _, ended = os.waitpid(child, 0)
    assert ended == 0, f"the forked process ended with status {ended:#x}"
    assert Path("forked").read_text() == repr(session.step(_batch()).loss)


def _inferred(target: str) -> None:
    """The same answers from several threads that share a session; and what the model learned is in them."""
    forward = fp.compile(fp.trace(_model, fp.spec((16, 1, 8, 8))), target=target)
    session, batch = forward.bind(weights=f"{target}.safetensors"), _batch()
    given = {"x": batch["x"]}
    expected = _only(session.step(given))
    assert (expected.argmax(1) == batch["target"]).mean() > 0.3
    found: list[np.ndarray] = []
    threads = [threading.Thread(target=lambda: found.append(_only(session.step(given)))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    for each in found:
        np.testing.assert_array_equal(each, expected)


def _only(result: Any) -> np.ndarray:
    (output,) = result.outputs.values()
    return output


def _imported(targets: list[str]) -> None:
    """An ONNX file gives what its arithmetic says."""
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Relu", ["h"], ["y"])]
    weights = np.array([[1, -1], [2, -2]], np.float32)
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 2]) for name in "xy")
    graph = helper.make_graph(nodes, "small", [x], [y], [onnx.numpy_helper.from_array(weights, "w")])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), "small.onnx")
    for target in targets:
        found = fp.compile(fp.from_onnx("small.onnx", batch=1), target=target).bind()
        np.testing.assert_array_equal(_only(found.step({"x": np.ones((1, 2), np.float32)})), [[3, 0]])


def _looped() -> None:
    """Loops are compiled, whether their machine code can be kept or not."""
    for function in (_next, _double):
        assert compiled(function)(3) == function(3)


def _next(x: int) -> int:
    return x + 1


def _double(x: int) -> int:
    return 2 * x


def _shell(*arguments: str, code: int = 0) -> str:
    """What the program prints."""
    command = Path(sys.executable).with_name("foreplan")
    done = subprocess.run([command, *arguments], capture_output=True, text=True)
    assert done.returncode == code and "Traceback" not in done.stderr, f"{arguments}: {done.returncode}, {done.stderr}"
    return done.stdout if code == 0 else done.stderr


def _from_the_shell(target: str) -> None:
    """The commands of the README, on small models."""
    assert importlib.metadata.version("foreplan") == fp.__version__ == _shell("--version").split()[-1]
    _shell("estimate", "small.onnx", "--batch", "4", "--infer")
    assert (
        json.loads(_shell("estimate", "resnet18:batch=16,size=64", "--budget", "0.9", "--json"))["extra_seconds_ratio"]
        > 0
    )
    assert "outside it" in _shell("estimate", "mlp:width=64,batch=16", "--target", "cuda:h100")
    _shell("verify", f"{target}.plan")
    _shell("view", f"{target}.plan", "-o", "map.html")
    assert "<html" in Path("map.html").read_text(encoding="utf-8")
    Path("in.csv").write_text("id,lower,upper,size\na,0,2,64\nb,1,3,64\nc,2,4,64\n")
    _shell("place", "in.csv", "-o", "placed.csv")
    assert len(Path("placed.csv").read_text().splitlines()) == 4
    rng = np.random.default_rng(0)
    np.savez("data.npz", x=rng.normal(size=(8, 2)).astype(np.float32), target=rng.integers(0, 2, 8))
    options = ("small.onnx", "--batch", "4", "--data", "data.npz", "--target", target)
    trained = json.loads(_shell("train", *options, "--epochs", "3", "-o", "trained.safetensors", "--json"))
    assert trained["steps"] == 6
    _shell("run", *options, "--weights", "trained.safetensors", "-o", "answers.npz")
    with np.load("answers.npz") as answers:
        assert answers["y"].shape == (8, 2)
    assert _shell("estimate", "nothing.onnx", code=2).startswith("error: ")


def main(alone: str = "") -> None:
    """All of it, the import alone, or loops alone."""
    installed = Path(fp.__file__).resolve().parent
    assert "site-packages" in installed.parts, f"{installed} is not what was installed"
    assert list((installed / "cuda").glob("*.cu")) and list((installed / "runtime" / "cuda" / "devices").glob("*.toml"))
    assert list((installed / "views").glob("*.html")) and (installed / "py.typed").is_file()
    targets = ["numpy", *(["cpu"] if any(Path(sys.prefix).rglob("libdnnl.so*")) else [])]
    if alone:
        _imported(targets) if alone == "import" else _looped()
        return
    losses = [_losses(target) for target in targets]
    for each in losses[1:]:
        np.testing.assert_allclose(each, losses[0], rtol=1e-4)
    for target in targets:
        _losses(target, "bf16")
        _inferred(target)
    _imported(targets)
    _from_the_shell(targets[-1])


if __name__ == "__main__":
    main(*sys.argv[1:])
