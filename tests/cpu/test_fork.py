"""Steps on several threads in processes that were forked or spawned: they end, and give the parent's bits."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures import TimeoutError as Late
from functools import partial
from multiprocessing.context import BaseContext

import numpy as np
import pytest

import foreplan as fp
from tests.cpu.check import needs_onednn
from tests.profile import pick
from tests.runtime.micro_batches import data_for

pytestmark = [needs_onednn(), pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")]
SECONDS = 120  # after which a child counts as hung
TIMES = pick(10, 15, 50)
ROWS = 128


def compiled() -> fp.Compiled:
    """A training step with products and maps that two threads work on."""
    graph = fp.models.build(f"mlp:width=256,batch={ROWS},layers=2")
    return fp.compile(graph, loss=fp.losses.cross_entropy, optimizer=fp.optim.SGD(0.1), target="cpu:threads=2")


def bits(session: fp.Session, times: int = 2) -> bytes:
    """Of the loss and the parameters after some steps of a session that was just bound."""
    loss = [session.step(data_for(session, seed)).loss for seed in range(times)][-1]
    return np.float64(loss).tobytes() + b"".join(session.parameters[name].tobytes() for name in session.parameters)


def anew(step: fp.Compiled | None = None) -> bytes:
    return bits((step or compiled()).bind(seed=1))


def in_a_child(context: BaseContext, work: Callable[[], bytes]) -> bytes:
    """What a call gives in another process, which is killed if it hangs."""
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_send, args=(sender, work))
    child.start()
    sender.close()
    try:
        assert receiver.poll(SECONDS), "the child hangs"
        found: bytes = receiver.recv_bytes()
        child.join(SECONDS)
        assert child.exitcode == 0
        return found
    finally:
        child.kill()


def _send(sender: multiprocessing.connection.Connection, work: Callable[[], bytes]) -> None:
    sender.send_bytes(work())


FORK = multiprocessing.get_context("fork")


@pytest.mark.parametrize("stepped", [True, False], ids=["after a step", "before any step"])
def test_a_forked_child_goes_on_with_the_session(stepped: bool) -> None:
    step = compiled()
    wanted = anew(step)
    session = step.bind(seed=1)
    fresh = session if not stepped else step.bind(seed=1)
    if stepped:
        bits(session)
    for _ in range(TIMES):
        assert in_a_child(FORK, partial(bits, fresh)) == wanted
    assert bits(fresh) == wanted  # which the children have not touched


def test_a_forked_child_binds_anew() -> None:
    step = compiled()
    wanted = anew(step)
    for _ in range(TIMES):
        assert in_a_child(FORK, partial(anew, step)) == wanted


def _grandchild(step: fp.Compiled) -> bytes:
    return anew(step) + in_a_child(FORK, partial(anew, step))


def test_a_child_forks_in_its_turn() -> None:
    step = compiled()
    wanted = anew(step)
    assert in_a_child(FORK, partial(_grandchild, step)) == wanted * 2


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_pools_of_processes(method: str) -> None:
    wanted = anew()
    workers = 2 if method == "fork" else pick(1, 1, 2)  # each of which imports all
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context(method)) as pool:
        futures = [pool.submit(anew) for _ in range(4)]
        try:
            assert [future.result(SECONDS) for future in futures] == [wanted] * 4
        except Late:
            for process in list(pool._processes.values()):
                process.kill()
            raise


def test_a_watched_step_and_an_error_in_a_child() -> None:
    from foreplan.runtime.cpu import threads

    step = compiled()
    anew(step)

    def told() -> bytes:
        with pytest.raises(ZeroDivisionError):
            threads.with_team(lambda: 1 // 0, 2)
        _, timings = step.bind(seed=1).trace(data_for(step))
        return str(len(timings)).encode()

    assert int(in_a_child(FORK, told)) == len(step.plan.steps)
