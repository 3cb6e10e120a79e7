"""Plans of stages: run against each other by predicted times, as files, and what cannot be in stages."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import foreplan as fp
from foreplan import optim
from foreplan.base.errors import DoesNotFitError, PlanError, SessionError, UsageError
from foreplan.cli import cli
from foreplan.compiler.staged import Staged
from foreplan.graph import Graph, GraphBuilder, Kind, Normal, TensorType
from foreplan.graph.registry import parse_op
from foreplan.graph.text import parse_graph
from foreplan.graph.types import FLOAT32
from foreplan.lower.program import Program
from foreplan.lower.stage_times import messages_of, run_stages, unmatched
from foreplan.ops.collective import Begin, Finish
from foreplan.ops.map import elementwise
from foreplan.ops.matmul import matmul
from foreplan.ops.point_to_point import BeginMessage, BeginReceive, BeginSend
from foreplan.ops.reduce import reduce
from foreplan.options import Options
from foreplan.planner import Plan
from foreplan.runtime.session import Session
from tests.profile import few, values
from tests.ranks.stages import compiled_stages
from tests.ranks.threads import Thread, run

GPT = "gpt2_small:layers=3,width=32,heads=2,seq=8,vocabulary=61,batch=2"


def staged(stages: int, micro_batches: int, model: Graph | None = None, **more: Any) -> Staged:
    """All stages of a small model."""
    usual: dict[str, Any] = {"loss": fp.losses.cross_entropy, "target": "numpy", "ranks": stages}
    options = usual | {"stages": stages, "accumulate": micro_batches} | more
    graph = fp.models.build(GPT) if model is None else model
    return Staged.of(graph, Options(optimizer=optim.AdamW(0.01), **options))


def halves(found: Staged) -> list[tuple[Program, Plan]]:
    """Programs and plans."""
    return [(step.program, step.plan) for step in found.steps]


def alike(layers: int) -> Graph:
    """Products of one shape one behind the other, each of which has three in all, forward and back."""
    b = GraphBuilder("alike")
    x = b.input("x", TensorType(FLOAT32, (512, 512)))
    x = elementwise(b, lambda x, s: x * s, x, b.store("scale", TensorType(FLOAT32, ()), Kind.PARAMETER, Normal(1.0)))
    for number in range(layers):
        x = matmul(b, x, b.store(f"w{number}", TensorType(FLOAT32, (512, 512)), Kind.PARAMETER, Normal(0.05)))
    return b.finish({}, loss=reduce(b, "sum", elementwise(b, lambda x: x * x, x)))


@pytest.mark.parametrize(("stages", "micro_batches"), values([2, 3, 4], [1, 4, 12]))
def test_bubbles_are_those_of_the_formula(stages: int, micro_batches: int) -> None:
    """(S - 1) / (M + S - 1), of stages that take the same time (Narayanan et al. 2021, section 2.2.1); messages take
    next to none over these links, and updates little.
    """
    options = Options(None, optim.SGD(0.1), target="numpy", ranks=stages, stages=stages, accumulate=micro_batches)
    found = Staged.of(alike(12), replace(options, links="900TB/s,0us"))
    assert found.run.bubble == pytest.approx((stages - 1) / (micro_batches + stages - 1), abs=0.02)


def test_memory_is_that_of_the_micro_batches_in_flight() -> None:
    """Of activations that are kept, stage s of S has at most S - s times those of a micro-batch, however many there are
    (Narayanan et al. 2021, section 2.2): inputs alone grow with them.
    """

    def arenas(micro_batches: int) -> list[int]:
        options = Options(None, optim.SGD(0.1), target="numpy", ranks=3, stages=3, accumulate=micro_batches)
        return [step.arena_bytes for step in Staged.of(alike(12), options).steps]

    few, many = arenas(4), arenas(9)
    tensor = 512 * 512 * 4
    assert many == pytest.approx([few[0] + 5 * tensor, *few[1:]], abs=4096)  # to a byte a message, in lines of 64
    assert few[1] - few[2] >= 3 * tensor  # one more in flight: what three of four products have read


def test_slow_links_make_a_step_longer() -> None:
    """And what is sent over one is the traffic of all micro-batches, forward and back."""
    fast, slow = (staged(3, 4, links=links) for links in ("100GB/s,1us", "1MB/s,1us"))
    assert slow.run.nanoseconds > 2 * fast.run.nanoseconds
    nbytes = sum(value.type.nbytes for value in fast.layout.crossing[0])
    assert fast.steps[0].program.ranks == 3
    (tied,) = (value for value in fast.layout.graph.parameters if len(fast.layout.holders(value)) > 1)
    assert fast.run.stages[0].sent == 4 * nbytes + tied.type.nbytes + 4  # with the loss
    assert slow.run.nanoseconds >= 4 * nbytes * 1000  # all of it over the first link, a byte a microsecond


@pytest.mark.parametrize(
    ("ranks", "slow"), [(4, {(1, 2), (2, 1)}), (8, {(0, 1), (1, 2), (2, 3), (1, 0), (2, 1), (3, 2)})]
)
def test_messages_take_the_links_that_they_cross(ranks: int, slow: set[tuple[int, int]]) -> None:
    """In nodes of two cards: two stages of one rank each are in a node; of two ranks each, none are."""
    found = staged(4, 2, alike(12), loss=None, ranks=ranks, links="1GB/s,0us*2+1MB/s,0us")
    times: dict[tuple[int, int], set[float]] = {}
    for step in found.steps:
        for action, call in zip(step.program.actions, step.program.calls):
            if isinstance(call.op, BeginSend):
                rate = call.inputs[0].type.nbytes / action.nanoseconds
                times.setdefault((call.op.own, call.op.peer), set()).add(round(rate, 6))
    assert {way for way, rates in times.items() if max(rates) < 0.01} == slow
    assert {way for way, rates in times.items() if min(rates) > 0.9} == times.keys() - slow


@pytest.mark.parametrize(
    ("stages", "micro_batches", "clip"),
    few([(2, 1, None), (2, 7, 1.0), (3, 2, None), (5, 1, 1.0), (5, 7, None)], (1, 2)),
)
def test_messages_match(stages: int, micro_batches: int, clip: float | None) -> None:
    """Every one that is sent is received, and stages come to their ends in the order of their plans."""
    optimizer = optim.SGD(0.1, clip_norm=clip)
    model = fp.models.build("gpt2_small:layers=5,width=16,heads=1,seq=4,vocabulary=31,batch=1")
    compiled = compiled_stages(model, stages, micro_batches, optimizer=optimizer)
    messages = [messages_of(each.program, each.plan) for each in compiled]
    assert unmatched(messages) == ""
    sent = [message for each in messages for message in each.sent]
    neighbours = [x for x in sent if abs(x.source - x.target) == 1]
    assert len(neighbours) >= 2 * micro_batches * (stages - 1)
    run_stages([(each.program, each.plan) for each in compiled])


def without(half: tuple[Program, Plan], drop: Callable[[Any], bool]) -> tuple[Program, Plan]:
    """A plan without some steps."""
    program, plan = half
    return program, replace(plan, steps=tuple(x for x in plan.steps if not drop(program.calls[x.action].op)))


def test_stages_that_do_not_fit() -> None:
    found = halves(staged(2, 2))
    gone = without(found[0], lambda op: isinstance(op, BeginSend) and op.time == 1)
    with pytest.raises(PlanError, match=r"message 1 from stage 0 to stage 1, [\d,]+ bytes, is never sent"):
        run_stages([gone, found[1]])
    other = halves(staged(2, 3))
    with pytest.raises(PlanError, match=r"message \d+ from stage \d to stage \d, [\d,]+ bytes, is never received"):
        run_stages([found[0], other[1]])
    with pytest.raises(PlanError, match="do not fit one another"):
        run_stages(found[::-1])


def _values(program: Program, action: int) -> list[int]:
    """What an action works with first: of a message, its token."""
    call = program.calls[action]
    return [call.outputs[0].value, call.inputs[0].value]


def test_stages_that_would_wait_for_ever() -> None:
    """Each waits first for what the other begins only then."""
    found = []
    for half in halves(staged(2, 1)):
        program, plan = half
        tokens = {call.outputs[0].value for call in program.calls if isinstance(call.op, BeginSend)}
        sends = [x for x in plan.steps if not tokens.isdisjoint(_values(program, x.action))]
        last = [x for x in plan.steps if x not in sends]
        found.append((program, replace(plan, steps=(*last, *sends))))
    with pytest.raises(PlanError, match=r"wait for one another for ever: 0 at '.*'; 1 at '.*'"):
        run_stages(found)


def test_waits_stand_behind_all_that_began_before_them() -> None:
    """In the order of the graph, whatever order a plan has: so nothing begins later than it was listed to."""
    for step in staged(3, 4).steps:
        order = {step.program.calls[each.action].node: at for at, each in enumerate(step.plan.steps)}
        begun: list[int] = []
        for call in step.program.calls:
            if isinstance(call.op, BeginMessage):
                begun.append(order[call.node])
            elif isinstance(call.op, Finish) and any(
                isinstance(each.op, BeginMessage) and each.outputs[0] == call.inputs[0] for each in step.program.calls
            ):
                assert order[call.node] > max(begun)
        assert begun == sorted(begun) and begun


@pytest.mark.parametrize(
    "op", [BeginSend(3, peer=2, time=5), BeginReceive(4, stride=2, own=3, peer=1, shape=(2, 3), dtype=FLOAT32)]
)
def test_ops_are_their_text(op: BeginMessage) -> None:
    assert parse_op(str(op)) == op


@pytest.mark.parametrize(
    "wrong", [{"ranks": 1, "peer": 0}, {"ranks": 3, "peer": 3}, {"ranks": 3, "peer": -1}, {"ranks": 3, "peer": 0}]
)
def test_ops_that_are_wrong(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="a message goes from one of 2 ranks or more to another"):
        BeginSend(**wrong)


def test_files(tmp_path: Path) -> None:
    for step in staged(3, 2).steps:
        path = tmp_path / f"{step.options.stage}.plan"
        step.save(path)
        read = fp.load_plan(path)
        assert read.plan == step.plan and read.options.stage == step.options.stage and read.program.is_stage
        assert step.graph is not None
        assert parse_graph(step.graph.as_text()).as_text() == step.graph.as_text()


def test_budgets_are_those_of_each_stage() -> None:
    model = fp.models.build("gpt2_small:layers=2,width=32,heads=2,seq=16,vocabulary=61,batch=2")
    wide = staged(2, 4, model)
    most = max(step.arena_bytes for step in wide.steps)
    tight = staged(2, 4, model, budget=int(0.93 * most))
    assert all(step.arena_bytes <= int(0.93 * most) for step in tight.steps)
    run_stages(halves(tight))
    with pytest.raises(DoesNotFitError, match=r"^stage 0 of 2: "):
        staged(2, 4, model, budget=4096)


def test_stages_that_exchange_something_else() -> None:
    """One takes the loss from another rank: no library says so."""
    stages = compiled_stages(fp.models.build(GPT), 2, 2, optimizer=optim.SGD(0.1))
    program, plan = stages[0].program, stages[0].plan
    calls = [
        replace(call, op=replace(call.op, peer=0)) if getattr(call.op, "kind", "") == "broadcast" else call
        for call in program.calls
    ]
    other = replace(program, calls=tuple(calls))
    assert other != program
    with pytest.raises(PlanError, match=r"exchange, as number 0, .* in stage 0 and .*peer=1.* in stage 1"):
        run_stages([(other, plan), (stages[1].program, stages[1].plan)])

    def job(world: Thread) -> Any:
        return stages[1].bind() if world.rank else Session(other, plan)

    with pytest.raises(SessionError, match=r"stages do not fit one another: all stages exchange"):
        run(2, job)


def test_a_stage_on_another_rank() -> None:
    compiled = compiled_stages(fp.models.build(GPT), 2, 2, optimizer=optim.SGD(0.1))

    def job(world: Thread) -> Any:
        return compiled[1 - world.rank].bind()

    with pytest.raises(
        SessionError, match=r"not fit one another: rank 0 has stage 1 instead of stage 0.*its own stage"
    ):
        run(2, job)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "ranks": ({"ranks": 6, "stages": 4}, "ranks=6 do not divide into stages=4.*take ranks=4 or ranks=8"),
    "few ranks": ({"ranks": 2, "stages": 4}, "ranks=2 do not divide into stages=4.*take ranks=4$"),
    "stage": ({"stage": 2}, "stage=2 is none of 2 stages, from 0 to 1"),
    "auto": ({"accumulate": "auto"}, "stages=2 need a number of micro-batches"),
    "inference": ({"loss": None, "optimizer": None}, "stages=2 are of a training step"),
    "tensor": ({"tensor": 2}, r"tensor=2 does not divide the 1 rank\(s\) of each stage: take ranks=4"),
    "outputs": ({"outputs": ["logits"]}, "outputs is for a step that one rank runs whole"),
    "many": ({"ranks": 900, "stages": 900}, r"stages=900: the model 'gpt2_small' has \d+ operations"),
    "one": ({"ranks": 1, "stages": 1, "stage": 1}, "stage=1 is one of several"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_in_stages(name: str) -> None:
    options, said = WRONG[name]
    usual = {"loss": fp.losses.cross_entropy, "optimizer": optim.SGD(0.1), "target": "numpy", "accumulate": 2}
    with pytest.raises(UsageError, match=said):
        fp.compile(fp.models.build(GPT), **usual | {"ranks": 2, "stages": 2} | options)


def test_one_stage_is_the_step_as_ever() -> None:
    usual = {"loss": fp.losses.cross_entropy, "optimizer": optim.SGD(0.1), "target": "numpy"}
    model = fp.models.build(GPT)
    assert fp.compile(model, **usual, stages=1).program.as_text() == fp.compile(model, **usual).program.as_text()


def test_statistics_that_two_stages_would_share() -> None:
    """A stored value that is changed in one stage cannot be read in another."""
    b = GraphBuilder("shared")
    x = b.input("x", TensorType(FLOAT32, (64, 64)))
    kept = b.store("kept", TensorType(FLOAT32, (64, 64)), Kind.BUFFER, Normal(1.0))
    first = matmul(b, x, b.store("w", TensorType(FLOAT32, (64, 64)), Kind.PARAMETER, Normal(1.0)))
    first = elementwise(b, lambda a, k: a * k, first, kept)
    second = matmul(b, first, b.store("v", TensorType(FLOAT32, (64, 64)), Kind.PARAMETER, Normal(1.0)))
    second = elementwise(b, lambda a, k: a + k, second, kept)
    graph = b.finish({}, {kept: second}, reduce(b, "sum", second))
    with pytest.raises(UsageError, match="'kept' is changed in stage 1 and read in stage 0"):
        fp.compile(graph, optimizer=optim.SGD(0.1), target="numpy", ranks=2, stages=2, accumulate=2)


def test_the_command() -> None:
    words = ["estimate", GPT, "--ranks", "3", "--stages", "3", "--accumulate", "4", "--target", "numpy"]
    done = CliRunner().invoke(cli, [*words, "--json"])
    figures = json.loads(done.stdout)
    assert (figures["stages"], figures["ranks"], figures["accumulate"]) == (3, 3, 4)
    rows = figures["by_stage"]
    for stage, row in enumerate(rows):
        one = CliRunner().invoke(cli, [*words, "--stage", str(stage), "--json"])
        assert json.loads(one.stdout)["peak_bytes"] == row["peak_bytes"]
        assert sum(row["categories"].values()) <= row["arena_bytes"] <= row["peak_bytes"]
    assert figures["peak_bytes"] == max(row["peak_bytes"] for row in rows)
    idle = 1 - np.mean([row["busy_seconds"] for row in rows]) / figures["predicted_seconds"]
    assert figures["bubble_ratio"] == pytest.approx(idle)
    table = CliRunner().invoke(cli, words).stdout
    assert "3 stages on as many ranks, 4 micro-batches" in table and table.count("stage 1: ") == 1
    lines = table.splitlines()
    assert [line.split()[0] for line in lines[3:6]] == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["estimate", "--parameters"], "leave --stages out"),
        (["train", "--data", "none.npz"], "stages"),
        (["fit"], "stages"),
    ],
)
def test_commands_that_take_no_stages(words: list[str], said: str) -> None:
    command, *rest = words
    done = CliRunner().invoke(cli, [command, GPT, *rest, "--ranks", "2", "--stages", "2", "--accumulate", "2"])
    assert done.exit_code == 2 and said in done.stderr


def test_a_wait_that_names_another_tensor() -> None:
    """What is sent would not be kept until then."""
    x, y = (TensorType(FLOAT32, (4,)) for _ in range(2))
    b = GraphBuilder("g")
    sent, other = b.input("x", x), b.input("y", y)
    begun = b.apply(Begin(2), sent)
    graph = b.finish({"y": b.apply(Finish(2), begun, other)})
    with pytest.raises(PlanError, match="waits for an exchange, and names another tensor than what is sent"):
        fp.lower(graph, "numpy")
