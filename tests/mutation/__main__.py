"""Mutants by hand: which of them no test notices.

    python -m tests.mutation planner/costs.py --draw 100 --seed 0 -- tests/planner/test_costs.py

Tests run once, and every line of the module learns which tests reach it. Each mutant then gets a copy of the process
(fork), runs the tests that reach its lines, quickest first, and ends with the first that fails. A copy has no threads:
where a test waits for some, as those by JAX do, mutants are "stuck", and say nothing.
"""

from __future__ import annotations

import argparse
import ast
import functools
import os
import random
import resource
import signal
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings

from tests.mutation.changes import Change, changed, changes, install, objects

PACKAGE = Path(__file__).resolve().parents[2] / "foreplan"
LEAST = 20  # seconds of processor time that a mutant has, beside three times what its tests took
WAIT = 60  # seconds of the clock, beside ten times that


class Judge:
    """Takes the place of pytest's loop over tests."""

    def __init__(self, file: Path, draw: int, seed: int, most: float) -> None:
        self.file, self.draw, self.seed, self.most = str(file), draw, seed, most
        self.reached: dict[int, set[int]] = defaultdict(set)
        self.seconds: dict[str, float] = Counter()
        self.failed = self.is_mutant = False
        self.test = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A mutant ends with its first failure."""
        self.seconds[report.nodeid] += report.duration
        if report.failed and self.is_mutant:
            os._exit(1)
        self.failed |= report.failed

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """All tests, then all drawn mutants."""
        items = session.items
        sys.settrace(self._trace)
        for self.test, item in enumerate(items):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=next(iter(items[self.test + 1 :]), None))
        sys.settrace(None)
        if self.failed:
            pytest.exit("mutants are judged by tests that pass", returncode=1)
        tree = ast.parse(Path(self.file).read_text())
        before, found = compile(tree, self.file, "exec"), changes(tree)
        drawn = random.Random(self.seed).sample(range(len(found)), min(self.draw, len(found)))
        tally: Counter[str] = Counter()
        for change in (found[i] for i in sorted(drawn)):
            tests = self._tests(items, change)
            after = compile(changed(tree, change), self.file, "exec")
            end = self._judge(tests, before, after) if tests else "unreached"
            tally[end] += 1
            if end != "killed":
                where = f"{os.path.relpath(self.file, PACKAGE)}:{change.lines[-1]} {change.function}"
                print(f"{end} {where}: {change.before!r} -> {change.after!r} ({len(tests)} tests)", flush=True)
        print(f"{self.file}: {len(found)} mutants, {len(drawn)} drawn: {dict(tally)}")
        return True

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename != self.file:
            return None
        self.reached[frame.f_lineno].add(self.test)
        return self._trace

    def _tests(self, items: list[pytest.Item], change: Change) -> list[pytest.Item]:
        """Those that reach a change, the quickest first, as many as take `most` seconds."""
        reaching = sorted(set().union(*(self.reached[line] for line in change.lines)))
        tests, seconds = [], 0.0
        for item in sorted((items[i] for i in reaching), key=lambda item: self.seconds[item.nodeid]):
            if seconds < self.most:
                tests.append(item)
            seconds += self.seconds[item.nodeid]
        return tests

    def _judge(self, tests: list[pytest.Item], before: CodeType, after: CodeType) -> str:
        """How a mutant ends."""
        seconds = sum(self.seconds[item.nodeid] for item in tests)
        child = os.fork()
        if child == 0:
            try:
                self._be(tests, before, after, int(LEAST + 3 * seconds))
            finally:
                os._exit(1)
        late = time.monotonic() + WAIT + 10 * seconds
        while not (done := os.waitpid(child, os.WNOHANG))[0]:
            if time.monotonic() > late:
                os.kill(child, signal.SIGKILL)
            time.sleep(0.01)
        ends = {0: "survived", 2: "unreached", -signal.SIGKILL: "stuck"}
        return ends.get(os.waitstatus_to_exitcode(done[1]), "killed")

    def _be(self, tests: list[pytest.Item], before: CodeType, after: CodeType, limit: int) -> None:
        self.is_mutant = True
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
        tests[0].config.pluginmanager.unregister(name="terminalreporter")
        if not install(before, after):
            os._exit(2)
        for cache in objects():
            made = str(getattr(cache, "__module__", "")) if isinstance(cache, functools._lru_cache_wrapper) else ""
            if made.startswith(("foreplan", "tests")) and not made.startswith(("foreplan.runtime.cpu", "foreplan.jit")):
                cache.cache_clear()  # but what was compiled stays
        for item, following in zip(tests, [*tests[1:], None]):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        os._exit(0)


def main() -> int:
    """Read the command line, and judge."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation")
    parser.add_argument("file", help="a module of foreplan, such as planner/costs.py")
    parser.add_argument("tests", nargs="+", help="tests, after --")
    parser.add_argument("--draw", type=int, default=100, help="how many mutants")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most", type=float, default=20.0, help="seconds of tests that a mutant runs")
    given = parser.parse_args()
    quick = (Phase.explicit, Phase.generate)
    settings.register_profile(
        "mutants", derandomize=True, database=None, deadline=None, phases=quick, suppress_health_check=list(HealthCheck)
    )
    settings.load_profile("mutants")
    judge = Judge(PACKAGE / given.file, given.draw, given.seed, given.most)
    return pytest.main(["-q", "-p", "no:cacheprovider", "--no-summary", *given.tests], plugins=[judge])


if __name__ == "__main__":
    sys.exit(main())
