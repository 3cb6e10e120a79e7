"""`python -m tests.fuzz`: look for inputs that foreplan neither takes nor refuses."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from tests.fuzz.runner import DEFECTS, KINDS, Tally, fuzz, targets


def main() -> int:
    """Run the chosen targets one after the other; 1 if any shows a defect."""
    known = targets()
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="TARGET", help=f"some of: {', '.join(known)}; all by default")
    amount = parser.add_mutually_exclusive_group(required=True)
    amount.add_argument("--minutes", type=float, help="how long, all targets together")
    amount.add_argument("--cases", type=int, help="how many of each target are drawn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at a time")
    parser.add_argument("--out", type=Path, default=Path("out/fuzz"), help="where failures are written")
    asked = parser.parse_args()
    if unknown := sorted(set(asked.names) - set(known)):
        parser.error(f"there is no target {unknown[0]!r}")
    names = asked.names or list(known)
    seconds = None if asked.minutes is None else asked.minutes * 60 / len(names)
    found: list[Tally] = []
    for name in names:
        found.append(fuzz(known[name], asked.seed, asked.cases, seconds, asked.jobs))
        found[-1].write(asked.out)
        for failure, (content, result) in found[-1].failures.items():
            print(f"{asked.out / name / failure}.case: {len(content)} bytes\n{_last_lines(result.text)}\n")
    print(_table(found))
    return int(any(tally.failures for tally in found))


def _last_lines(text: str) -> str:
    shown = text.encode(errors="backslashreplace").decode()
    return "\n".join(f"    {line[:200]}" for line in shown.splitlines()[-12:])


def _table(found: list[Tally]) -> str:
    lines = [f"{'target':<16}{'cases':>9}" + "".join(f"{kind:>11}" for kind in KINDS) + f"{'kinds':>8}{'seconds':>9}"]
    for tally in found:
        counts = "".join(f"{tally.counts[kind]:>11,}" for kind in KINDS)
        lines.append(
            f"{tally.target:<16}{tally.counts.total():>9,}{counts}{len(tally.failures):>8}{tally.seconds:>9.0f}"
        )
    defects = sum(tally.counts[kind] for tally in found for kind in DEFECTS)
    return "\n".join([*lines, f"{defects} of {sum(tally.counts.total() for tally in found):,} cases show a defect"])


if __name__ == "__main__":
    sys.exit(main())
