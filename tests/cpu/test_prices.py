"""Whose speed a processor is believed to have, and what is said where it was not measured."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import fields

import pytest

import foreplan as fp
from foreplan.base import processor
from foreplan.graph import TensorType, Window
from foreplan.graph.types import FLOAT32
from foreplan.runtime.cpu import prices
from foreplan.runtime.cpu.instructions import Level, level
from tests.cpu.check import needs_onednn

pytestmark = needs_onednn()
GUESSED = "was measured: times are predicted as of Intel family 6 with the same instructions"


@pytest.fixture
def family(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Rates are read anew, before and after."""
    prices.rates.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    prices.rates.cache_clear()


def test_every_family_has_whole_sections_and_the_usual_one_all_levels() -> None:
    known = tomllib.loads(prices._FILE.read_text())
    assert set(known[prices.USUAL]) == set(Level.__members__)
    for sections in known.values():
        for name, section in sections.items():
            assert name in Level.__members__
            assert set(section) == {each.name for each in fields(prices.Rates)}


def test_a_family_that_was_measured_has_its_own_rates(family: pytest.MonkeyPatch) -> None:
    known = tomllib.loads(prices._FILE.read_text())
    for name in known:
        if level().name in known[name]:
            family.setattr(prices, "family", lambda name=name: name)
            prices.rates.cache_clear()
            assert prices.rates().measured == known[name][level().name]["measured"]
            assert not any(GUESSED in note for note in fp.compile(fp.models.build("mlp"), target="cpu").program.notes)


@pytest.mark.parametrize("unknown", ["", "Elsewhere family 1"])
def test_another_family_gets_the_usual_rates_and_a_note_says_so(family: pytest.MonkeyPatch, unknown: str) -> None:
    usual = tomllib.loads(prices._FILE.read_text())[prices.USUAL][level().name]
    family.setattr(prices, "family", lambda: unknown)
    family.setattr(processor, "model", lambda: "Some Processor")
    assert prices.rates().measured == usual["measured"]
    notes = fp.compile(fp.models.build("mlp"), target="cpu").program.notes
    assert [note for note in notes if GUESSED in note] == [
        "no Some Processor was measured: times are predicted as of Intel family 6 with the same instructions; --tune "
        "(tune=True) measures this one"
    ]


@pytest.mark.parametrize(
    ("width", "left", "right"),
    [(700, 0.95, 1), (3072, 0.45, 1), (6144, 0.45, 1), (1024, 0.45, 0.45), (512, 0.75, 0.75)],
)
def test_steps_that_meet_in_few_sets_of_a_cache(
    family: pytest.MonkeyPatch, width: int, left: float, right: float
) -> None:
    """Measured on an AMD EPYC held to AVX2: 48 instead of 101 GFLOP/s for [512, 3072]ᵀ·[512, 768], and 51 for
    [768, 512]·[512, 1024]; SSE4.1 has no such products.
    """
    wide = Window.dense(TensorType(FLOAT32, (512, width)))
    across = wide.viewed((width, 512), wide.strides[::-1])
    for lower, shares in ((Level.AVX2, (left, right)), (Level.SSE41, (1, 1)), (Level.AVX512, (1, 1))):
        family.setattr(prices, "level", lambda lower=lower: lower)
        assert (prices._aligned(across, -1), prices._aligned(wide, -2)) == shares
        assert prices._aligned(wide, -1) == prices._aligned(across, -2) == 1  # along the sum
