"""Whole steps for a card, run on the CPU, beside the NumPy engine's."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import foreplan as fp
from foreplan.frontend.losses import attach_loss
from foreplan.lower.cuda import CudaTarget
from foreplan.planner import separate
from foreplan.runtime import session as sessions
from foreplan.runtime.session import Session
from tests.gpu.binder import needs_gcc
from tests.gpu.engine import ShimEngine

pytestmark = needs_gcc
MODELS = ["mlp:batch=4,width=40,layers=2"]


def compiled(name: str, target: str | CudaTarget) -> fp.Compiled:
    graph = fp.models.build(name)
    graph = attach_loss(graph, fp.models.default_loss(name), [next(iter(graph.outputs))])
    return fp.compile(graph, optimizer=fp.optim.Nesterov(0.01), target=target)


def data_for(step: fp.Compiled) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    given: dict[str, np.ndarray] = {}
    for slot in (slot for slot in step.program.inputs if slot.init is None):
        type = slot.operand.type
        if type.dtype.is_float:
            given[slot.name] = rng.standard_normal(type.shape).astype(type.dtype.numpy)
        else:
            low, high = (slot.valid or (0, 1))[:2]
            given[slot.name] = rng.integers(max(low, 0), high + 1, type.shape)
    return given


def on_the_cpu(monkeypatch: pytest.MonkeyPatch, make: object, reverse: bool = False) -> Session:
    with monkeypatch.context() as patch:
        patch.setattr(sessions, "_engine", lambda target: ShimEngine(reverse))
        assert callable(make)
        found: Session = make()
        return found


@pytest.mark.parametrize("name", MODELS, ids=[name.partition(":")[0] for name in MODELS])
def test_three_steps_give_what_numpy_gives(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses within 1e-4 of NumPy's, and of what is stored, within 1e-3 of how far the steps moved it."""
    reference, step = compiled(name, "numpy"), compiled(name, CudaTarget("h100"))
    data = data_for(reference)
    theirs = reference.bind(seed=1)
    start = {key: array.copy() for key, array in theirs.stored.items()}
    ours = [
        on_the_cpu(monkeypatch, partial(step.bind, seed=1, poison=True)),
        on_the_cpu(monkeypatch, partial(step.bind, seed=1), reverse=True),
        on_the_cpu(monkeypatch, partial(Session, step.program, separate(step.plan, step.program), seed=1)),
    ]
    for _ in range(3):
        wanted = theirs.step(data)
        found = [session.step(data) for session in ours]
        assert wanted.loss is not None and found[0].loss is not None
        assert abs(found[0].loss - wanted.loss) <= 1e-4 * abs(wanted.loss)
        assert all(result.loss == found[0].loss for result in found)
    for key, array in theirs.stored.items():
        moved = np.linalg.norm(array.astype(np.float64) - start[key])
        error = np.linalg.norm(ours[0].stored[key].astype(np.float64) - array)
        assert error <= 1e-3 * moved + 1e-7, key
        assert all(session.stored[key].tobytes() == ours[0].stored[key].tobytes() for session in ours)
