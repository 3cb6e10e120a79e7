"""Drawn training steps, compiled, planned and run."""

from __future__ import annotations

import pytest

from tests.profile import pick
from tests.sweep.judges import WHOLE, cpu, gradient
from tests.sweep.steps import NOT_DRAWN, OPS
from tests.sweep.table import ENTRIES

STEPS = pick(4, 4, 8)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(STEPS))
@pytest.mark.parametrize("judge", WHOLE)
def test_a_drawn_step(judge: str, seed: int) -> None:
    cpu.require()
    WHOLE[judge](f"step 0 {seed}")


def test_every_op_with_a_derivative_is_drawn_or_it_is_said_why_not() -> None:
    found = {name for name, entry in ENTRIES.items() if gradient.serves(entry, name)}
    assert found == {*OPS, *NOT_DRAWN}, "name each in OPS or NOT_DRAWN of tests/sweep/steps.py"
