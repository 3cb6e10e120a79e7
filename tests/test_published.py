"""What `benchmarks/published.py` holds estimates against: the models are those of the sources, and so are states."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

import foreplan as fp
from foreplan import optim
from foreplan.frontend.losses import attach_loss
from foreplan.passes.ranks import Ranks
from foreplan.passes.ranks.layout import buckets_of

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"
COUNTS = {
    "Llama 2 7B": 6_738_415_616,
    "Llama 2 13B": 13_015_864_320,
    "Llama 2 70B": 68_976_648_192,
    "Llama 3.1 8B": 8_030_261_248,
    "Llama 3.1 70B": 70_553_706_496,
}
TRAINED = {"litgpt-7b-1": 4_194_304, "litgpt-13b-1": 6_553_600}  # that the source prints


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script."""
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.delitem(sys.modules, "published", raising=False)
    import published

    return published


def test_models_have_the_published_numbers(published: ModuleType) -> None:
    for model, count in COUNTS.items():
        row = replace(next(row for row in published.ROWS if row.model == model), seq=8, lora=0)
        assert sum(value.type.size for value in published.model_of(row).parameters) == count


def test_adapters_have_the_published_numbers(published: ModuleType) -> None:
    for row in published.ROWS:
        if row.key in TRAINED:
            graph = published.model_of(replace(row, seq=8))
            assert sum(value.type.size for value in graph.parameters) == TRAINED[row.key]


@pytest.mark.parametrize("ranks", [4, 8, 128])
@pytest.mark.parametrize("model", ["Llama 2 7B", "Llama 3.1 8B"])
def test_states_are_twelve_bytes_a_parameter(published: ModuleType, model: str, ranks: int) -> None:
    """To the byte: float32 parameters and Adam's two, of which each rank has its part, and nothing is filled up."""
    row = next(row for row in published.ROWS if row.model == model)
    graph = attach_loss(published.model_of(replace(row, seq=8)), loss=fp.losses.cross_entropy)
    trained = {value.name for value in graph.parameters}
    buckets = buckets_of(graph, trained, Ranks(ranks, "parameters"), optim.AdamW(1e-4))
    part = sum(bucket.home.type.nbytes for bucket in buckets)
    assert 3 * part * ranks == 12 * COUNTS[model]


def test_what_the_file_has_is_twelve_bytes_a_parameter(published: ModuleType) -> None:
    """Beside it there are tables of rotary embeddings, and numbers such as the count of steps."""
    rows = json.loads(published.FILE.read_text())
    for row in published.ROWS:
        if row.key not in rows or row.narrow or row.shard != "parameters":
            continue
        figures = rows[row.key]["plain"]
        tables = 2 * 4 * row.seq * 64  # cosines and sines of half a head's 128
        rest = published.kept(figures) - 12 * COUNTS[row.model] // row.ranks - tables
        assert 0 <= rest <= 128, row.key


def test_formulas_of_others(published: ModuleType) -> None:
    assert round(published.deepspeed() / 2**30, 2) == 29.01  # as the issue has it
    row = next(row for row in published.ROWS if row.key == "megatron-597")
    states, _ = published.megatron(row, COUNTS[row.model])
    assert states == 7.5 * COUNTS[row.model]
