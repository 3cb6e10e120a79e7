"""The ratchet: no zoo model's plan grows. Where a larger one is meant, benchmarks/plan_sizes.py writes it down."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

import foreplan as fp
from tests.profile import cases

pytestmark = pytest.mark.whole_search

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "plan_sizes.py"
KEPT = json.loads(BENCHMARK.with_suffix(".json").read_text())


def test_every_model_is_kept() -> None:
    assert set(KEPT) == set(fp.models.names())


@pytest.mark.parametrize("name", sorted(set(KEPT) - {"mlp", "llama", "lstm_lm"}))  # nearly all of which is parameters
def test_bfloat16_takes_less(name: str) -> None:
    """Of what comes on top of parameters and momentum: about half, and converted weights."""
    persistent = 2 * sum(value.type.nbytes for value in fp.models.build(name).parameters)
    for form in ("training", "training, free"):
        assert KEPT[name][f"{form}, bf16"] - persistent <= 0.8 * (KEPT[name][form] - persistent)


@pytest.mark.slow
@pytest.mark.parametrize("name", cases(KEPT, thorough=set(KEPT) - {"mlp", "gpt2_small", "resnet18"}))
def test_no_plan_has_grown(name: str) -> None:
    sizes = runpy.run_path(str(BENCHMARK))["sizes"](name)
    grown = {form: (nbytes, KEPT[name][form]) for form, nbytes in sizes.items() if nbytes > KEPT[name][form]}
    assert not grown
