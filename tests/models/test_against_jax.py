"""Zoo models of every kind at small size: loss and gradients against jax.grad, and bits against the unplanned run."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

import foreplan as fp
from foreplan import passes
from foreplan.frontend.losses import attach_loss
from foreplan.graph import Graph, parse_graph
from foreplan.passes.rewrite import with_values
from foreplan.planner import without_reuse
from foreplan.runtime.session import Session
from tests.oracle.jax_graph import loss_and_gradients
from tests.profile import cases

SMALL = [
    "conv_chain:batch=2,size=12",
    "mlp:batch=6,width=16,layers=2",
    "resnet18:batch=2,size=32,classes=7",
    "vgg16:batch=1,size=32,classes=5",
    "mobilenet_v2:batch=2,size=32,classes=5",
    "unet:batch=1,size=32",
    "gpt2_small:batch=2,seq=12,layers=2,width=32,heads=4,vocabulary=60",
    "bert_base:batch=2,seq=10,layers=1,width=32,heads=4,vocabulary=60",
    "vit_b16:batch=2,size=32,layers=1,width=48,heads=4,classes=5",
    "mixer_b16:batch=2,size=32,layers=2,classes=5,width=32,patch=8",
    "ddpm_unet:batch=2,size=16,layers=1,width=8,groups=4",
    "dlrm:batch=4,dense=5,tables=4,rows=20,width=8,hidden=16",
    "efficientnet_b0:batch=2,size=64,classes=5,width=0.25,depth=0.3",
    "convnext_tiny:batch=2,size=64,blocks=1,classes=5,width=8",
    "swin_t:batch=2,size=21,blocks=1,classes=5,width=8,heads=1,window=3,patch=1",
    # Text carries constants of at most 64 numbers: those of rotary embedding and of the buckets of positions.
    "llama:batch=2,seq=8,layers=2,width=32,heads=4,kv_heads=2,features=48,vocabulary=60",
    "t5_small:batch=2,seq=8,decoder_seq=6,layers=1,width=32,heads=4,depth=8,features=48,vocabulary=60",
    "lstm_lm:batch=2,seq=3,width=16,vocabulary=60",
]
QUICK = ("conv_chain", "mlp", "gpt2_small", "vit_b16", "dlrm", "lstm_lm")
LARGE = {name.partition(":")[0] for name in SMALL} - set(QUICK)
CASES = cases(SMALL, thorough=LARGE)


def model(name: str) -> tuple[Graph, object]:
    return fp.models.build(name), getattr(fp.losses, fp.models.default_loss(name))


@cache
def trained(name: str) -> fp.Compiled:
    graph, loss = model(name)
    return fp.compile(graph, loss=loss, optimizer=fp.optim.Nesterov(0.01))


def in_float64(graph: Graph) -> Graph:
    """The same by its text, which does not carry large constants: they are put back."""
    text = re.sub(r"array\(crc32=\w+\)", "fill(0.0)", graph.as_text())
    wide, inits = parse_graph(text.replace("float32", "float64")), {value.name: value.init for value in graph.stored}
    return with_values(wide, {value: replace(value, init=inits[value.name]) for value in wide.stored})


def data_for(step: fp.Compiled, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    given: dict[str, np.ndarray] = {}
    for slot in step.program.inputs:
        type = slot.operand.type
        if slot.init is not None:
            continue
        if type.dtype.is_float:
            given[slot.name] = rng.normal(size=type.shape).astype(type.dtype.numpy)
        else:
            low, high = (slot.valid or (0, 1))[:2]
            given[slot.name] = rng.integers(max(low, 0), high + 1, type.shape)
    return given


def randomised(session: Session) -> dict[str, np.ndarray]:
    """Parameters that leave no path dead: biases and scales too."""
    rng = np.random.default_rng(7)
    for name in session.parameters:
        old = session.parameters[name]
        session.parameters[name] = old + rng.normal(size=old.shape).astype(old.dtype) * (0.02 + 0.1 * np.abs(old))
    return dict(session.stored)


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_equal_jax(name: str) -> None:
    """In float64, so that what differs is a mistake and not rounding that batch norm has blown up."""
    graph, loss = model(name)
    graph = in_float64(graph)
    step = fp.compile(graph, loss=loss)
    session = step.bind()
    stored = randomised(session)
    data = data_for(step)
    result = session.step(data)
    forward = passes.training_form(passes.SelectOutputs([])(attach_loss(graph, loss)))
    constants = {v.name: _content(v) for v in forward.stored}
    expected, gradients = loss_and_gradients(forward, data, {**constants, **stored})
    assert result.loss == pytest.approx(expected, rel=1e-9)
    assert set(result.gradients) == set(gradients)
    largest = max(np.abs(gradient).max() for gradient in gradients.values())
    for parameter, gradient in gradients.items():
        # A bias in front of a batch norm has no gradient but rounding, which is judged beside the model's others.
        scale = max(np.abs(gradient).max(), 1e-5 * largest)
        error = np.abs(result.gradients[parameter] - gradient).max()
        assert error < 1e-7 * scale, f"{parameter}: error {error:g}, size {scale:g}"


def _content(value: object) -> np.ndarray:
    array = np.empty(value.shape, value.dtype.numpy)  # type: ignore[attr-defined]
    value.init.fill(array, np.random.default_rng(0))  # type: ignore[attr-defined]
    return array


@pytest.mark.parametrize("name", CASES)
def test_planned_equals_unplanned_bit_for_bit_and_poison_changes_nothing(name: str) -> None:
    step = trained(name)
    apart = without_reuse(step.plan, step.program)
    sessions = [step.bind(), Session(step.program, apart), step.bind(poison=True)]
    for seed in range(2):
        losses = {session.step(data_for(step, seed)).loss for session in sessions}
        assert len(losses) == 1
    for parameter in sessions[0].stored:
        contents = {session.stored[parameter].tobytes() for session in sessions}
        assert len(contents) == 1, parameter


@pytest.mark.parametrize("name", CASES)
def test_the_arena_is_within_two_percent_of_the_bound(name: str) -> None:
    for step in (fp.compile(fp.models.build(name)), trained(name)):
        assert step.plan.arena_bytes <= 1.02 * step.plan.lower_bound_bytes
