"""Sessions and threads: one call at a time on an arena, several sessions side by side."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import foreplan as fp
from foreplan.runtime.session import Session
from tests.runtime.micro_batches import Arrays, compiled, data_for, perceptron, same

THREADS = 4


def together(work: Callable[[int], object], threads: int = THREADS) -> list[object]:
    """What `work` gives for 0, 1, ..., each in a thread; they begin at once."""
    start = threading.Barrier(threads)

    def begin(index: int) -> object:
        start.wait()
        return work(index)

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(begin, range(threads)))


def convolutions(batch: int = 8) -> fp.graph.Graph:
    def model(x: fp.frontend.Tensor) -> fp.frontend.Tensor:
        x = fp.nn.relu(fp.nn.conv(x, 16, 3, padding=1, name="first"))
        x = fp.nn.relu(fp.nn.conv(x, 16, 3, padding=1, name="second"))
        return fp.nn.linear(fp.nn.flatten(fp.nn.max_pool(x, 2)), 5, name="head")

    return fp.trace(model, fp.spec((batch, 3, 16, 16)), name="convolutions")


@pytest.mark.parametrize("target", ["numpy", "cpu:threads=1", "cpu:threads=2"])
@pytest.mark.parametrize("model", [perceptron, convolutions])
def test_a_session_answers_several_threads_as_it_answers_one(
    model: Callable[[int], fp.graph.Graph], target: str
) -> None:
    step = fp.compile(model(8), target=target)
    session = step.bind(seed=1)
    given = [data_for(step, seed) for seed in range(8)]
    wanted = [session.step(batch).outputs for batch in given]

    def ask(thread: int) -> int:
        wrong = 0
        for i in range(60):
            at = (thread + i) % len(given)
            found = session.step(given[at]).outputs
            wrong += any(found[name].tobytes() != wanted[at][name].tobytes() for name in found)
        return wrong

    assert together(ask) == [0] * THREADS


@pytest.mark.parametrize("target", ["numpy", "cpu:threads=1"])
def test_training_from_several_threads_takes_whole_steps(target: str) -> None:
    # Every thread takes the same batch, so that the order in which they get their turns changes nothing.
    step = compiled(perceptron(8), target=target)
    ours, theirs = step.bind(seed=1), step.bind(seed=1)
    batch = data_for(step, 0)
    wanted = [theirs.step(batch).loss for _ in range(THREADS * 40)]
    found = together(lambda thread: [ours.step(batch).loss for _ in range(40)])
    assert sorted(loss for losses in found for loss in losses) == sorted(wanted)  # type: ignore[attr-defined]
    assert same(ours, theirs) and ours.steps_done == THREADS * 40


@pytest.mark.parametrize("target", ["numpy", "cpu:threads=1"])
def test_sessions_that_share_an_arena_take_turns(target: str) -> None:
    graph = perceptron(8)
    examiner = fp.compile(graph, target=target)
    training = compiled(graph, target=target, optimizer=fp.optim.SGD(0.0))  # which changes nothing
    trained = training.bind(seed=1)
    sessions = [trained, *(examiner.bind(share=trained) for _ in range(THREADS - 1))]
    assert {id(session._turn) for session in sessions} == {id(trained._turn)}
    batch = data_for(training, 0)
    wanted = sessions[1].step({"x": batch["x"]}).outputs["logits"]
    loss = trained.step(batch).loss

    def work(thread: int) -> bool:
        if not thread:
            return all(trained.step(batch).loss == loss for _ in range(80))
        found = [sessions[thread].step({"x": batch["x"]}).outputs["logits"] for _ in range(80)]
        return all(each.tobytes() == wanted.tobytes() for each in found)

    assert together(work) == [True] * THREADS


@pytest.mark.parametrize(
    "targets",
    [
        ("numpy",) * 4,
        ("cpu:threads=1", "cpu:threads=2", "cpu:threads=1", "cpu:threads=2"),
        ("cpu:threads=2", "cpu:threads=1", "cpu:threads=3"),
    ],
)
def test_sessions_side_by_side_disturb_nobody(targets: tuple[str, ...]) -> None:
    steps = [compiled(convolutions(), target=target) for target in targets]
    batch = data_for(steps[0], 0)
    alone = []
    for step in steps:
        session = step.bind(seed=3)
        alone.append([session.step(batch).loss for _ in range(20)])
    sessions = [step.bind(seed=3) for step in steps]
    assert len({id(session._turn) for session in sessions}) == len(sessions)
    assert together(lambda i: [sessions[i].step(batch).loss for _ in range(20)], len(targets)) == alone


def test_every_thread_runs_a_plan_with_the_threads_that_it_was_made_for() -> None:
    from foreplan.runtime.cpu.threads import current_threads

    counts = (3, 1, 2)
    sessions = [compiled(perceptron(8), target=f"cpu:threads={count}").bind() for count in counts]
    batch = {"x": np.zeros((8, 12), np.float32), "target": np.zeros(8, np.int64)}

    def seen(index: int) -> int:
        sessions[index].step(batch)
        return current_threads()

    assert [seen(i) for i in range(3)] == [*counts]  # one after the other in this thread
    assert together(seen, 3) == [*counts]

    def watched(index: int) -> int:
        sessions[index].trace(batch)
        return current_threads()

    assert together(watched, 3) == [*counts]


def test_a_session_waits_for_no_other() -> None:
    step = compiled(perceptron(8))
    held, free = step.bind(), step.bind()
    with ThreadPoolExecutor(1) as pool, held._turn.lock:
        pool.submit(free.step, data_for(step, 0)).result(timeout=30)


def test_parameters_are_read_and_written_whole(tmp_path: Path) -> None:
    step = compiled(perceptron(8))
    session = step.bind()
    name = max(session.parameters, key=lambda name: session.parameters[name].size)
    shape, batch = session.parameters[name].shape, data_for(step, 0)
    batch["learning_rate"] = np.float32(0)

    def work(thread: int) -> bool:
        for i in range(100):
            if thread == 0:
                session.parameters[name] = np.full(shape, i, np.float32)
            elif thread == 1:
                found = session.parameters[name]
                if i and (found != found.flat[0]).any():
                    return False
            elif thread == 2:
                session.step(batch)
            elif not i % 20:
                session.save(tmp_path / "saved.safetensors")
                session.load(tmp_path / "saved.safetensors")
        return True

    session.parameters[name] = np.zeros(shape, np.float32)
    assert together(work) == [True] * THREADS


def test_batches_of_one_thread_let_the_steps_of_others_through() -> None:
    # The batches wait for another thread, which runs a step of the session that they are for.
    step = compiled(perceptron(8), optimizer=fp.optim.SGD(0.0))
    session = step.bind()
    batch = data_for(step, 0)
    with ThreadPoolExecutor(1) as pool:

        def taken() -> Iterator[Arrays]:
            for _ in range(5):
                pool.submit(session.step, batch).result(timeout=30)
                yield batch

        losses = [result.loss for result in session.steps(taken())]
    assert len(set(losses)) == 1 and len(losses) == 5 and session.steps_done == 10


def test_loops_over_batches_in_several_threads_take_turns() -> None:
    step = compiled(perceptron(8), prefetch=True)
    ours, theirs = step.bind(), step.bind()
    batch = data_for(step, 0)
    together(lambda thread: [result.loss for result in ours.steps([batch] * 30)])
    for _ in range(THREADS * 30):
        theirs.step(batch)
    assert same(ours, theirs)


def test_an_error_gives_the_turn_back() -> None:
    step = compiled(perceptron(8))
    session = step.bind()
    with pytest.raises(fp.InputError):
        session.step({})
    with ThreadPoolExecutor(1) as pool:
        pool.submit(session.step, data_for(step, 0)).result(timeout=30)


def test_ctrl_c_ends_the_wait_for_a_turn() -> None:
    step = compiled(perceptron(8))
    session, go, done = step.bind(), threading.Event(), threading.Event()

    def hold() -> None:
        with session._turn.lock:
            go.set()
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGINT)
            done.wait(30)

    thread = threading.Thread(target=hold)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started the tests may ignore it
    thread.start()
    go.wait(30)
    try:
        with pytest.raises(KeyboardInterrupt):
            session.step(data_for(step, 0))
    finally:
        done.set()
        thread.join()
        signal.signal(signal.SIGINT, before)
    assert session.step(data_for(step, 0)).loss is not None  # it never began, and nothing is broken


def _in_child(work: Callable[[], bool]) -> bool:
    """Whether `work` gives True in a forked process, within half a minute."""
    child = os.fork()
    if not child:
        code = 1
        try:
            signal.alarm(30)
            code = 0 if work() else 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_forked_process_waits_for_no_thread_that_it_does_not_have() -> None:
    step = compiled(perceptron(8))
    session, held, done = step.bind(), threading.Event(), threading.Event()
    loss = step.bind().step(data_for(step, 0)).loss

    def hold() -> None:
        with session._turn.lock:
            held.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(30)
    try:
        assert _in_child(lambda: session.step(data_for(step, 0)).loss == loss)
    finally:
        done.set()
        thread.join()


def _stop_within(session: Session, work: Callable[[], None]) -> None:
    """Let the session call `work` in the middle of its steps."""
    calls = session._body.bound.calls  # type: ignore[attr-defined]
    half = len(calls) // 2
    inner = calls[half]
    calls[half] = lambda: (work(), inner())[1]


def test_a_process_forked_in_the_middle_of_a_step_has_a_broken_session() -> None:
    step = compiled(perceptron(8))
    session, within, done = step.bind(), threading.Event(), threading.Event()

    def stop() -> None:
        within.set()
        done.wait(60)

    _stop_within(session, stop)
    thread = threading.Thread(target=session.step, args=(data_for(step, 0),))
    thread.start()
    within.wait(30)

    def refuses() -> bool:
        with pytest.raises(fp.SessionError, match="load the last checkpoint, or bind again"):
            session.step(data_for(step, 0))
        return True

    try:
        assert _in_child(refuses)
    finally:
        done.set()
        thread.join()
    assert session.steps_done == 1
    session.save("/dev/null")


def test_results_stay_as_they_are_when_others_get_their_turn() -> None:
    step = fp.compile(perceptron(8))
    session = step.bind()
    given = [data_for(step, seed) for seed in range(6)]
    results = [session.step(batch) for batch in given]
    seen = [result.outputs["logits"].tobytes() for result in results]
    together(lambda thread: [session.step(given[thread]) for _ in range(20)])
    assert [result.outputs["logits"].tobytes() for result in results] == seen and len(set(seen)) == 6
