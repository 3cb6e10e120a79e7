"""What can only be seen on a card: kernels, plans of cuDNN's and whole steps. `make gpu-check` runs it."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import foreplan as fp
from foreplan.frontend.losses import attach_loss
from foreplan.gpu import driver, nvrtc
from foreplan.gpu.capture import captured
from foreplan.gpu.table import kernel_named
from foreplan.lower.program import Call
from tests.cpu.test_engine import MODELS, compiled, data_for, farthest, is_near
from tests.gpu import check
from tests.gpu.on_card import CardBound, opened_or_skipped

opened_or_skipped()
pytestmark = pytest.mark.cuda
KINDS = "attention conv expressions index join map matmul multiply norm pool random reduce resize row_norm rows"
MODULES = [importlib.import_module(f"tests.gpu.test_{kind}") for kind in KINDS.split()]
# Every test of them, which are written for kernels that run on the CPU, on the card.
for module in MODULES:
    tests = {name: staticmethod(test) for name, test in vars(module).items() if name.startswith("test_")}
    title = f"Test{module.__name__.rpartition('test_')[2].title().replace('_', '')}"
    globals()[title] = type(title, (), tests)


@pytest.fixture(autouse=True, scope="module")
def on_the_card() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (check, *MODULES):
            if hasattr(module, "Bound"):
                patch.setattr(module, "Bound", CardBound)
        yield


# A target and a precision, and how far results may be from NumPy's, beside their norm.
PRECISIONS = {"float32": ("cuda", 1e-5), "tf32": ("cuda:,tf32", 2e-3), "bf16": ("cuda", 1e-2)}


def convolutions(target: str, precision: str) -> list[Call]:
    """Each kind of convolution, with each plan that cuDNN has for it, of a training step of ResNet-50."""
    graph = fp.models.resnet50(batch=2, size=64)
    step = fp.differentiate(graph, fp.losses.cross_entropy, fp.optim.Nesterov(0.1), precision=precision)
    found = {}
    for call in fp.lower(step, target, workspace="unlimited").calls:  # type: ignore[operator]
        windows = [operand.window for operand in (*call.inputs, *call.outputs)]
        if call.payload:
            found[repr((call.op, call.kernel, windows))] = call
    return list(found.values())


@check.needs_cudnn()
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_plan_of_cudnn_runs(precision: str) -> None:
    """With the workspace that was planned, no more, and nothing written around it."""
    target, tolerance = PRECISIONS[precision]
    rng, calls = np.random.default_rng(0), convolutions(target, "bf16" if precision == "bf16" else "float32")
    assert len(calls) > 60
    for call in calls:
        reads, writes = ([operand.window for operand in found] for found in (call.inputs, call.outputs))
        kernel = kernel_named(call.op, call.kernel, call.payload, reads, writes, captured())
        assert kernel is not None
        inputs = [rng.standard_normal(x.shape).astype(x.type.dtype.numpy) for x in reads]
        wanted = check.expected(call.op, inputs)[0].astype(np.float64)
        places = [check.laid_out(window, x) for window, x in zip(reads, inputs)]
        (result,), workspace = [check.laid_out(y) for y in writes], check.Memory(kernel.workspace, 0xFF)
        CardBound(kernel, [array for _, array in places], [result[1]], workspace.bytes)()
        for memory in (*(memory for memory, _ in places), result[0], workspace):
            memory.check()
        error = np.linalg.norm(result[1].astype(np.float64) - wanted)
        assert error <= tolerance * np.linalg.norm(wanted), f"{call.kernel} of {call.op} on {reads}"


@pytest.mark.parametrize("name", MODELS, ids=[name.partition(":")[0] for name in MODELS])
def test_a_training_step_gives_what_numpy_gives(name: str) -> None:
    reference, step = (compiled(name, target, training=True) for target in ("numpy", "cuda"))
    data = data_for(reference)
    wanted, found = reference.bind(seed=1).step(data).loss, step.bind(seed=1).step(data).loss
    assert wanted is not None and found is not None and abs(found - wanted) <= 1e-4 * abs(wanted)
    assert any(is_near(reference, step, data, seed) for seed in range(1, 6))


@pytest.mark.parametrize("name", MODELS, ids=[name.partition(":")[0] for name in MODELS])
def test_a_step_is_the_same_however_it_runs(name: str) -> None:
    """As one graph, call by call, and with poisoned memory: the same bits, three steps long."""
    step = compiled(name, "cuda", training=True)
    sessions = [step.bind(seed=1), step.bind(seed=1, capture=False), step.bind(seed=1, poison=True)]
    for _ in range(3):
        first, *others = (session.step(data_for(step)).loss for session in sessions)
        assert others == [first, first]
    for key, array in sessions[0].stored.items():
        assert all(session.stored[key].tobytes() == array.tobytes() for session in sessions[1:]), key


@pytest.mark.parametrize(("target", "precision"), [("cuda:,tf32", "float32"), ("cuda", "bf16")])
@pytest.mark.parametrize("name", MODELS[:3], ids=[name.partition(":")[0] for name in MODELS[:3]])
def test_other_precisions_train_alike(name: str, target: str, precision: str) -> None:
    graph = fp.models.build(name)
    graph = attach_loss(graph, fp.models.default_loss(name), [next(iter(graph.outputs))])
    reference = fp.compile(graph, optimizer=fp.optim.Nesterov(0.01))
    step = fp.compile(graph, optimizer=fp.optim.Nesterov(0.01), target=target, precision=precision)
    theirs, ours, data = reference.bind(seed=1), step.bind(seed=1), data_for(reference)
    for _ in range(3):
        wanted, found = theirs.step(data).loss, ours.step(data).loss
        assert wanted is not None and found is not None and abs(found - wanted) <= 3e-2 * abs(wanted)


def test_machine_code_from_a_plan_file_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = compiled(MODELS[0], "cuda", training=True)
    step.save(tmp_path / "step.plan", kernels=True)
    data, wanted = data_for(step), step.bind(seed=1)
    for module in (nvrtc, driver):
        monkeypatch.setattr(module, "cubin", None)
    session = fp.load_plan(tmp_path / "step.plan").bind(seed=1)
    assert session.step(data).loss == wanted.step(data).loss


def test_many_steps_follow_numpy() -> None:
    reference, step = (compiled(MODELS[0], target, training=True) for target in ("numpy", "cuda"))
    theirs, ours, data = reference.bind(seed=1), step.bind(seed=1), data_for(reference)
    start = dict(theirs.stored)
    for _ in range(50):
        wanted, found = theirs.step(data).loss, ours.step(data).loss
    assert wanted is not None and found == pytest.approx(wanted, rel=1e-3)
    assert farthest(ours, theirs, start) <= 1e-2


def test_a_failure_in_a_step_breaks_the_session() -> None:
    """In a process of its own, whose card is lost to it."""
    code = (
        "import foreplan as fp\n"
        "from foreplan.gpu import driver\n"
        "from foreplan.gpu.launch import Launch, Source\n"
        "from tests.cpu.test_engine import MODELS, compiled, data_for\n"
        "session = compiled(MODELS[0], 'cuda', True).bind(capture=False)\n"
        "data = data_for(session)\n"
        "session.step(data)\n"
        "text = 'extern \"C\" __global__ void wild(const long long a) { *reinterpret_cast<int*>(a) = 1; }'\n"
        "wild = Launch(Source('types.cuh', (), text), 'wild', (1, 1, 1), (1, 1, 1), ())\n"
        "session._body.bound.calls.insert(0, driver.card().launching(wild, bytes(8)))\n"
        "for _ in range(2):\n"
        "    try:\n"
        "        session.step(data)\n"
        "    except fp.SessionError as error:\n"
        "        print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    first, second = done.stdout.strip().splitlines()
    assert "llegal" in first and "load the last checkpoint" in first and "load the last checkpoint" in second
