"""Corrupt good plans, run them on real bytes under poison, and see that the verifier refuses every harmful one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from foreplan.base.errors import VerificationError
from foreplan.planner import plan, verify
from tests.planner.campaign import campaign, table
from tests.planner.mutants import KINDS
from tests.planner.problems import random_problem
from tests.profile import pick


def test_every_harmful_mutant_is_refused() -> None:
    seeds, tries, least = pick((30, 3, 30), (30, 3, 30), (200, 5, 450))
    counts = campaign(range(seeds), tries, enough=least)  # raises where one escapes
    print(table(counts))
    for kind in KINDS:
        assert counts[kind, True, True] >= least, kind
        assert counts[kind, True, False] == 0


@pytest.mark.parametrize("field", ["arena_bytes", "lower_bound_bytes", "order_lower_bound_bytes"])
def test_wrong_figures_are_refused(field: str) -> None:
    problem = random_problem(7)
    good = plan(problem)
    with pytest.raises(VerificationError, match=field):
        verify(replace(good, **{field: good.arena_bytes + 64}), problem)
