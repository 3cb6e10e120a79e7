"""Mutants by the thousand: each executed, classed by its result alone, and shown to the verifier.

A mutant is harmful where, run on real bytes under poison (`executor`), something is wrong or missing at the end,
misaligned, out of bounds, or an effect does not happen exactly once.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from foreplan.base.errors import VerificationError
from foreplan.planner import Plan, Problem, verify
from tests.planner.executor import Harm, Machine
from tests.planner.good_plans import Base, bases
from tests.planner.mutants import KINDS, RARE


def harms(mutant: Plan, base: Base) -> bool:
    """Whether a mutant's result is wrong."""
    try:
        Machine(mutant, base.problem, base.right).run()
    except Harm:
        return True
    return False


def accepts(mutant: Plan, problem: Problem) -> bool:
    """Whether the verifier passes it; figures that the damage made stale are no ground for refusing it here."""
    try:
        verify(mutant, problem)
    except VerificationError as error:
        return str(error).startswith(("lower_bound_bytes is", "peak_step is"))
    return True


@dataclass(frozen=True)
class Escape(Exception):
    """A harmful mutant that the verifier accepts."""

    kind: str
    base: Base
    mutant: Plan

    def __str__(self) -> str:
        return f"{self.kind}\n{self.base.problem.as_text()}{self.mutant.as_text(self.base.problem)}"


def campaign(
    seeds: Iterable[int], tries: int, seed: int = 20240, enough: float = math.inf
) -> Counter[tuple[str, bool, bool]]:
    """How many mutants there are by kind, whether they harm, and whether they are refused.

    Args:
        tries: mutants of each kind of each plan; one that equals its plan, or another, does not count.
        enough: harmful ones of a kind, after which there are no more of it.

    Raises:
        Escape: the verifier accepts a harmful one.
    """
    rng = random.Random(seed)
    counts: Counter[tuple[str, bool, bool]] = Counter()
    for base in bases(seeds):
        assert accepts(base.plan, base.problem) and not harms(base.plan, base)
        for kind, damage in KINDS.items():
            if counts[kind, True, True] >= enough:
                continue
            seen = {base.plan}
            for _ in range(tries * RARE.get(kind, 1)):
                mutant = damage(rng, base)
                if mutant is None or mutant in seen:
                    continue
                seen.add(mutant)
                harmful, accepted = harms(mutant, base), accepts(mutant, base.problem)
                if harmful and accepted:
                    raise Escape(kind, base, mutant)
                counts[kind, harmful, not accepted] += 1
    return counts


def table(counts: Counter[tuple[str, bool, bool]]) -> str:
    """A row a kind: mutants, harmful, of which refused, harmless, of which refused."""
    rows = ["| kind | mutants | harmful | refused | harmless | refused |", "|---|---|---|---|---|---|"]
    for kind in [*KINDS, "all"]:
        row = {
            (harmful, refused): sum(
                n for (k, h, r), n in counts.items() if kind in (k, "all") and (h, r) == (harmful, refused)
            )
            for harmful in (True, False)
            for refused in (True, False)
        }
        harmful, harmless = row[True, True] + row[True, False], row[False, True] + row[False, False]
        rows.append(
            f"| {kind} | {harmful + harmless:,} | {harmful:,} | {row[True, True]:,} | {harmless:,} | "
            f"{row[False, True]:,} |"
        )
    return "\n".join(rows)
