"""Runs cases of a fuzz target in processes that may die, and keeps those that show a defect."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import itertools
import multiprocessing
import multiprocessing.connection
import os
import random
import re
import resource
import shutil
import signal
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from foreplan.base.errors import ForeplanError
from foreplan.jit import machine
from tests.fuzz.target import Target

KINDS = ("fine", "refused", "raw error", "hang", "blow-up", "crash")
DEFECTS = KINDS[2:]
SECONDS = 10  # of processor time, for a case
WAIT = 300  # seconds of the clock, for a case that waits and computes nothing
GROWTH = 1 << 30  # bytes a case may add to what is resident
RESERVED = 4 << 30  # bytes it may add to what is allocated: the machine survives a case that takes all it gets
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FRAME = re.compile(r'File "([^"]+)", line (\d+)')
Case = int | Path  # the number of a drawn one, or a file


@dataclass(frozen=True)
class Result:
    """How a case ended.

    Attributes:
        kind: one of KINDS.
        error: the exception's type or the signal; empty where there is no defect.
        place: the innermost line of foreplan, such as `cpu/table.py:88`.
        text: the traceback.
    """

    kind: str
    error: str = ""
    place: str = ""
    text: str = ""


@dataclass
class Tally:
    """What the cases of a target came to: how many by kind, and the smallest case of each defect by its name."""

    target: str
    counts: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    failures: dict[str, tuple[bytes, Result]] = field(default_factory=dict)

    def add(self, result: Result, made: Callable[[], bytes]) -> None:
        """Count a case; its content is made where it shows a defect."""
        self.counts[result.kind] += 1
        if result.kind not in DEFECTS:
            return
        content = made()
        name = re.sub(r"[^\w.]+", "-", f"{result.kind} {result.error} {result.place}")
        if name not in self.failures or len(content) < len(self.failures[name][0]):
            self.failures[name] = content, result

    def write(self, folder: Path) -> None:
        """Each failure as the bytes of its case, and its traceback beside it."""
        for name, (content, result) in self.failures.items():
            (folder / self.target).mkdir(parents=True, exist_ok=True)
            (folder / self.target / f"{name}.case").write_bytes(content)
            (folder / self.target / f"{name}.txt").write_text(result.text, errors="backslashreplace")


def targets() -> dict[str, Target]:
    """Every target, by name."""
    modules = (importlib.import_module(f"tests.fuzz.{file.stem}") for file in sorted(HERE.glob("[a-z]*.py")))
    found = (module.TARGET for module in modules if hasattr(module, "TARGET"))
    return {target.name: target for target in found}


def fuzz(target: Target, seed: int, cases: int | None, seconds: float | None, jobs: int) -> Tally:
    """Run the target's corpus, then drawn cases until there were enough or the time is over."""
    target.prepare()
    tally, start = Tally(target.name), time.monotonic()
    waiting = _cases(target, cases, None if seconds is None else start + seconds)
    workers: list[_Worker] = []
    for case in itertools.islice(waiting, jobs):
        workers.append(_Worker(target, seed))
        workers[-1].give(case)
    while busy := [worker for worker in workers if worker.case is not None]:
        ready = multiprocessing.connection.wait([worker.pipe for worker in busy], timeout=1)
        for i, worker in enumerate(workers):
            if worker.case is None or not (worker.pipe in ready or worker.is_late):
                continue
            case, result = worker.case, worker.take()
            tally.add(result, partial(_content, target, seed, case))
            if result.kind in DEFECTS:
                worker.end()
                worker = workers[i] = _Worker(target, seed)
            if (following := next(waiting, None)) is not None:
                worker.give(following)
    for worker in workers:
        worker.end()
    tally.seconds = time.monotonic() - start
    return tally


def _cases(target: Target, cases: int | None, end: float | None) -> Iterator[Case]:
    yield from sorted((HERE / "corpus" / target.name).glob("*"))
    for number in itertools.count() if cases is None else range(cases):
        if end is not None and time.monotonic() > end:
            return
        yield number


def _content(target: Target, seed: int, case: Case) -> bytes:
    return case.read_bytes() if isinstance(case, Path) else target.draw(random.Random(f"{seed}/{target.name}/{case}"))


class _Worker:
    """A process that runs one case after another. It ends with the first that shows a defect."""

    def __init__(self, target: Target, seed: int) -> None:
        self.case: Case | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="fuzz-")
        self._log = Path(self._folder.name, "log")  # where the dying process says where it was
        self.pipe, theirs = multiprocessing.Pipe()
        forked = multiprocessing.get_context("fork")
        arguments = (target, seed, self.pipe, theirs, Path(self._folder.name), self._log)
        self._process = forked.Process(target=_work, args=arguments, daemon=True)
        self._process.start()
        theirs.close()

    def give(self, case: Case) -> None:
        self.case, self._since = case, time.monotonic()
        self.pipe.send(case)

    @property
    def is_late(self) -> bool:
        return time.monotonic() > self._since + WAIT

    def take(self) -> Result:
        """How the case ended; a process that has died of it, or that waits for ever, is told by a signal."""
        self.case = None
        try:
            if self.pipe.poll():
                result: Result = self.pipe.recv()
                return result
            self._process.kill()
        except EOFError:
            pass
        self._process.join()
        code, text = self._process.exitcode or 0, self._log.read_text()
        late = self.is_late or code == -signal.SIGPROF
        error = signal.Signals(-code).name if code < 0 else f"exit {code}"
        places = (_place(file, int(line)) for file, line in FRAME.findall(text))
        return Result("hang" if late else "crash", error, next(filter(None, places), ""), text or error)

    def end(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.pipe.send(None)
        self._process.join()
        self.pipe.close()
        self._folder.cleanup()


def _work(target: Target, seed: int, parents: Connection, pipe: Connection, home: Path, log: Path) -> None:
    """The worker's process: cases come through the pipe, and results go back."""
    parents.close()
    told = log.open("w")
    faulthandler.enable(told)
    faulthandler.register(signal.SIGPROF, told, all_threads=False, chain=True)
    _spare_compilation()
    _limit(resource.RLIMIT_DATA, _memory("VmData") + RESERVED)
    _limit(resource.RLIMIT_CORE, 0)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    folder = home / "case"
    while (case := _next(pipe)) is not None:
        folder.mkdir()
        os.chdir(folder)
        pipe.send(_run(target, seed, case, folder))
        os.chdir(home)
        shutil.rmtree(folder)


def _next(pipe: Connection) -> Case | None:
    with contextlib.suppress(EOFError):
        found: Case | None = pipe.recv()
        return found
    return None


def _run(target: Target, seed: int, case: Case, folder: Path) -> Result:
    _allow(SECONDS)
    before, peak = _memory("VmRSS"), _memory("VmHWM")
    result = Result("fine")
    content = _content(target, seed, case)
    try:
        # As in the strictest process: whoever calls may have asked for errors in place of warnings.
        with np.errstate(all="raise"), warnings.catch_warnings():
            warnings.simplefilter("error")
            target.run(content, folder)
    except ForeplanError:
        result = Result("refused")
    except BaseException as error:
        frames = ((frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__))
        places = [place for file, line in frames if (place := _place(file, line))]
        kind = "blow-up" if isinstance(error, MemoryError) else "raw error"
        result = Result(kind, type(error).__name__, places[-1] if places else "", traceback.format_exc())
    _allow(0)
    highest = _memory("VmHWM")
    if highest > peak and highest - before > GROWTH and result.kind not in DEFECTS:
        result = Result("blow-up", f"{highest - before >> 20} MiB", "", f"{highest - before} bytes more at the peak")
    return result


def _allow(seconds: float) -> None:
    """So much processor time from now on; 0: as much as it wants. The kernel counts ticks, and a limit on those of a
    whole process (RLIMIT_CPU) drifts away from what it says of its past."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


def _spare_compilation() -> None:
    """The first run on a machine compiles the planner, which counts for none."""
    make = machine._made

    def made(module: machine.Module, store: bool) -> bytes:
        _allow(0)
        try:
            return make(module, store)
        finally:
            _allow(SECONDS)

    machine._made = made


def _limit(which: int, amount: int) -> None:
    resource.setrlimit(which, (amount, resource.getrlimit(which)[1]))


def _memory(key: str) -> int:
    """Bytes of this process, as Linux counts them under a key: VmRSS what is resident, VmHWM the most that was."""
    found = re.search(rf"^{key}:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def _place(file: str, line: int) -> str:
    """A line of foreplan's own code, by its path in the repository; empty for all others."""
    path = Path(file)
    if not path.is_relative_to(ROOT) or path.is_relative_to(ROOT / "tests") or ".venv" in path.parts:
        return ""
    return f"{path.resolve().relative_to(ROOT)}:{line}"
