"""Whole steps with bfloat16 on the CPU engine: nothing falls back, the same bits however it lies, as near to float32 as
the NumPy engine's.
"""

from __future__ import annotations

import pytest

import foreplan as fp
from foreplan.frontend.losses import attach_loss
from foreplan.lower.fallbacks import fallbacks
from foreplan.planner import without_reuse
from foreplan.runtime.session import Session
from tests.cpu.check import needs_onednn
from tests.cpu.test_engine import MODELS, data_for, farthest, params
from tests.profile import cases

pytestmark = needs_onednn()
STEPS = cases(MODELS, slow=("resnet18",), thorough=("vgg16", "mobilenet_v2", "unet", "bert_base"))


def compiled(name: str, target: str, training: bool, precision: str = "bf16") -> fp.Compiled:
    graph = fp.models.build(name)
    if not training:
        return fp.compile(graph, target=target, precision=precision)
    graph = attach_loss(graph, fp.models.default_loss(name), [next(iter(graph.outputs))])
    return fp.compile(graph, optimizer=fp.optim.Nesterov(0.01), target=target, precision=precision)


@pytest.mark.parametrize(("name", "training", "threads"), params())
def test_nothing_falls_back_and_bits_do_not_depend_on_the_plan(name: str, training: bool, threads: int) -> None:
    step = compiled(name, f"cpu:threads={threads}", training)
    assert not fallbacks(step.program)
    sessions = [step.bind(seed=1), Session(step.program, without_reuse(step.plan, step.program), seed=1)]
    sessions.append(step.bind(seed=1, poison=True))
    data = data_for(step)
    results = [session.step(data) for session in sessions]
    for result, session in zip(results[1:], sessions[1:]):
        assert result.loss == results[0].loss
        assert all(result.outputs[key].tobytes() == array.tobytes() for key, array in results[0].outputs.items())
        assert all(session.stored[key].tobytes() == array.tobytes() for key, array in sessions[0].stored.items())


@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_as_near_to_float32_as_numpys(name: str) -> None:
    """Both engines round as often; in other places, where a network magnifies it: some seed has them alike."""
    steps = [compiled(name, *how) for how in (("numpy", True, "float32"), ("numpy", True), ("cpu:threads=1", True))]
    data = data_for(steps[0])

    def is_near(seed: int) -> bool:
        exact, theirs, ours = (step.bind(seed=seed) for step in steps)
        start = {key: array.copy() for key, array in exact.stored.items()}
        losses = [session.step(data).loss or 0.0 for session in (exact, theirs, ours)]
        assert abs(losses[2] - losses[0]) <= 2 * abs(losses[1] - losses[0]) + 2.0**-7 * abs(losses[0])
        return farthest(ours, exact, start) <= 2 * farthest(theirs, exact, start) + 1e-4

    assert any(map(is_near, range(1, 4)))
