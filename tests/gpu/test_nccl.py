"""Ranks whose cards exchange by NCCL, with cards and a library that are not there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest

import foreplan as fp
from foreplan import optim
from foreplan.base.errors import TargetError
from foreplan.compiler.compiled import Compiled
from foreplan.graph import Graph, GraphBuilder, TensorType
from foreplan.graph.types import DTYPES, FLOAT32
from foreplan.ops import collective
from foreplan.ops.local_index import LocalIndex
from foreplan.passes.ranks import Ranks
from foreplan.runtime.cuda.launch import Await, Choose, Clear, Copy, Exchange, input_at, output_at, relocated
from foreplan.runtime.cuda.libraries import nccl
from foreplan.runtime.cuda.libraries.nccl import communicator
from foreplan.runtime.ranks import ALONE
from tests.gpu.card import FakeCard
from tests.gpu.check import made
from tests.gpu.compiled import needs_gcc
from tests.gpu.exchanges import given, kinds, of_one
from tests.gpu.nccl import Call, FakeNccl, on_cards
from tests.profile import few, values
from tests.ranks.kept import compiled_once
from tests.ranks.stages import assert_as_alone, compiled_stages, trained_alone
from tests.ranks.test_stage_groups import of_replica
from tests.ranks.threads import Thread, run
from tests.ranks.training import Trained, assert_close, assert_same, batches_for, own_part, trained

TARGET = "cuda:h100"
SHARDS = ["none", "state", "gradients", "parameters"]
CARDS: dict[str, Callable[[], FakeCard]] = {"late": FakeCard, "early": partial(FakeCard, eager=True)}
HOW: dict[str, dict[str, bool]] = {"captured": {}, "call by call": {"capture": False}, "poisoned": {"poison": True}}


def mlp(batch: int) -> Graph:
    """Sizes that no number of ranks divides."""
    return fp.models.build(f"mlp:width=23,layers=2,batch={batch}")


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several exchanges of gradients in a step."""
    monkeypatch.setattr(Ranks, "bucket", staticmethod(four_thousand))


def four_thousand(weights: Any) -> int:
    return 4000


@dataclass
class OnCards(Trained):
    """What one rank came to.

    Attributes:
        calls: of NCCL.
        steps: what the card was asked for, in each step.
    """

    calls: list[Call]
    steps: list[list[str]]


def trained_on_cards(
    patch: pytest.MonkeyPatch,
    ranks: int,
    samples: int,
    card: Callable[[], FakeCard] = FakeCard,
    how: dict[str, bool] | None = None,
    model: Callable[[int], Graph] = mlp,
    **options: Any,
) -> Sequence[OnCards]:
    """As `tests.ranks.training.trained`, on cards."""
    accumulate, alike = options.get("accumulate", 1), options.get("tensor", 1)
    step = compiled_once(
        model(samples * alike // ranks // accumulate),
        fp.losses.cross_entropy,
        optim.AdamW(0.01),
        target=TARGET,
        ranks=ranks,
        **options,
    )
    batches = batches_for(step, samples, 4)

    def job(world: Thread, library: FakeNccl) -> OnCards:
        session = step.bind(seed=1, **(how or {}))
        losses: list[float] = []
        steps = []
        for batch in batches:
            library.card.done.clear()
            loss = session.step(own_part(batch, world.rank // alike, ranks // alike, accumulate)).loss
            assert loss is not None
            losses.append(loss)
            steps.append(list(library.card.done))
        return OnCards(losses, dict(session.stored), [], session.allocated_bytes, library.log, steps)

    return on_cards(patch, ranks, job, card)


@needs_gcc
@pytest.mark.parametrize(("shard", "ranks", "card"), values(SHARDS, [2, 3], CARDS))
def test_ranks_train_as_one_process(
    monkeypatch: pytest.MonkeyPatch, small_buckets: None, ranks: int, shard: str, card: str
) -> None:
    (alone,) = trained(mlp, optim.AdamW(0.01), 1, 12, steps=4)
    runs = {way: trained_on_cards(monkeypatch, ranks, 12, CARDS[card], how, shard=shard) for way, how in HOW.items()}
    assert_close(runs["captured"][0], alone, 1e-3)
    for found in runs.values():
        for each in found:
            assert_same(each, runs["captured"][0])
            assert each.calls == found[0].calls, "ranks make the same calls in the same order"
    first = runs["captured"][0]
    assert first.steps[0] == [*first.steps[0][:-1], "capture"] and all("replay" in step for step in first.steps[1:])
    once, rest = divmod(len(first.calls), 2)
    assert not rest and first.calls[:once] == first.calls[once:], "a capture makes the calls of a step"
    for way in ("call by call", "poisoned"):
        assert runs[way][0].calls == first.calls[:once] * 4


def gpt(batch: int) -> Graph:
    """One block, and a table in parts."""
    return fp.models.build(f"gpt2_small:layers=1,width=16,heads=2,seq=6,vocabulary=22,batch={batch}")


@needs_gcc
@pytest.mark.parametrize(("group", "card"), values([(4, "parameters"), (4, "none"), (2, "none")], CARDS))
def test_groups_train_as_one_process(
    monkeypatch: pytest.MonkeyPatch, small_buckets: None, group: tuple[int, str], card: str
) -> None:
    """Two cards with parts of the products; each group of cards has a communicator of its own."""
    (alone,) = trained(gpt, optim.AdamW(0.01), 1, 4, steps=4)
    ranks, shard = group
    found = trained_on_cards(monkeypatch, ranks, 4, CARDS[card], model=gpt, tensor=2, shard=shard)
    assert_close(found[0], alone, 1e-3)
    for each in found[1:]:
        assert_same(each, found[0])
        assert each.calls == found[0].calls


@needs_gcc
@pytest.mark.parametrize("ignored", [None, -100])
def test_local_indices(monkeypatch: pytest.MonkeyPatch, ignored: int | None) -> None:
    b = GraphBuilder("g")
    x = b.input("x", TensorType(DTYPES["int32"], (5, 7)))
    graph = b.finish({"y": b.apply(LocalIndex(3, extent=4, ignored=ignored), x)})
    low = -12 if ignored is None else 0
    indices = np.random.default_rng(0).integers(low, 12, (5, 7)).astype(np.int32)
    steps = [fp.compile(graph, target=target) for target in ("numpy", TARGET)]
    wanted = run(3, lambda world: steps[0].bind().step({"x": indices}).outputs["y"])
    found = on_cards(monkeypatch, 3, lambda world, library: steps[1].bind().step({"x": indices}).outputs["y"])
    for rank, (one, other) in enumerate(zip(wanted, found)):
        np.testing.assert_array_equal(one, other)
        held = indices % 12 // 4 == rank
        np.testing.assert_array_equal(one, np.where(held, indices % 12 - 4 * rank, -1))


@needs_gcc
@pytest.mark.parametrize("shard", few(SHARDS, (0, 3)))
def test_micro_batches(monkeypatch: pytest.MonkeyPatch, shard: str) -> None:
    (alone,) = trained(mlp, optim.AdamW(0.01), 1, 12, steps=4)
    found = trained_on_cards(monkeypatch, 2, 12, shard=shard, accumulate=2)
    assert_close(found[0], alone, 1e-3)
    assert_same(found[1], found[0])


@needs_gcc
@pytest.mark.parametrize("card", few(CARDS))
def test_weights_that_are_gathered_again(monkeypatch: pytest.MonkeyPatch, small_buckets: None, card: str) -> None:
    """What is recomputed reads them, and comes to the same."""
    options: dict[str, Any] = {"shard": "parameters"}
    plain = trained_on_cards(monkeypatch, 2, 12, CARDS[card], **options)
    found = trained_on_cards(monkeypatch, 2, 12, CARDS[card], **options, checkpoint=["hidden0..hidden1"])
    assert len(found[0].calls) > len(plain[0].calls)
    for one, other in zip(found, plain):
        assert_close(one, other)
        assert one.calls == found[0].calls


def test_ranks_that_run_in_other_ways_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    step = fp.compile(mlp(6), fp.losses.cross_entropy, optim.SGD(0.01), target=TARGET, ranks=2)

    def job(world: Thread, library: FakeNccl) -> None:
        with pytest.raises(fp.SessionError, match=r"the way to run is as one graph on rank 0, and call by call on"):
            step.bind(capture=world.rank == 0)
        with pytest.raises(fp.SessionError, match=r"the way to run is .* on rank 1\. .*bind it alike"):
            step.bind(poison=world.rank == 1)

    on_cards(monkeypatch, 2, job)


@needs_gcc
def test_a_trace_and_a_checkpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """A trace runs what a step runs, one exchange after the other; a checkpoint of parts is read whole."""
    step = fp.compile(mlp(6), fp.losses.cross_entropy, optim.AdamW(0.01), target=TARGET, ranks=2, shard="parameters")
    (batch,) = batches_for(step, 12, 1)

    def job(world: Thread, library: FakeNccl) -> dict[str, np.ndarray]:
        session, other = step.bind(seed=1), step.bind(seed=2)
        mine = own_part(batch, world.rank, 2)
        result, timings = session.trace(mine)
        assert len(timings) == len(step.plan.steps)
        session.save(tmp_path / "saved")
        other.load(tmp_path / "saved")
        assert other.step(mine).loss == session.step(mine).loss and result.loss is not None
        return dict(other.stored)

    first, second = on_cards(monkeypatch, 2, job)
    assert all((second[name] == array).all() for name, array in first.items() if array.dtype.kind == "f")


@needs_gcc
@pytest.mark.parametrize("card", CARDS.values(), ids=CARDS)
@pytest.mark.parametrize("shape", [(6, 5), (3, 0), (9000, 2)], ids=str)
@pytest.mark.parametrize("name", kinds(3))
def test_collectives_give_what_they_give_on_the_host(
    monkeypatch: pytest.MonkeyPatch, name: str, shape: tuple[int, ...], card: Callable[[], FakeCard]
) -> None:
    graph, inputs = of_one(kinds(3)[name], shape), given(3, shape)
    steps: list[Compiled] = [compiled_once(graph, target=target) for target in ("numpy", TARGET)]

    def twice(step: Compiled, world: Thread) -> list[dict[str, np.ndarray]]:
        session = step.bind()
        return [dict(session.step(inputs[(world.rank + turn) % 3]).outputs) for turn in range(2)]

    wanted = run(3, lambda world: twice(steps[0], world))
    found = on_cards(monkeypatch, 3, lambda world, library: twice(steps[1], world), card)
    for theirs, ours in zip(wanted, found):
        for one, other in zip(theirs, ours):
            assert one.keys() == other.keys()
            assert all(one[key].tobytes() == other[key].tobytes() for key in one), name


def test_plans_are_made_without_a_card_and_have_prices() -> None:
    step = fp.compile(
        fp.models.build("mlp:width=64,batch=8"),
        fp.losses.cross_entropy,
        optim.AdamW(0.001),
        target=TARGET,
        ranks=4,
        shard="parameters",
    )
    calls = [call for call in step.program.calls if isinstance(call.op, collective.Collective)]
    assert {call.op.name for call in calls} >= {"begin_exchange", "finish_exchange"}
    assert all(call.kernel == nccl.NAME for call in calls if call.op.name.endswith("_exchange"))
    begun = [
        action for action, call in zip(step.program.actions, step.program.calls) if call.op.name == "begin_exchange"
    ]
    assert all(action.nanoseconds > 1000 for action in begun)
    x = TensorType(FLOAT32, (400, 1000))
    begin, _, _ = made(collective.Begin(4, "shift", 3), [x], name=nccl.NAME)
    assert begin.instructions == (Exchange("shift", 3, input_at(0), output_at(0), x.nbytes, 4, 1),)
    at_once, _, _ = made(collective.Begin(4, "shift", 3, wait=True), [x], name=nccl.NAME)
    assert at_once.instructions == (*begin.instructions, Await(output_at(0)))
    finish, _, _ = made(collective.Finish(4), [x, x], name=nccl.NAME)
    assert finish.nanoseconds == 0 and finish.overwrites == ((0, 0),) and finish.instructions == (Await(output_at(0)),)


def test_instructions_of_ranks_can_be_moved() -> None:
    def moved(place: Any) -> Any:
        return place.behind(8)

    source, target = input_at(0, 8), output_at(0, 8)
    exchange = Exchange("shift", 1, input_at(0), output_at(0), 16, 4, 2)
    assert relocated(exchange, moved) == Exchange("shift", 1, source, target, 16, 4, 2)
    assert relocated(Await(output_at(0)), moved) == Await(target)
    choose = Choose((Copy(output_at(0), input_at(0), 4), Clear(output_at(0), 4)), 2)
    assert relocated(choose, moved) == Choose((Copy(target, source, 4), Clear(target, 4)), 2)


def connected(patch: pytest.MonkeyPatch, break_it: Callable[[int, FakeNccl], None]) -> list[str]:
    """What each of three ranks says that cannot be connected."""

    def job(world: Thread, library: FakeNccl) -> str:
        break_it(world.rank, library)
        with pytest.raises(TargetError) as caught:
            communicator(world, library.card)
        return str(caught.value)

    return on_cards(patch, 3, job)


def test_a_communicator_is_made_once_by_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def job(world: Thread, library: FakeNccl) -> tuple[bool, int, str]:
        one, other = communicator(world, library.card), communicator(world, library.card)
        return one is other, library.identities, one.version

    assert on_cards(monkeypatch, 3, job) == [(True, int(rank == 0), "2.27.7") for rank in range(3)]


def test_what_keeps_ranks_apart_is_told_on_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library(rank: int, library: FakeNccl) -> None:
        if rank == 1:
            monkeypatch.setattr(library, "get_version", partial(fail, "libnccl.so.2: no such file"))

    def fail(text: str, *words: object) -> None:
        raise RuntimeError(text)

    def other_version(rank: int, library: FakeNccl) -> None:
        library.version += 100 * (rank == 2)

    def same_card(rank: int, library: FakeNccl) -> None:
        library.card.bus = "0000:07:00.0" if rank else "0000:03:00.0"

    def no_identity(rank: int, library: FakeNccl) -> None:
        monkeypatch.setattr(library, "get_unique_id", partial(fail, "NCCL_ERROR_SYSTEM_ERROR: no socket"))

    def unreachable(rank: int, library: FakeNccl) -> None:
        monkeypatch.setattr(library, "NcclCommunicator", partial(fail, "NCCL_ERROR_UNHANDLED_CUDA_ERROR: x"))

    for break_it, said in (
        (no_library, r"cannot be loaded on rank 1, on .*libnccl\.so\.2: no such file; .*foreplan\[cuda13\]"),
        (other_version, r"rank 2 has NCCL 2\.28\.7 and rank 0 2\.27\.7: install one version"),
        (same_card, r"ranks 1 and 2 have one card, fake H100 at 0000:07:00\.0 of .*: start at most as many"),
        (
            no_identity,
            r"NCCL 2\.27\.7 cannot connect 3 ranks: rank 0: NCCL_ERROR_SYSTEM_ERROR: no socket; .*NCCL_DEBUG",
        ),
        (unreachable, r"cannot connect 3 ranks: NCCL_ERROR_UNHANDLED_CUDA_ERROR: x; with NCCL_DEBUG=INFO"),
    ):
        for text in connected(monkeypatch, break_it):
            with pytest.raises(TargetError, match=said):
                raise TargetError(text)


def test_a_group_of_calls_ends_whatever_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    def job(world: Thread, library: FakeNccl) -> list[Call]:
        made = communicator(world, library.card)

        def fail(*words: int) -> None:
            raise RuntimeError("NCCL_ERROR_INVALID_ARGUMENT: invalid argument")

        made.comm.recv = fail
        memory = np.zeros(8, np.uint8)
        with pytest.raises(RuntimeError, match="INVALID_ARGUMENT"):
            made.exchange("shift", 1, memory.ctypes.data, memory.ctypes.data, 8, library.card.stream)
        return library.log

    for log in on_cards(monkeypatch, 2, job):
        assert log == [("(",), ("send", 8, 1), (")",)]


@pytest.mark.cuda_wheels
def test_cupys_nccl_takes_what_it_is_given() -> None:
    """Where there is no card, it says so when it is to connect one."""
    found = pytest.importorskip("cupy.cuda.nccl", reason="CuPy is not installed: make setup-cuda")
    if not found.available:
        pytest.skip("NCCL is not installed: make setup-cuda")
    from cupy.cuda import runtime

    if runtime.driverGetVersion():
        pytest.skip("needs a machine without a driver; where there are two cards, tests marked cuda try the same")
    with pytest.raises(TargetError, match=r"NCCL 2\.\d+\.\d+ cannot connect 1 ranks: NCCL_ERROR_.*: "):
        nccl.Nccl(ALONE, FakeCard())
    assert found.NCCL_UINT8 == FakeNccl.NCCL_UINT8
    unconnected = object.__new__(nccl.Nccl)
    unconnected.library, unconnected.rank, unconnected.size = found, 1, 4
    unconnected.comm = found.NcclCommunicator.__new__(found.NcclCommunicator)
    for kind in collective.EXCHANGES:
        with pytest.raises(RuntimeError, match="NCCL_ERROR_INVALID_ARGUMENT"):
            unconnected.exchange(kind, 3, 1 << 46, 1 << 45, 1 << 40, 1 << 44)


STAGES: dict[str, tuple[int, dict[str, Any]]] = {
    "2": (2, {}),
    "3": (3, {}),
    "2 of 2": (2, {"ranks": 4}),
    "2 of 2, in parts": (2, {"ranks": 4, "shard": "parameters"}),
    "2 of 4, products in parts": (2, {"ranks": 8, "tensor": 2, "shard": "state"}),
}
# Of which each runs once, and each way of a session on each card.
TRIED = {
    ("2", "late", "captured"),
    ("2", "early", "poisoned"),
    ("3", "early", "call by call"),
    ("2 of 2", "late", "poisoned"),
    ("2 of 2, in parts", "early", "captured"),
    ("2 of 4, products in parts", "late", "call by call"),
}
ROWS = list(product(STAGES, CARDS, HOW))


@needs_gcc
@pytest.mark.parametrize(("name", "card", "how"), few(ROWS, {ROWS.index(row) for row in TRIED}))
def test_stages_train_as_one_process(monkeypatch: pytest.MonkeyPatch, name: str, card: str, how: str) -> None:
    """Each way between two cards has a communicator and a stream of its own."""
    stages, options = STAGES[name]
    ranks, tensor = options.get("ranks", stages) // stages, options.get("tensor", 1)
    optimizer = optim.Momentum(0.1)
    alone, batches = trained_alone(gpt(ranks // tensor), 3, steps=3, optimizer=optimizer)
    steps = compiled_stages(gpt(1), stages, 3, optimizer=optimizer, target=TARGET, **options)

    def job(world: Thread, library: FakeNccl) -> Trained:
        step = steps[world.rank // ranks]
        session = step.bind(seed=1, **HOW[how])
        names = [slot.name for slot in step.program.required_inputs]
        own = [of_replica(batch, world.rank % ranks // tensor, ranks // tensor, 1) for batch in batches]
        losses = [session.step({name: batch[name] for name in names}).loss for batch in own]
        ends = {each.rank for each in library.communicators if each.meeting.size == 2 and each.moved}
        assert ends == {0, 1}, "it sends and receives"
        return Trained(losses, dict(session.stored), [], session.allocated_bytes)

    assert_as_alone(on_cards(monkeypatch, stages * ranks, job, CARDS[card]), alone, 1e-4)
