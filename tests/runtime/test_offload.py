"""Steps that copy activations to the host and back: the bits of those that do not, in the bytes that were planned."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

import foreplan as fp
from foreplan.base.errors import DoesNotFitError, PlanError, UsageError
from foreplan.compiler.compiled import load_plan
from foreplan.frontend.losses import attach_loss
from foreplan.graph import Graph
from foreplan.lower.program import ARENA, HOST
from foreplan.planner import Category, Plan, without_reuse
from foreplan.runtime.session import Session
from foreplan.views.diff import diff
from tests.cli.shell import foreplan

GPT2 = "gpt2_small:batch=8,seq=64,layers=3,width=32,heads=4,vocabulary=100"
RESNET = "resnet18:batch=16,size=96,classes=7"
MODELS = [
    pytest.param(GPT2, 0.7, id="gpt2"),
    pytest.param(RESNET, 0.85, id="resnet18", marks=pytest.mark.thorough),
]
STEPS = 2


def model(name: str) -> Graph:
    graph = fp.models.build(name)
    return attach_loss(graph, fp.models.default_loss(name), [next(iter(graph.outputs))])


def compiled(name: str, **options: object) -> fp.Compiled:
    """Without parts, which would serve instead of copies."""
    return fp.compile(model(name), optimizer=fp.optim.AdamW(0.01), fission="off", **options)  # type: ignore[arg-type]


def copies(step: fp.Compiled, plan: Plan | None = None) -> int:
    return sum(s.action in step.program.copies for s in (plan or step.plan).steps)


def data_for(step: fp.Compiled) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    count = () if step.accumulate == 1 else (step.accumulate,)
    given: dict[str, np.ndarray] = {}
    for slot in step.program.inputs:
        type = slot.operand.type
        if slot.init is None and type.dtype.is_float:
            given[slot.name] = rng.normal(size=(*count, *type.shape)).astype(type.dtype.numpy)
        elif slot.init is None:
            low, high = (slot.valid or (0, 1))[:2]
            given[slot.name] = rng.integers(max(low, 0), high + 1, (*count, *type.shape))
    return given


def bits(sessions: Iterable[Session], data: dict[str, np.ndarray]) -> list[dict[str, bytes]]:
    """Losses of some steps, and what is stored after them, of each session."""
    found = []
    for session in sessions:
        losses = np.array([session.step(data).loss for _ in range(STEPS)])
        found.append({"losses": losses.tobytes()} | {k: array.tobytes() for k, array in dict(session.stored).items()})
    return found


@pytest.mark.parametrize(("name", "share"), MODELS)
def test_copies_change_no_bit(name: str, share: float) -> None:
    plain = compiled(name, remat="off")
    # Only copies bring it down so far: nothing may be recomputed.
    step = compiled(name, offload=True, budget=share, remat="off")
    assert copies(step) >= 4 and step.arena_bytes <= plain.arena_bytes * share
    apart = Session(step.program, without_reuse(step.plan, step.program))
    sessions = [plain.bind(), step.bind(), step.bind(poison=True), apart]
    first, *others = bits(sessions, data_for(step))
    assert all(other == first for other in others)


@pytest.mark.parametrize(("name", "share"), MODELS)
def test_what_was_planned_is_what_is_allocated(name: str, share: float) -> None:
    step = compiled(name, offload=True, budget=share, remat="off")
    session = step.bind()
    assert session.allocated_bytes == step.arena_bytes == step.memory.arena == sum(step.plan.heights[:HOST])
    assert session.host_bytes == step.host_bytes == step.memory.host == step.plan.heights[HOST] > 0
    assert step.estimate()["host_bytes"] == step.memory.as_json()["host_bytes"] == step.host_bytes
    assert len(session.regions[HOST]) == step.host_bytes
    assert not np.shares_memory(session.regions[HOST], session.regions[ARENA])
    assert f"{step.host_bytes:,} bytes   host memory" in str(step.memory)
    assert step.plan.budget is not None and step.estimate()["extra_seconds_ratio"] > 0


def test_there_is_a_way_to_the_host_for_what_the_backward_pass_reads_and_nothing_else() -> None:
    program = compiled(GPT2, offload=True).program
    plain = compiled(GPT2).program
    assert (
        program.actions[: len(plain.actions)] == plain.actions and program.values[: len(plain.values)] == plain.values
    )
    assert program.round_trips
    for v, (out, back) in program.round_trips.items():
        value, host = program.values[v], program.values[program.actions[out].writes[0]]
        assert value.nbytes == host.nbytes >= 1 << 16 and host.region == HOST
        # 5 GB a second, and a copy computes nothing.
        assert [program.actions[i].nanoseconds for i in (out, back)] == [value.nbytes // 5] * 2
        assert [program.actions[i].flops for i in (out, back)] == [0, 0]
        names = [program.actions[i].name for i in (out, back)]
        assert names == [f"{value.name}/offload", f"{value.name}/fetch"]
        gradients = [i for i in program.readers[v] if i != out and reaches_gradient(program, i)]
        assert gradients and value.category is not Category.GRADIENTS


def reaches_gradient(program: fp.Program, action: int) -> bool:
    values = program.values
    touched = (*program.actions[action].reads, *program.actions[action].writes)
    return any(values[v].category is Category.GRADIENTS for v in touched)


@pytest.mark.thorough
def test_copies_never_cost_more_than_recomputation_alone_and_come_down_further() -> None:
    deep = GPT2.replace("layers=3", "layers=6").replace("batch=8", "batch=32")
    alone = fp.planner.plan_curve(compiled(deep).program).points
    both = fp.planner.plan_curve(compiled(deep, offload=True).program).points
    assert both[-1].bound < alone[-1].bound
    least = [min(p.cost for p in both if p.bound <= point.bound) for point in alone]
    assert all(cost <= point.cost for cost, point in zip(least, alone))
    assert any(cost < point.cost * 3 // 4 for cost, point in zip(least, alone))


def test_micro_batches(tmp_path: Path) -> None:
    plain = compiled(GPT2, accumulate=2, remat="off")
    step = compiled(GPT2, accumulate=2, offload=True, budget=plain.arena_bytes * 8 // 10, remat="off")
    assert copies(step) >= 2 and step.arena_bytes <= plain.arena_bytes * 8 // 10
    session = step.bind()
    assert session.allocated_bytes == step.arena_bytes and session.host_bytes == step.host_bytes > 0
    step.save(tmp_path / "step.plan")
    again = load_plan(tmp_path / "step.plan")
    sessions = [plain.bind(), session, step.bind(poison=True), again.bind()]
    first, *others = bits(sessions, data_for(step))
    assert all(other == first for other in others)


def test_a_plan_file_has_the_copies_and_the_host_region(tmp_path: Path) -> None:
    step = compiled(GPT2, offload=True, budget=0.7, remat="off")
    step.save(tmp_path / "step.plan")
    again = load_plan(tmp_path / "step.plan")
    assert (again.program.digest, again.plan) == (
        step.program.digest,
        step.plan,
    ) and again.host_bytes == step.host_bytes
    text = (tmp_path / "step.plan").read_text()
    body = text.split("\n", 2)[2].removesuffix("\n}\n").replace('["host",false]', '["host",true]')
    with pytest.raises(PlanError, match="and no program has these"):
        rewritten(tmp_path / "edited.plan", text, body)


def rewritten(path: Path, text: str, body: str) -> None:
    """Read a plan file whose body was edited by someone who knows the digest."""
    import hashlib

    head = text.split("\n", 2)[0]
    digest = hashlib.sha256(body.encode()).hexdigest()
    path.write_text(f'{head}\n"sha256": "{digest}",\n{body}\n}}\n')
    load_plan(path)


def test_sessions_share_parameters_with_one_that_copies() -> None:
    step = compiled(GPT2, offload=True, budget=0.7, remat="off")
    trained = step.bind()
    examiner = fp.compile(fp.models.build(GPT2)).bind(share=trained)
    assert examiner.host_bytes == 0 and examiner.regions[0] is trained.regions[0]
    twin = step.bind(share=trained)
    assert twin.regions[HOST] is not trained.regions[HOST] and twin.host_bytes == step.host_bytes


def test_what_differs_from_a_plan_without_copies() -> None:
    plain, step = compiled(GPT2, remat="off"), compiled(GPT2, offload=True, budget=0.7, remat="off")
    found = diff(plain.program, plain.plan, step.program, step.plan)
    counts = {change.name: (change.before, change.after) for change in found.counts}
    assert counts["copied"] == (0, copies(step)) and counts["recomputed"] == (0, 0)
    assert ("host_bytes", 0, step.host_bytes) in [(c.name, c.before, c.after) for c in found.sizes]


def test_no_memory_for_the_host_region(monkeypatch: pytest.MonkeyPatch) -> None:
    from foreplan.runtime.numpy.engine import NumpyEngine

    def refuse(self: NumpyEngine, heights: object) -> list[np.ndarray]:
        raise MemoryError

    step = compiled(GPT2, offload=True, budget=0.7, remat="off")
    monkeypatch.setattr(NumpyEngine, "allocate_host", refuse)
    with pytest.raises(DoesNotFitError, match="no memory for host memory of"):
        step.bind()


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(UsageError, match="offload copies what the backward pass reads, and this is inference"):
        fp.compile(fp.models.build(GPT2), offload=True)
    with pytest.raises(UsageError, match="checkpoint says what is recomputed, and offload"):
        compiled(GPT2, offload=True, checkpoint=["h.*"])


def test_the_command_line(tmp_path: Path) -> None:
    plan = tmp_path / "step.plan"
    assert (
        "of host memory (+"
        in foreplan(
            "plan", GPT2, "--offload", "--fission", "off", "--budget", "0.7", "--remat", "off", "-o", plan
        ).stdout
    )
    assert "host memory" in foreplan("view", plan).stdout
    assert foreplan("verify", plan).stdout
    refused = foreplan("estimate", GPT2, "--offload", "--infer", code=2)
    assert "--offload copies what the backward pass reads" in refused.stderr
    assert "has decided on --offload already" in foreplan("estimate", plan, "--offload", code=2).stderr
