"""What `benchmarks/gpu.py` measures of ours, on the stand-in for a card."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from foreplan.runtime.cuda.device import device_named
from foreplan.runtime.cuda.libraries import capture, driver
from foreplan.runtime.inputs import made_up
from tests.gpu.card import FakeCard
from tests.gpu.compiled import needs_gcc

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu.py"


@needs_gcc
def test_a_step_of_ours_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    card, device, case = FakeCard(), device_named("h100"), ("mlp:width=32,batch=8", "float32")
    monkeypatch.setattr(driver, "card", lambda: card)
    monkeypatch.setattr(capture, "captured", lambda: device)
    benchmark = runpy.run_path(str(BENCHMARK))
    benchmark["compiled"](*case, "cuda:h100").save(benchmark["plan_file"](str(tmp_path), *case), kernels=True)
    step = benchmark["compiled"](*case, "cuda:h100")
    session, data = step.bind(), made_up(step.program)
    losses = [float(session.step(data).loss) for _ in range(8 + 5)]  # it takes 8 before it is measured
    for plans in ("", str(tmp_path)):
        steps, known = benchmark["ours"](*case, plans)
        assert [steps(1), steps(1), steps(3)] == [losses[8], losses[9], losses[12]]
        assert 0 < known["arena"] < known["planned"] and known["with_copies"] > 0
        assert known["flops"] < known["peak_flops_per_second"]
