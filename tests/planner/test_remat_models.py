"""Zoo models that recompute give the bits of those that do not, and of runs in which no byte is used twice."""

from __future__ import annotations

import numpy as np
import pytest

import foreplan as fp
from foreplan.frontend import Tensor, nn, spec, trace
from foreplan.graph import Graph
from foreplan.planner import Plan, plan_curve, verify, without_reuse
from foreplan.planner.placement.layout import assemble, lay_out, schedule
from foreplan.planner.recompute.arrays import DISCARD, KEEP, make_gaps
from foreplan.planner.recompute.kernels import generate, make_scratch
from foreplan.planner.recompute.schedules import late_updates
from foreplan.runtime.session import Session
from tests.profile import SHORT, cases, searching_by

pytestmark = pytest.mark.whole_search

STEPS = 2
SMALL = [
    "mlp:batch=16,width=16,layers=3",
    "resnet18:batch=2,size=32,classes=7",
    "mobilenet_v2:batch=2,size=32,classes=5",
    "unet:batch=1,size=32,width=8",
    "vit_b16:batch=2,size=32,layers=2,classes=5,width=48,heads=4",
    "gpt2_small:batch=2,seq=12,layers=2",
]
CASES = cases(SMALL, slow=("vit_b16",), thorough=("resnet18", "mobilenet_v2", "gpt2_small"))


def dropped_out() -> Graph:
    """Layers with dropout, whose masks are drawn again rather than kept."""

    def model(x: Tensor) -> dict[str, Tensor]:
        for i in range(4):
            x = nn.dropout(nn.relu(nn.linear(x, 64, name=f"l{i}")), 0.3)
        return {"logits": nn.linear(x, 5, name="head")}

    return trace(model, spec((32, 64)), name="dropped_out")


def data_for(step: fp.Compiled) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    given: dict[str, np.ndarray] = {}
    for slot in step.program.inputs:
        type = slot.operand.type
        if slot.init is None and type.dtype.is_float:
            given[slot.name] = rng.normal(size=type.shape).astype(type.dtype.numpy)
        elif slot.init is None:
            low, high = (slot.valid or (0, 1))[:2]
            given[slot.name] = rng.integers(max(low, 0), high + 1, type.shape)
    return given


def bits(session: Session, data: dict[str, np.ndarray]) -> dict[str, bytes]:
    """Losses of some steps, and what is stored after them."""
    losses = np.array([session.step(data).loss for _ in range(STEPS)])
    return {"losses": losses.tobytes()} | {name: array.tobytes() for name, array in dict(session.stored).items()}


def dropping(step: fp.Compiled, seed: int) -> Plan:
    """A plan that drops and recomputes at random, far more than any budget would ask for."""
    program, rng = step.program, np.random.default_rng(seed)
    order = late_updates(program, [run.action for run in step.plan.steps])
    gaps = make_gaps(program, order, [1] * len(program.actions), 1)
    scratch = make_scratch(gaps)
    state = np.zeros(len(gaps.gap_value), np.int64)
    state[gaps.gap_last == len(order)] = DISCARD
    for gap in rng.permutation(len(state))[:400]:
        old, state[gap] = state[gap], rng.integers(KEEP, DISCARD + 1)
        if generate(gaps, scratch, state)[0] < 0:  # something it needs has been updated by then
            state[gap] = old
    length, _ = generate(gaps, scratch, state)
    assert length > 1.1 * len(order)
    chosen = schedule(program, "at random", scratch.counting.steps[:length].tolist())
    found = assemble(program, chosen, lay_out(program, chosen), None)
    verify(found, program)
    return found


def check(graph: Graph, loss: object) -> None:
    with searching_by(SHORT):
        step = fp.compile(graph, loss=loss, optimizer=fp.optim.AdamW(0.01), remat="off")
    data = data_for(step)
    expected = bits(step.bind(seed=3), data)
    found = dropping(step, 0)
    assert bits(Session(step.program, found, seed=3), data) == expected
    assert bits(Session(step.program, without_reuse(found, step.program), seed=3), data) == expected


@pytest.mark.parametrize("name", CASES)
def test_recomputing_changes_no_bit(name: str) -> None:
    check(fp.models.build(name), getattr(fp.losses, fp.models.default_loss(name)))


def test_masks_drawn_again_are_the_same() -> None:
    check(dropped_out(), fp.losses.cross_entropy)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["conv_chain:batch=2", pytest.param("gpt2_small:layers=4", marks=pytest.mark.thorough)],
)
def test_of_fifty_budgets_a_smaller_one_never_gives_a_larger_or_a_faster_plan(name: str) -> None:
    graph = fp.models.build(name)
    loss = getattr(fp.losses, fp.models.default_loss(name))
    program = fp.lower(fp.differentiate(graph, loss, fp.optim.Nesterov(0.1)))
    curve = plan_curve(program, thorough=False)
    arena, time = curve.plan(0).arena_bytes, 0
    least = min(curve.plan(index).arena_bytes for index in range(len(curve)))
    for budget in np.linspace(arena, 0.98 * least, 50).astype(int).tolist():
        try:
            found = curve.within(budget)
        except fp.DoesNotFitError as error:
            assert budget < least == error.needed
            continue
        assert found.arena_bytes <= min(budget, arena)
        arena, before = found.arena_bytes, time
        time = sum(program.actions[step.action].nanoseconds for step in found.steps)
        assert time >= before
    assert arena < 0.9 * curve.plan(0).arena_bytes


def test_a_budget_through_the_front_door() -> None:
    graph = fp.models.build("resnet18:batch=32,size=64,classes=7")
    whole = fp.compile(graph, loss=fp.losses.cross_entropy, optimizer=fp.optim.Nesterov(0.1), remat="off").estimate()
    assert whole["extra_flops_ratio"] == whole["extra_seconds_ratio"] == 0
    budget = whole["arena_bytes"] - (whole["arena_bytes"] - whole["persistent_bytes"]) // 3
    with searching_by(SHORT):
        step = fp.compile(graph, loss=fp.losses.cross_entropy, optimizer=fp.optim.Nesterov(0.1), budget=budget)
    figures = step.estimate()
    assert figures["arena_bytes"] <= budget == figures["budget_bytes"]
    assert 0 < figures["extra_seconds_ratio"] < 0.3 and 0 < figures["extra_flops_ratio"] < 0.3
    assert figures["predicted_seconds"] == pytest.approx(
        whole["predicted_seconds"] * (1 + figures["extra_seconds_ratio"]), rel=1e-9
    )
    assert figures["flops"] == pytest.approx(whole["flops"] * (1 + figures["extra_flops_ratio"]), rel=1e-12)
