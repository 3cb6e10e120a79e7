"""The CUDA engine with what cuDNN plans: attention by what a plan itself says, convolutions by their NumPy kernels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import pytest

import foreplan as fp
from foreplan.base.errors import PlanError
from foreplan.graph import Window
from foreplan.lower.program import Call, Program
from foreplan.ops.attention.blocks import AttentionOp
from foreplan.ops.attention.packed import PackedAttentionGrad
from foreplan.runtime.cuda import table
from foreplan.runtime.cuda.kernels.cudnn_conv import CUDNN, WORD, _as_cudnn_makes_it, _as_cudnn_reads_it
from foreplan.runtime.cuda.libraries import driver
from foreplan.runtime.cuda.libraries.cudnn import ADDING
from foreplan.runtime.cuda.memory import span_of
from tests.cpu.test_engine import farthest
from tests.gpu.binder import convolved
from tests.gpu.card import FakeCard
from tests.gpu.check import needs_cudnn
from tests.gpu.compiled import needs_gcc
from tests.gpu.cudnn_graph import execute, memory_at
from tests.runtime.micro_batches import compiled as trained
from tests.runtime.micro_batches import data_for

pytestmark = [pytest.mark.cuda_wheels, needs_cudnn(), needs_gcc]


def array_at(address: int, window: Window) -> np.ndarray:
    """A tensor whose first element lies there."""
    nbytes, low = span_of(window)
    memory = np.ndarray(nbytes, np.uint8, (np.ctypeslib.ctypes.c_char * nbytes).from_address(address - low))
    return np.ndarray(window.shape, window.type.dtype.numpy, memory, low, window.strides)


def stand_in(card: FakeCard, program: Program) -> int:
    """Have the card run what cuDNN planned for a program; returns how many plans there are."""

    def attention_of(call: Call, needed: int) -> None:
        blob = call.payload[WORD:]

        def run(tensors: Mapping[int, int], workspace: int) -> None:
            assert workspace % 256 == 0 and all(address % 16 == 0 for address in tensors.values())
            (np.ctypeslib.ctypes.c_char * needed).from_address(workspace).raw = b"\xff" * needed
            execute(blob, memory_at(blob, tensors))

        card.plans[blob] = needed, run

    def plan_of(call: Call, needed: int) -> None:
        inputs, outputs = ([operand.window for operand in found] for found in (call.inputs[:2], call.outputs))
        inputs = [inputs[0], _as_cudnn_reads_it(call.op, inputs)]
        windows = [*inputs, _as_cudnn_makes_it(inputs, outputs)]

        def run(tensors: Mapping[int, int], workspace: int) -> None:
            assert workspace % 16 == 0 and all(address % 16 == 0 for address in tensors.values())
            a, b, y = (array_at(tensors[uid], window) for uid, window in zip((1, 2, 3), windows))
            result = convolved(call.op, a, b, y if ADDING in call.payload else None)
            (np.ctypeslib.ctypes.c_char * needed).from_address(workspace).raw = b"\xff" * needed
            y[...] = result

        card.plans[call.payload[WORD:]] = needed, run

    for call in program.calls:
        if call.payload:
            make = attention_of if isinstance(call.op, AttentionOp | PackedAttentionGrad) else plan_of
            make(call, int.from_bytes(call.payload[:WORD], "little"))
    return len(card.plans)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCard]:
    """A card on which kernels of ours are slow: with so little to do, cuDNN's would not be chosen."""
    made = FakeCard()
    monkeypatch.setattr(driver, "card", lambda: made)
    slow = {
        name: replace(family, own_price=lambda *_: 10**9)
        for name, family in table.FAMILIES.items()
        if any(library.name == CUDNN for library in family.libraries)
    }
    monkeypatch.setattr(table, "FAMILIES", {**table.FAMILIES, **slow})
    table._ways.cache_clear()
    yield made
    table._ways.cache_clear()


def compiled(target: str, precision: str = "float32") -> fp.Compiled:
    def model(x: fp.frontend.Tensor) -> fp.frontend.Tensor:
        x = fp.nn.relu(fp.nn.conv(x, 16, 3, stride=2, padding=1, name="first"))
        x = fp.nn.relu(fp.nn.conv(x, 16, 3, padding=1, name="second") + x)
        return fp.nn.linear(fp.nn.flatten(x), 5, name="head")

    return trained(fp.trace(model, fp.spec((2, 8, 14, 14))), target=target, precision=precision)


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("poison", [False, True])
def test_plans_of_cudnn_get_their_tensors_and_workspace(card: FakeCard, precision: str, poison: bool) -> None:
    reference, step = compiled("numpy", precision), compiled("cuda:h100", precision)
    assert stand_in(card, step.program) >= 3
    used = [step.program.calls[each.action] for each in step.plan.steps]
    assert sum(bool(call.payload) for call in used) >= 3
    theirs, ours = reference.bind(seed=1), step.bind(seed=1, poison=poison)
    start, data = dict(theirs.stored), data_for(reference, 0)
    first = 0.0
    for _ in range(3):
        wanted, found = theirs.step(data).loss, ours.step(data).loss
        assert wanted is not None and found is not None
        first = first or wanted  # what rounding does to later losses, which are far smaller, is in proportion to it
        assert abs(found - wanted) <= (1e-4 * wanted if precision == "float32" else 1e-2 * first)
    if precision == "float32":
        assert farthest(ours, theirs, start) <= 1e-3


def test_a_plan_that_needs_more_workspace_than_it_said(card: FakeCard) -> None:
    step = compiled("cuda:h100")
    stand_in(card, step.program)
    for blob, (needed, run) in card.plans.items():
        card.plans[blob] = needed + 1, run
    with pytest.raises(PlanError, match="workspace"):
        step.bind()


@pytest.mark.slow
def test_attention_by_cudnn_reads_and_writes_where_tensors_lie(card: FakeCard) -> None:
    """Queries, keys and values are parts of one tensor; a training step as NumPy's."""
    reference, step = (
        trained(
            fp.models.gpt2_small(batch=2, seq=24, layers=2, width=32, heads=2, vocabulary=50),
            target=target,
            precision="bf16",
        )
        for target in ("numpy", "cuda:h100")
    )
    assert stand_in(card, step.program) >= 2
    used = [step.program.calls[each.action] for each in step.plan.steps]
    assert {call.op.name for call in used if call.payload} == {"attention", "packed_attention_grad"}
    theirs, ours, data = reference.bind(seed=1), step.bind(seed=1, poison=True), data_for(reference, 0)
    for _ in range(3):
        wanted, found = theirs.step(data).loss, ours.step(data).loss
        assert wanted is not None and found == pytest.approx(wanted, rel=2e-2)
