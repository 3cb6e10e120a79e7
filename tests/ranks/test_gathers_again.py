"""What is recomputed gathers the weights that it reads once more: nothing keeps them whole until the backward pass."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

import foreplan as fp
from foreplan import optim
from foreplan.graph import Graph
from foreplan.lower.exchanges import Exchanges
from foreplan.ops.collective import Begin
from foreplan.passes.ranks import setting
from tests.profile import values
from tests.ranks.kept import compiled_once
from tests.ranks.training import assert_same, trained

WAYS: dict[str, dict[str, Any]] = {
    "checkpoint": {"checkpoint": ["model.layers.*"]},
    "recompute": {"recompute": ["model.layers.*"]},
    "budget": {"budget": 0.6, "fission": "off"},
}


def llama(batch: int, layers: int = 8, width: int = 64) -> Graph:
    """Blocks that are alike."""
    sizes = f"layers={layers},width={width},heads=4,kv_heads=4,features=128,vocabulary=64,tied=False"
    return fp.models.build(f"llama:{sizes},seq=32,batch={batch}")


def again(step: fp.Compiled) -> int:
    """How often a plan gathers what it has gathered before."""
    ops = [step.program.calls[each.action].op for each in step.plan.steps]
    return sum(isinstance(op, Begin) and op.wait for op in ops)


def compiled(**options: Any) -> fp.Compiled:
    """A step of four ranks, with parameters in parts."""
    options = {"target": "numpy", "ranks": 4, "shard": "parameters"} | options
    return compiled_once(llama(16, layers=6), fp.losses.cross_entropy, optim.AdamW(0.01), **options)


@pytest.mark.parametrize(("way", "precision"), values(WAYS, ["float32", "bf16"]))
def test_weights_are_not_kept_whole(way: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a block or two are there, and others have gone."""
    monkeypatch.setattr(setting, "LEAST", 1 << 14)
    step = compiled(precision=precision, **WAYS[way])
    figures = step.estimate()
    whole = figures["weights"]["trained"]["numbers"] * (2 if precision == "bf16" else 4)
    assert again(step) > 0
    assert figures["categories"]["communication"] < 0.6 * whole
    plain = compiled(precision=precision)
    assert figures["arena_bytes"] < 0.65 * plain.arena_bytes
    sent = Exchanges.of(step.program, step.plan).sent / Exchanges.of(plain.program, plain.plan).sent
    assert 1 < sent < 1.7  # blocks that share a bucket gather it by themselves


@pytest.mark.parametrize("way", WAYS)
def test_bits_are_the_same(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setting, "LEAST", 1 << 12)
    small = partial(llama, layers=4, width=32)
    plain = trained(small, optim.AdamW(0.01), 3, 6, shard="parameters")
    found = trained(small, optim.AdamW(0.01), 3, 6, shard="parameters", **WAYS[way])
    for one, other in zip(found, plain):
        assert_same(one, other)
        assert len(one.log) > len(other.log)


def test_a_file_has_them(tmp_path: Path) -> None:
    made, path = compiled(**WAYS["checkpoint"]), tmp_path / "a.plan"
    made.save(path)
    read = fp.load_plan(path)
    assert read.plan == made.plan and again(read) == again(made) > 0
    assert read.estimate()["sent_bytes"] == made.estimate()["sent_bytes"]
