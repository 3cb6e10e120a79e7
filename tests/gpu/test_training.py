"""Whole steps for a card, run on the CPU, beside the NumPy engine's."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

import foreplan as fp
from foreplan.frontend import Tensor, nn, spec, trace
from foreplan.frontend.losses import attach_loss
from foreplan.planner import without_reuse
from foreplan.runtime.cuda.libraries import driver
from foreplan.runtime.session import Session
from tests.cpu.test_engine import data_for, farthest, shake
from tests.gpu.card import FakeCard, OwnTarget
from tests.gpu.compiled import needs_gcc
from tests.profile import cases

pytestmark = needs_gcc
MODELS = ["mlp:batch=4,width=40,layers=2", "conv_chain:size=8"]
DEEP = [
    "resnet18:batch=2,size=48,classes=7",
    "unet:batch=1,size=32,width=8",
    "vit_b16:batch=2,size=32,layers=2,width=48,heads=4,classes=5",
    "gpt2_small:batch=2,seq=16,layers=2,width=32,heads=4,vocabulary=60",
    "bert_base:batch=2,seq=16,layers=2,width=32,heads=4,vocabulary=60",
    "mixer_b16:batch=2,size=32,layers=2,classes=5,width=32,patch=8",
    "ddpm_unet:batch=1,size=8,layers=1,width=8,groups=4",
    "dlrm:batch=8,dense=5,tables=4,rows=20,width=8,hidden=32",
    "efficientnet_b0:batch=4,size=64,classes=5,width=0.25,depth=0.3",
    "convnext_tiny:batch=2,size=64,blocks=1,classes=5,width=16,layer_scale=1.0",
    "swin_t:batch=2,size=24,blocks=1,classes=5,width=16,heads=2,window=3,patch=1",
    "llama:batch=2,seq=16,layers=2,width=32,heads=4,kv_heads=2,features=48,vocabulary=60",
    "t5_small:batch=2,seq=16,decoder_seq=12,layers=1,width=32,heads=4,depth=8,features=48,vocabulary=60",
    "lstm_lm:batch=2,seq=5,width=32,vocabulary=60",
]

NARROW = [MODELS[0], *(name for name in DEEP if name.startswith(("vit", "gpt2", "bert")))]


def compiled(name: str, target: str | OwnTarget, precision: str = "float32", **options: Any) -> fp.Compiled:
    graph = fp.models.build(name)
    graph = attach_loss(graph, fp.models.default_loss(name), [next(iter(graph.outputs))])
    return fp.compile(graph, optimizer=fp.optim.Nesterov(0.01), target=target, precision=precision, **options)


def on_the_cpu(monkeypatch: pytest.MonkeyPatch, make: object, reverse: bool = False) -> Session:
    with monkeypatch.context() as patch:
        patch.setattr(driver, "card", lambda: FakeCard(reverse))
        assert callable(make)
        found: Session = make()
        return found


def cards(monkeypatch: pytest.MonkeyPatch, step: fp.Compiled, seed: int) -> list[Session]:
    """Poisoned; with threads in reverse; and with every value in memory of its own."""
    alone = partial(Session, step.program, without_reuse(step.plan, step.program), seed=seed)
    return [
        on_the_cpu(monkeypatch, partial(step.bind, seed=seed, poison=True)),
        on_the_cpu(monkeypatch, partial(step.bind, seed=seed), reverse=True),
        on_the_cpu(monkeypatch, alone),
    ]


def losses(sessions: list[Session], data: dict[str, np.ndarray]) -> float:
    """One step of each; all give the same bits."""
    first, *others = (session.step(data).loss for session in sessions)
    assert first is not None and all(loss == first for loss in others)
    for key, array in sessions[0].stored.items():
        assert all(session.stored[key].tobytes() == array.tobytes() for session in sessions), key
    return first


def distances(
    monkeypatch: pytest.MonkeyPatch, reference: fp.Compiled, step: fp.Compiled, steps: int, shaken: bool = False
) -> tuple[float, float]:
    """How far what is stored is from NumPy's after some steps, beside how far they moved it; and how far NumPy's is if
    every parameter is moved by a unit in its last place. Each loss has to be within 1e-4.
    """
    data, theirs, ours = data_for(reference), reference.bind(seed=1), cards(monkeypatch, step, 1)
    moved = reference.bind(seed=1)
    if shaken:
        shake(moved)
    start = {key: array.copy() for key, array in theirs.stored.items()}
    for _ in range(steps):
        wanted = theirs.step(data).loss
        assert wanted is not None and abs(losses(ours, data) - wanted) <= 1e-4 * abs(wanted)
        if shaken:
            moved.step(data)
    return farthest(ours[0], theirs, start), farthest(moved, theirs, start)


@pytest.mark.parametrize("name", cases(MODELS, thorough=("conv_chain",)))
def test_three_steps_give_what_numpy_gives(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert distances(monkeypatch, compiled(name, "numpy"), compiled(name, OwnTarget("h100")), 3)[0] <= 1e-3


def test_a_step_that_resizes_gives_what_numpy_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    def model(images: Tensor) -> dict[str, Tensor]:
        x = nn.relu(nn.conv(images, 9, 3, 2, padding=1, name="down"))
        small = nn.conv(nn.resize(x, 3, "cubic"), 9, 1, name="small")
        x = nn.conv(nn.resize(small, 7) + x, 9, 3, padding=1, name="mixed")
        return {"logits": nn.conv(nn.upsample(x), 3, 1, name="out")}

    graph = trace(model, spec((2, 3, 14, 14)), name="resizing")
    reference, step = (
        fp.compile(graph, fp.losses.cross_entropy, fp.optim.Nesterov(0.01), target=target)
        for target in ("numpy", OwnTarget("h100"))
    )
    assert {"resize", "resize_grad"} <= {call.op.name for call in step.program.calls}
    assert distances(monkeypatch, reference, step, 3)[0] <= 1e-3


@pytest.mark.parametrize(("target", "scratch"), [("cuda:h100", True), ("cuda:h100,tf32", False)])
def test_steps_that_multiply_by_cublaslt(target: str, scratch: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every product of a training step, with scratch memory where sums are long if that is allowed."""
    step = compiled(MODELS[0], target, workspace="unlimited" if scratch else 0)
    calls = [step.program.calls[each.action] for each in step.plan.steps]
    kernels = {call.kernel for call in calls if call.op.name == "matmul"}
    assert kernels == ({"cublaslt", "cublaslt 0"} if scratch else {"cublaslt tf32 0"})
    assert distances(monkeypatch, compiled(MODELS[0], "numpy"), step, 3)[0] <= 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", cases(DEEP, thorough={name.partition(":")[0] for name in DEEP} - {"vit_b16", "gpt2_small"})
)
def test_a_step_of_a_deep_network_gives_what_numpy_gives(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within twice what rounding does, and 1e-4."""
    found, shaken = distances(monkeypatch, compiled(name, "numpy"), compiled(name, OwnTarget("h100")), 1, shaken=True)
    assert found <= 2 * shaken + 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", cases(NARROW, thorough=("vit_b16", "bert_base")))
def test_a_step_in_bfloat16_gives_what_numpy_gives(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is rounded the other way is a unit in the last place of bfloat16 away, 2**-8."""
    reference, step = (compiled(name, target, "bf16") for target in ("numpy", OwnTarget("h100")))
    assert distances(monkeypatch, reference, step, 1)[0] <= 1e-2
