"""The next batch on a card that is not there: it crosses beside a step, neither before nor after its time."""

from __future__ import annotations

import gc
from functools import cache

import numpy as np
import pytest

import foreplan as fp
from foreplan.lower.program import STATE
from foreplan.runtime.cuda.libraries import driver
from foreplan.runtime.session import Session
from tests.gpu.card import COPIES, FakeCard, FakeEvent
from tests.gpu.compiled import needs_gcc
from tests.runtime.micro_batches import Arrays, compiled, data_for, perceptron, same

pytestmark = needs_gcc
TARGET = "cuda:h100"


@pytest.fixture(params=[False, True], ids=["late", "eager"])
def card(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FakeCard:
    made = FakeCard(eager=request.param)
    monkeypatch.setattr(driver, "card", lambda: made)
    return made


@cache
def step_for(prefetch: bool = True, **options: object) -> fp.Compiled:
    return compiled(perceptron(8), fp.optim.Adam(1e-2), target=TARGET, prefetch=prefetch, **options)


def batches(step: fp.Compiled, count: int, leading: tuple[int, ...] = ()) -> list[Arrays]:
    return [data_for(step, seed, leading) for seed in range(count)]


def second_slots(session: Session) -> list[int]:
    """Their addresses."""
    starts, region = dict(session.plan.starts), session.regions[STATE]
    return [region.address + starts[slot.operand.value] for slot in session.program.ahead]  # type: ignore[attr-defined]


@pytest.mark.parametrize("options", [{}, {"capture": False}, {"poison": True}])
def test_results_are_those_without(card: FakeCard, options: dict[str, bool]) -> None:
    plain, step = step_for(prefetch=False), step_for()
    theirs, ours, unplanned = plain.bind(seed=1), step.bind(seed=1, **options), plain.bind(seed=1)  # type: ignore[arg-type]
    given = batches(plain, 5)
    for i, batch in enumerate(given):
        batch["learning_rate"] = np.float32(0.01 * (i + 1))
    wanted = [theirs.step(batch).loss for batch in given]
    assert [result.loss for result in ours.steps(given)] == wanted
    assert [result.loss for result in unplanned.steps(given)] == wanted
    assert same(ours, theirs) and same(unplanned, theirs)


@pytest.mark.parametrize("poison", [False, True])
def test_micro_batches_cross_while_those_before_run(card: FakeCard, poison: bool) -> None:
    graph = perceptron(4)
    (name,) = graph.outputs
    for outputs in ([], [name]):
        both = [
            compiled(graph, fp.optim.AdamW(1e-2), target=TARGET, accumulate=3, prefetch=prefetch, outputs=outputs)
            for prefetch in (False, True)
        ]
        theirs, ours = both[0].bind(seed=1), both[1].bind(seed=1, poison=poison)
        given = batches(both[0], 4, (3,))
        wanted = [theirs.step(batch) for batch in given]
        card.crossed.clear()
        found = [*ours.steps(given[:2]), *(ours.step(batch) for batch in given[2:])]
        # All but the first of each of the last two steps, whose inputs nobody knew before.
        slots = second_slots(ours)
        assert card.crossed == slots * (1 + 2 + 3 + 2 + 2)
        for ours_given, theirs_given in zip(found, wanted):
            assert ours_given.loss == theirs_given.loss
            assert all((ours_given.outputs[x] == theirs_given.outputs[x]).all() for x in outputs)
        assert same(ours, theirs)


def test_the_next_batch_arrives_before_the_step_has_run(card: FakeCard, monkeypatch: pytest.MonkeyPatch) -> None:
    step = step_for()
    session = step.bind()
    slots, crossed = second_slots(session), []
    calls = len(session._body.bound.calls) + 2  # type: ignore[attr-defined]  # the loss, and its event
    finish = Session._finish

    def watched(self: Session, *arguments: object) -> fp.runtime.session.Result:
        while len(card.queue) > calls:  # its own batch is moved to its place
            card.run_next()
        crossed.append(list(card.crossed))
        assert len(card.queue) == calls, "the step has not begun"
        return finish(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Session, "_finish", watched)
    assert len(list(session.steps(batches(step, 4)))) == 4
    # Where copies run late, those that a step needs have run; else those of the next step, too.
    assert crossed == [slots * count for count in ([2, 3, 4, 4] if card.eager else [1, 2, 3, 4])]


def test_the_graph_stays_as_it_was_captured(card: FakeCard) -> None:
    step = step_for()
    session, given = step.bind(), batches(step, 6)
    card.done.clear()
    losses = [result.loss for result in session.steps(given[:4])]
    losses += [session.step(batch).loss for batch in given[4:]]
    assert card.done == ["capture", *["replay"] * 5] and len(set(losses)) == 6


@pytest.mark.usefixtures("own_garbage")
def test_all_is_in_the_one_arena_and_pinned_memory_is_no_more_than_without(
    card: FakeCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned: list[int] = []
    allocate = card.allocate_host
    monkeypatch.setattr(card, "allocate_host", lambda nbytes: (pinned.append(nbytes), allocate(nbytes))[1])
    sizes = []
    for step in (step_for(prefetch=False), step_for()):
        gc.collect()
        before, card.done[:], pinned[:] = card.live, [], []
        session = step.bind()
        assert card.done.count("allocate") == 1
        assert card.live - before == session.allocated_bytes == step.arena_bytes
        made = list(card.done)
        list(session.steps(batches(step, 3)))
        assert set(card.done[len(made) :]) == {"capture", "replay"} and card.live - before == step.arena_bytes
        sizes.append((step.arena_bytes, sum(pinned)))
        del session
    images, labels = 8 * 12 * 4, 8 * 8
    assert sizes[1][0] - sizes[0][0] == -(-images // 256) * 256 + -(-labels // 256) * 256
    assert sizes[1][1] == sizes[0][1]


@pytest.mark.parametrize("missing", ["the move waits for the copy", "the copy waits for the move", "the host waits"])
def test_every_wait_is_needed(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    """Without any one of them, a card that runs early or late gives other results: the tests above would see it."""
    step, right = step_for(), []
    for broken in (False, True):
        found = []
        for eager in (False, True):
            made = FakeCard(eager=eager)
            with monkeypatch.context() as patch:
                patch.setattr(driver, "card", lambda made=made: made)
                if broken:
                    break_one(patch, made, missing)
                session = step.bind(seed=1)
                # Batches far from one another, so that half of one and half of another show.
                found.append([result.loss for result in session.steps(batches(step, 6))])
                made.synchronize()
        if not broken:
            right = found
            assert found[0] == found[1]
    assert found != right


def break_one(patch: pytest.MonkeyPatch, card: FakeCard, missing: str) -> None:
    hold, wait = card.hold, FakeEvent.wait
    if missing == "the host waits":
        patch.setattr(FakeEvent, "wait", lambda event: None if event.queue == COPIES else wait(event))
    else:
        left_out = missing == "the copy waits for the move"
        patch.setattr(card, "hold", lambda event, beside=False: None if beside == left_out else hold(event, beside))


def test_a_failure_beside_is_told_and_a_checkpoint_goes_on(card: FakeCard) -> None:
    step = step_for()
    ours, theirs = step.bind(seed=1), step.bind(seed=1)
    given = batches(step, 3)
    wanted = [theirs.step(batch).loss for batch in given]
    copying = card.copying

    def failing(target: int, source: int, nbytes: int, beside: bool = False) -> object:
        if beside and len(card.crossed) >= len(slots):
            raise RuntimeError("CUDA_ERROR_UNKNOWN: the bus is gone")
        return copying(target, source, nbytes, beside)

    slots = second_slots(ours)
    with pytest.MonkeyPatch.context() as patch:
        results = ours.steps(given)
        assert next(results).loss == wanted[0]
        assert next(results).loss == wanted[1]
        patch.setattr(card, "copying", failing)
        rest = ours.steps([given[2]])
        with pytest.raises(fp.SessionError, match=r"the bus is gone(.|\n)*load the last checkpoint"):
            next(rest)
    assert ours.step(given[2]).loss == wanted[2]
