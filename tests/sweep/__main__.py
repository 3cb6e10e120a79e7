"""Draws by hand: python -m tests.sweep --op conv --judge cpu --draws 10000 --seed 1."""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import sys
import time
import traceback
from collections import Counter

from tests.sweep.case import Case
from tests.sweep.draws import drawn
from tests.sweep.judges import JUDGES, WHOLE
from tests.sweep.table import ENTRIES

AT_ONCE = 128  # cases that are prepared together


def sweep(name: str, judge: str, draws: int, seed: int, minutes: float, show: int, one: bool) -> int:
    """Draw cases of an op, or whole steps, and judge each; returns how many failed, and prints some."""
    kinds: Counter[str] = Counter()
    started, done, empty = time.monotonic(), 0, 0
    cases: list[Case | str] = []
    for i in range(draws):
        if time.monotonic() - started > 60 * minutes:
            break
        if i == len(cases):
            cases += _prepared(name, judge, range(i, min(i + AT_ONCE, draws)), seed, one)
        case = cases[i]
        done += 1
        try:
            empty += _judged(judge, case, one) == 0
        except Exception as error:
            kind = "".join(traceback.format_exception_only(error)).strip().splitlines()[0][:600]
            place = traceback.extract_tb(error.__traceback__)[-1]
            kinds[f"{place.filename.rsplit('/', 2)[-2:]}:{place.lineno}"] += 1
            if kinds.total() <= show:
                print(f"{name} {judge} seed {seed} draw {i}\n{case}\n  {kind}\n", flush=True)
    seconds = time.monotonic() - started
    asked = f"{done:6} draws {seconds:7.1f} s, {empty} without a kernel, {kinds.total()} failed"
    print(f"{name:24} {judge:12} {asked} {dict(kinds) or ''}", flush=True)
    return kinds.total()


def _judged(judge: str, case: Case | str, one: bool) -> int:
    return WHOLE[judge](case) if isinstance(case, str) else JUDGES[judge].judge(case, one)


def _prepared(name: str, judge: str, numbers: range, seed: int, one: bool) -> list[Case | str]:
    """Some draws, and all that they need."""
    if judge in WHOLE:
        return [f"{name} {seed} {i}" for i in numbers]
    cases = [JUDGES[judge].draw(ENTRIES[name], drawn(name, seed, i)) for i in numbers]
    with contextlib.suppress(Exception):  # which comes again when the case is judged
        JUDGES[judge].prepare(cases, one)
    return list(cases)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.sweep", description=__doc__)
    parser.add_argument("--op", action="append", help="an op; all by default")
    parser.add_argument("--judge", action="append", choices=[*JUDGES, *WHOLE], help="all by default")
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=60.0, help="for one op and judge, at most")
    parser.add_argument("--show", type=int, default=3, help="failing cases that are printed")
    parser.add_argument(
        "--one", action="store_true", help="each case by one of its kernels: more cases in the same time"
    )
    given = parser.parse_args()
    faulthandler.enable()
    failed = 0
    judges = given.judge or [*JUDGES, *WHOLE]
    for name in given.op or ENTRIES:
        for judge in judges:
            if judge in JUDGES and JUDGES[judge].serves(ENTRIES[name], name):
                failed += sweep(name, judge, given.draws, given.seed, given.minutes, given.show, given.one)
    for judge in judges:
        if judge in WHOLE:
            failed += sweep("step", judge, given.draws, given.seed, given.minutes, given.show, given.one)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
