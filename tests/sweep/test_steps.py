"""Drawn training steps, compiled, planned and run."""

from __future__ import annotations

import pytest

from tests.sweep.judges import WHOLE, cpu

STEPS = 8


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(STEPS))
@pytest.mark.parametrize("judge", WHOLE)
def test_a_drawn_step(judge: str, seed: int) -> None:
    cpu.require()
    WHOLE[judge](f"step 0 {seed}")
