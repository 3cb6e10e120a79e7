"""What can only be seen on a card: kernels, plans of cuDNN's and whole steps. `make gpu-check` runs it."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

import foreplan as fp
from foreplan.frontend.losses import attach_loss
from foreplan.graph import Window
from foreplan.graph.op import Windows
from foreplan.graph.types import DTYPES
from foreplan.lower.program import Call
from foreplan.ops.attention.gradient import AttentionGrad
from foreplan.ops.attention.ops import Attention
from foreplan.runtime.cuda.launch import Arithmetic, LaunchKernel
from foreplan.runtime.cuda.libraries import driver, nvrtc
from foreplan.runtime.cuda.libraries.capture import captured
from foreplan.runtime.cuda.libraries.cudnn_sdpa import LEAST_COMPUTE
from foreplan.runtime.cuda.table import kernel_named, kernels_for
from tests.cpu.test_engine import MODELS, compiled, data_for, farthest, is_near
from tests.engines.engine import Engine, with_engines
from tests.gpu import check
from tests.gpu.on_card import CardBound, opened_or_skipped
from tests.kernels import attention_operands
from tests.ops.check import type_of
from tests.profile import cases
from tests.sweep.case import parse_case
from tests.sweep.judges import JUDGES, judge_draws, step
from tests.sweep.table import ENTRIES

opened_or_skipped()
pytestmark = pytest.mark.cuda
KINDS = "attention conv depthwise index join linear_cross_entropy lines map matmul multiply norm other_types pool"
KINDS += " random reduce resize rows"
MODULES = [importlib.import_module(f"tests.gpu.test_{kind}") for kind in KINDS.split()]
ENGINES_FOLDER = Path(__file__).parents[1] / "engines"  # whose tests every engine's kernels run
SHARED = [importlib.import_module(f"tests.engines.{path.stem}") for path in sorted(ENGINES_FOLDER.glob("test_*.py"))]
# Every test of them, which are written for kernels that run on the CPU, on the card.
for module in (*MODULES, *SHARED):
    tests = {name: staticmethod(test) for name, test in vars(module).items() if name.startswith("test_")}
    title = f"Test{'Every' * (module in SHARED)}{module.__name__.rpartition('test_')[2].title().replace('_', '')}"
    globals()[title] = type(title, (), tests)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The one engine whose kernels run on the card."""
    with_engines(metafunc, ("cuda",))


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> Engine:
    """As a test is given it."""
    return request.param


@pytest.fixture(autouse=True, scope="module")
def on_the_card() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (check, *MODULES):
            if hasattr(module, "Bound"):
                patch.setattr(module, "Bound", CardBound)
        yield


@pytest.mark.parametrize("name", [name for name, entry in ENTRIES.items() if JUDGES["card"].serves(entry, name)])
def test_drawn_cases(name: str) -> None:
    judge_draws("card", name, 20)


FOUND = sorted((Path(__file__).parents[1] / "sweep" / "found").glob("card-*.txt"))


@pytest.mark.parametrize("path", FOUND, ids=lambda path: path.stem)
def test_what_once_failed(path: Path) -> None:
    JUDGES["card"].judge(parse_case(path.read_text()))


@pytest.mark.parametrize("number", range(20))
def test_drawn_steps(number: int) -> None:
    step.judge(f"card 0 {number}", ("cuda",))


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
    assert len(calls) > 50
    for call in calls:
        reads, writes = ([operand.window for operand in found] for found in (call.inputs, call.outputs))
        kernel = kernel_named(call.op, call.kernel, call.payload, reads, writes, captured())
        assert kernel is not None
        inputs = [rng.standard_normal(x.shape).astype(x.type.dtype.numpy) for x in reads]
        (result,), (wanted,) = run(kernel, reads, writes, inputs), check.expected(call.op, inputs)
        assert distance(result, wanted) <= tolerance, f"{call.kernel} of {call.op} on {reads}"


def run(kernel: LaunchKernel, reads: Windows, writes: Windows, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """What a kernel gives, with poisoned memory, around which nothing may be written."""
    places = [check.laid_out(window, x) for window, x in zip(reads, inputs)]
    results, workspace = [check.laid_out(y) for y in writes], check.Memory(kernel.workspace, 0xFF)
    CardBound(kernel, [array for _, array in places], [array for _, array in results], workspace.bytes)()
    for memory in (*(memory for memory, _ in (*places, *results)), workspace):
        memory.check()
    return [array for _, array in results]


def distance(found: np.ndarray, wanted: np.ndarray) -> float:
    """Beside the norm of what is wanted."""
    wanted = wanted.astype(np.float64)
    return float(np.linalg.norm(found.astype(np.float64) - wanted) / np.linalg.norm(wanted))


# Batch, query heads, key heads, queries, keys, depth, value depth; whether causal, whether heads come last; the type;
# and the shape of a mask.
ATTENTIONS: dict[str, tuple[tuple[int, ...], bool, bool, str, tuple[int, ...]]] = {
    "gpt2": ((2, 12, 12, 512, 512, 64, 64), True, True, "bfloat16", ()),
    "grouped": ((2, 8, 2, 256, 256, 128, 128), True, False, "float16", ()),
    "odd": ((3, 4, 2, 77, 200, 32, 32), False, True, "bfloat16", ()),
    "more queries than keys": ((1, 2, 2, 200, 77, 64, 64), True, True, "bfloat16", ()),
    "padded": ((3, 12, 12, 384, 384, 64, 64), False, True, "bfloat16", (3, 1, 1, 384)),
    "padded and causal": ((2, 4, 4, 256, 256, 64, 64), True, True, "float16", (2, 4, 256, 256)),
}


@check.needs_cudnn()
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("case", ATTENTIONS)
def test_every_plan_of_attention_runs(case: str, deterministic: bool) -> None:
    """Results as NumPy's, the log-sum-exp among them; where asked for, the same bits again."""
    sizes, causal, heads_last, name, masked = ATTENTIONS[case]
    device, dtype = captured(), DTYPES[name]
    if device.compute < LEAST_COMPUTE:
        pytest.skip(f"needs a card from compute capability {LEAST_COMPUTE / 10} on, for cuDNN's attention")
    rng, op = np.random.default_rng(0), Attention(sizes[5] ** -0.5, causal, heads_last)
    given = [x.astype(dtype.numpy) for x in attention_operands(rng, sizes, heads_last)]
    if masked:  # a third of the keys is hidden, and all of the last item's
        mask = np.where(rng.random(masked) < 0.3, -np.inf, rng.standard_normal(masked)).astype(np.float32)
        mask[-1] = -np.inf
        given.append(mask)
    o, log_sums = check.expected(op, given)
    g = rng.standard_normal(o.shape).astype(dtype.numpy)
    gradient = AttentionGrad(op.scale, causal, heads_last)
    for each, inputs in ((op, given), (gradient, [*given[:3], o, log_sums, g, *given[3:]])):
        wanted = check.expected(each, inputs)
        reads, writes = ([Window.dense(type_of(x)) for x in arrays] for arrays in (inputs, wanted))
        kernels = kernels_for(each, reads, writes, device, Arithmetic(deterministic=deterministic))
        theirs = {kernel: made for kernel, made in kernels.items() if made.payload}
        assert theirs
        for kernel, made in theirs.items():
            found = run(made, reads, writes, inputs)
            for result, known in zip(found, wanted, strict=True):
                tolerance = 1e-3 if known.dtype == np.float32 else 2e-2
                assert distance(result, known) <= tolerance, f"{kernel} of {each} on {reads}"
            if deterministic:
                again = run(made, reads, writes, inputs)
                assert all(x.tobytes() == y.tobytes() for x, y in zip(found, again, strict=True)), kernel


@pytest.mark.parametrize("name", cases(MODELS))
def test_a_training_step_gives_what_numpy_gives(name: str) -> None:
    reference, step = (compiled(name, target, training=True) for target in ("numpy", "cuda"))
    data = data_for(reference)
    wanted, found = reference.bind(seed=1).step(data).loss, step.bind(seed=1).step(data).loss
    assert wanted is not None and found is not None and abs(found - wanted) <= 1e-4 * abs(wanted)
    assert any(is_near(reference, step, data, seed) for seed in range(1, 6))


@pytest.mark.parametrize("name", cases(MODELS))
def test_a_step_is_the_same_however_it_runs(name: str) -> None:
    """As one graph, call by call, and with poisoned memory: the same bits, three steps long."""
    step = compiled(name, "cuda", training=True)
    sessions = [step.bind(seed=1), step.bind(seed=1, capture=False), step.bind(seed=1, poison=True)]
    for _ in range(3):
        first, *others = (session.step(data_for(step)).loss for session in sessions)
        assert others == [first, first]
    for key, array in sessions[0].stored.items():
        assert all(session.stored[key].tobytes() == array.tobytes() for session in sessions[1:]), key


IN_OTHERS = [*MODELS[:3], "gpt2_small:batch=2,seq=256,layers=2,width=128,heads=2,vocabulary=200"]


@pytest.mark.parametrize(("target", "precision"), [("cuda:,tf32", "float32"), ("cuda", "bf16")])
@pytest.mark.parametrize("name", cases(IN_OTHERS))
def test_other_precisions_train_alike(name: str, target: str, precision: str) -> None:
    graph = fp.models.build(name)
    graph = attach_loss(graph, fp.models.default_loss(name), [next(iter(graph.outputs))])
    others = [("numpy", "float32"), ("numpy", "bf16"), (target, precision)]
    steps = [fp.compile(graph, optimizer=fp.optim.Nesterov(0.01), target=of, precision=how) for of, how in others]
    sessions, data = [step.bind(seed=1) for step in steps], data_for(steps[0])
    moved = 0.0  # most that rounding to bfloat16 has done to the loss, with NumPy: what it does may cross zero
    for number in range(3):
        wanted, rounded, found = (session.step(data).loss for session in sessions)
        assert wanted is not None and rounded is not None and found is not None
        # It grows from step to step (to a tenth of it in some models): as little at first, and then no more than a few
        # times that.
        moved = max(moved, abs(rounded - wanted)) if number else 0.0
        assert abs(found - wanted) <= 3e-2 * abs(wanted) + 3 * moved


def test_machine_code_from_a_plan_file_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = compiled(MODELS[0], "cuda", training=True)
    step.save(tmp_path / "step.plan", kernels=True)
    data, wanted = data_for(step), step.bind(seed=1)
    for module in (nvrtc, driver):
        monkeypatch.setattr(module, "cubin", None)
    session = fp.load_plan(tmp_path / "step.plan", trust_code=True).bind(seed=1)
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
        "from foreplan.runtime.cuda.libraries import driver\n"
        "from foreplan.runtime.cuda.launch import Launch, Source\n"
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
    assert not done.returncode, done.stderr
    first, second = done.stdout.strip().splitlines()
    assert "llegal" in first and "load the last checkpoint" in first and "load the last checkpoint" in second
