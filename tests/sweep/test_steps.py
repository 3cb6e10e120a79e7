"""Drawn training steps, compiled, planned and run."""

from __future__ import annotations

import pytest

from tests.sweep.judges import cpu, step

STEPS = 8


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(STEPS))
def test_a_drawn_step(seed: int) -> None:
    cpu.require()
    step.judge(f"step 0 {seed}")
