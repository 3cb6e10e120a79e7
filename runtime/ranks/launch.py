"""The world that a thread is in: mostly that of the launcher which started the process, as its environment tells."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from types import TracebackType

from foreplan.base.arguments import number_in
from foreplan.base.errors import TargetError, UsageError
from foreplan.base.units import format_seconds
from foreplan.runtime.launchers import TORCHRUN, Launch, launch_of
from foreplan.runtime.ranks.deadlines import DEADLINE, WAY_OUT
from foreplan.runtime.world.world import ALONE, World

PATIENCE = 2.0  # seconds in which all ranks come to the same end, if they do
STARTING = 50.0  # seconds in which processes of one machine start, where no deadline is said
INSTALL = "pip install 'foreplan[mpi]' brings mpi4py, an MPI library and its launcher"


@dataclass
class _Job:
    """What this process knows of the job that a launcher has started it for.

    Attributes:
        world: its ranks; None: it has not asked yet.
        said: seconds that ranks wait for one another, where it is said.
    """

    world: World | None = None
    said: float | None = None

    @property
    def deadline(self) -> float:
        """The same, or what is usual."""
        return DEADLINE if self.said is None else self.said


_job = _Job()
_asking = threading.Lock()


def launched() -> World:
    """The world of the launcher that started this process.

    Raises:
        TargetError: several processes were started, and what moves bytes between them is missing, or knows of another
            number.
    """
    with _asking:
        if _job.world is None:
            _job.world = _connected()
        return _job.world


def _connected() -> World:
    found = launch_of(os.environ)
    if found is None:
        return ALONE
    nearby = os.environ.get("MASTER_ADDR") in ("localhost", "127.0.0.1", "::1") and found.launcher == TORCHRUN
    seconds = STARTING if nearby and _job.said is None else _job.deadline
    world = _within(seconds, found, partial(_of_torchrun if found.launcher == TORCHRUN else _of_mpi, found))
    if world.size == 1:  # of a launcher that tells no number
        return ALONE
    _end_with_errors()
    return world


def _of_mpi(found: Launch) -> World:
    """The world of an MPI library."""
    try:
        from foreplan.runtime.ranks.mpi import Mpi
    except ImportError as error:
        raise TargetError(
            f"{found.launcher} started {found.size or 'some'} processes, and mpi4py, which moves bytes between them, "
            f"cannot be loaded ({error}): {INSTALL}"
        ) from None
    world = Mpi(deadline=_job.deadline)
    if world.size != (found.size or world.size):
        raise TargetError(
            f"{found.launcher} started {found.size} processes, and {world.name}, which mpi4py uses, sees {world.size}: "
            f"start them by the launcher of that library (mpiexec -n {found.size} …), for cards too; {INSTALL}"
        )
    return world


def _of_torchrun(found: Launch) -> World:
    """The world of torchrun, where there is no MPI."""
    from foreplan.runtime.ranks.gloo import connected

    try:
        return connected(_job.deadline)
    except ImportError as error:
        raise TargetError(
            f"torchrun started {found.size} processes, and PyTorch, which moves bytes between them, cannot be loaded "
            f"({error}): pip install 'foreplan[torch]', or start them by MPI's launcher (mpiexec -n {found.size} …)"
        ) from None
    except (ValueError, RuntimeError) as error:
        raise TargetError(
            f"torchrun started {found.size} processes, and PyTorch cannot connect them: {str(error).splitlines()[0]}"
        ) from None


def _within(seconds: float, found: Launch, connect: Callable[[], World]) -> World:
    """What connects ranks, by libraries that wait for ever. If it takes longer than the deadline, and what they add to
    it, the process ends and says why. mpi4py starts MPI without letting other threads run Python; so this is left to
    the thread of `faulthandler`, which prints where the process is, and what it prints as a file's name is the reason.
    """
    of = f"rank {found.rank} of {found.size or 'several'} ranks that {found.launcher} started"
    why = f"error: {of} has waited {format_seconds(seconds)} for others to start: {WAY_OUT}".replace("…", "...")
    faulthandler.dump_traceback_later(seconds + PATIENCE, exit=True, file=2)
    try:
        world: World = eval(compile("connect()", why, "eval"), {"connect": connect})
    finally:
        faulthandler.cancel_dump_traceback_later()
    return world


def begun() -> World | None:
    """The world of this process, if it has begun to speak with others."""
    return None if _job.world is ALONE else _job.world


def end(code: int) -> None:
    """What a rank does before it ends with a code. All end by themselves where all come to their ends in `PATIENCE`;
    otherwise this one ends the others, which would wait for it.
    """
    world = begun()
    if world is None:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    if world.meet(bytes(16), PATIENCE) is None:
        world.abort(code)


def _end_with_errors() -> None:
    """Let an error that nobody catches end all ranks, when it has been told."""
    told = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        told(kind, error, trace)
        if not issubclass(kind, KeyboardInterrupt):  # a signal has reached all ranks
            end(1)

    sys.excepthook = hook


_in_use: ContextVar[World | None] = ContextVar("world", default=None)


def current(deadline: float | None = None) -> World:
    """The world of this thread: that of `using`, or else of the launcher that started this process.

    Args:
        deadline: seconds that this rank waits for another one before it ends the job, with an error that names that one
            and what it waits for; None: 600, or what was said before. The first call says it.

    Raises:
        UsageError: the deadline is no number of seconds, or ranks have another one.
        TargetError: a launcher started several processes, and what moves bytes between them is missing or does not fit.
    """
    if deadline is not None:
        seconds = number_in("deadline", deadline, 0.001, 1e9)
        if _job.world not in (None, ALONE) and seconds != _job.deadline:
            raise UsageError(
                f"ranks wait for one another {_job.deadline:g} s, and {seconds:g} s are asked for: give the deadline "
                "in the first call of current"
            )
        _job.said = seconds
    return _in_use.get() or launched()


@contextmanager
def using(world: World) -> Iterator[None]:
    """Let this thread be a rank of a world until the block ends."""
    token = _in_use.set(world)
    try:
        yield
    finally:
        _in_use.reset(token)
