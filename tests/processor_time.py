"""How much processor time each test takes; one that takes too much and is not marked `thorough` fails.

Seconds are those of one processor, as a multiple of what a loop takes in the same process, so that neither a slow
machine nor a busy one changes the verdict. Processes that a test has started and waited for count. What is made once
and kept does not: fixtures of a session or a module, and machine code on its first use.
"""

from __future__ import annotations

import mmap
import os
import resource
import struct
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from foreplan.base import disk_cache
from foreplan.jit import machine
from tests.profile import PROFILE, Profile

LIMIT = 3.0  # seconds for a usual test
# Neighbours that share caches and cores slow most tests down more than the loop below: the same test has taken from 2.1
# to 3.1 s. What fails is certainly too much.
NOISE = 1.6
# Times as long, beside PyTorch, of which a process takes a second to import it, and its exporter two; and with NVIDIA's
# libraries, which search and compile for seconds.
BESIDE_OTHERS = 4
LOOP_SECONDS = 0.0022  # of the loop below on the processor whose seconds these are, an AMD EPYC of 2024
PROPERTY = "processor_seconds"  # of reports: what `--junitxml` writes of each test

_NUMBER = struct.Struct("d")
_aside = mmap.mmap(-1, _NUMBER.size)  # seconds that do not count; forked processes add theirs
_lock = threading.Lock()
_depth = 0  # of what is uncounted in this process


def loop_seconds() -> float:
    """The processor time of a loop in Python, the least of a few."""
    found = []
    for _ in range(5):
        begun, total = time.thread_time(), 0
        for i in range(100_000):
            total += i & 7
        found.append(time.thread_time() - begun)
    return min(found)


def _used(who: int) -> float:
    usage = resource.getrusage(who)
    return usage.ru_utime + usage.ru_stime


def _set_aside() -> float:
    (seconds,) = _NUMBER.unpack(_aside[:])
    return float(seconds)


def _put_aside(seconds: float) -> None:
    with _lock:
        _aside[:] = _NUMBER.pack(_set_aside() + seconds)


@contextmanager
def uncounted() -> Iterator[None]:
    """What the body makes is made once and kept: it is no part of the test that happens to be the first to need it."""
    global _depth
    _depth += 1
    begun = _used(resource.RUSAGE_SELF) + _used(resource.RUSAGE_CHILDREN)
    try:
        yield
    finally:
        _depth -= 1
        if not _depth:
            _put_aside(_used(resource.RUSAGE_SELF) + _used(resource.RUSAGE_CHILDREN) - begun)


def leave_compilation_out() -> None:
    """From now on it does not count what machine code takes that is made, in any thread and forked process."""
    make = machine._made

    def made(module: machine.Module, store: bool) -> bytes:
        begun = time.thread_time()
        try:
            return make(module, store)
        finally:
            if not _depth:
                _put_aside(time.thread_time() - begun)

    machine._made = made


def _compiled_elsewhere(since: float) -> bool:
    """Whether processes have made machine code and kept it on disk since then."""
    folder = disk_cache._folder()
    if folder is None or not folder.is_dir():
        return False
    return any(entry.name.endswith(".o") and entry.stat().st_mtime >= since for entry in os.scandir(folder))


class ProcessorTime:
    """The part of pytest that measures and judges.

    Args:
        limit: seconds of a test that is not marked `thorough`; 0: nothing is judged.
        noise: times the limit, what fails.
    """

    def __init__(self, limit: float, noise: float = NOISE) -> None:
        self.limit = limit
        self.noise = noise
        self.loop = loop_seconds()
        self.workers: list[float] = []
        self.clock = 0.0
        self.begun = self.children = self.aside = 0.0

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self) -> None:
        """A test begins."""
        self.clock = time.time()
        self.begun, self.children = _used(resource.RUSAGE_SELF), _used(resource.RUSAGE_CHILDREN)
        self.aside = _set_aside()

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Iterator[None]:
        """What is made for many tests."""
        if fixturedef.scope == "function":
            return (yield)
        with uncounted():
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
        """Judge a test when it has ended well."""
        report = yield
        if call.when == "call":
            own, children = self._taken()
            report.user_properties.append((PROPERTY, round(own + children, 3)))
            others = item.path.parent.name == "torch" or item.get_closest_marker("cuda_wheels") is not None
            limit = self.limit * (BESIDE_OTHERS if others else 1)
            if report.passed and item.get_closest_marker("thorough") is None and self._too_long(own, children, limit):
                report.outcome, report.longrepr = "failed", self._verdict(own + children, limit)
        return report

    def _taken(self) -> tuple[float, float]:
        """Seconds of this process since the test began, and of those that it has waited for."""
        own = _used(resource.RUSAGE_SELF) - self.begun - (_set_aside() - self.aside)
        return own, _used(resource.RUSAGE_CHILDREN) - self.children

    def _too_long(self, own: float, children: float, limit: float) -> bool:
        fails = limit * self.noise
        if not limit or own + children <= fails * self.loop / LOOP_SECONDS:
            return False
        self.loop = max(self.loop, loop_seconds())  # the machine may have become busy
        most = fails * self.loop / LOOP_SECONDS
        return own > most or (own + children > most and not _compiled_elsewhere(self.clock))

    def _verdict(self, seconds: float, limit: float) -> str:
        return (
            f"took {seconds * LOOP_SECONDS / self.loop:.1f} s of processor time, and a test that is not marked "
            f"`thorough` may take {limit:g} s: let it do less (tests/profile.py), or mark it"
        )

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """A worker of several tells what it has taken, all in all."""
        if hasattr(session.config, "workeroutput"):
            total = _used(resource.RUSAGE_SELF) + _used(resource.RUSAGE_CHILDREN)
            session.config.workeroutput[PROPERTY] = total

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Gather what workers have told."""
        self.workers.append(getattr(node, "workeroutput", {}).get(PROPERTY, 0.0))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Say what the whole run has taken."""
        total = _used(resource.RUSAGE_SELF) + (sum(self.workers) or _used(resource.RUSAGE_CHILDREN))
        terminalreporter.write_line(f"processor time: {total:.0f} s")


def plugin() -> ProcessorTime:
    """For the amount of testing that is asked for: with all cases of each, tests may take their time."""
    return ProcessorTime(LIMIT if PROFILE < Profile.ALL else 0)
