"""Updated parameters of all ranks are gathered into the place of the old ones, where nothing goes on beside it."""

from __future__ import annotations

from typing import Any

import pytest

import foreplan as fp
from foreplan import optim
from foreplan.graph import Graph
from foreplan.lower.program import Program
from foreplan.ops.collective import Begin
from foreplan.passes.ranks import setting
from tests.ranks.kept import compiled_once
from tests.ranks.training import assert_close, assert_same, trained

FAR = "5GB/s,6us"  # a link beside which ranks compute


def perceptron(batch: int) -> Graph:
    """Layers that are alike, each a bucket."""
    return fp.models.build(f"mlp:width=128,layers=4,inputs=128,batch={batch}")


def compiled(**options: Any) -> fp.Compiled:
    """A step of four ranks."""
    options = {"target": "numpy", "ranks": 4, "shard": "state"} | options
    return compiled_once(perceptron(2), fp.losses.cross_entropy, optim.AdamW(0.01), **options)


def updating(program: Program) -> list[str]:
    """By stored row of parameters, the op that writes its next content, and whether it waits."""
    rows = {slot.operand.value for slot in program.stored if slot.kind == "parameter"}
    found = []
    for call in program.calls:
        if program.values[call.outputs[0].value].home in rows:
            found.append(f"{call.op.name} {getattr(call.op, 'wait', '')}".strip())
    return found


@pytest.fixture(autouse=True)
def several_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setting, "LEAST", 1 << 14)


@pytest.mark.parametrize("target", ["numpy", "cpu:threads=1"])
@pytest.mark.parametrize(("shard", "accumulate"), [("state", 1), ("gradients", 2)])
def test_no_second_row_exists(shard: str, accumulate: int, target: str) -> None:
    """Nor is it copied."""
    step = compiled(shard=shard, accumulate=accumulate, target=target)
    program = step.program if step.update is None else step.update.program
    assert len(updating(program)) > 3 and set(updating(program)) == {"begin_exchange True"}
    whole = max(slot.operand.nbytes for slot in program.stored if slot.kind == "parameter")
    written = [call.outputs[0] for call in program.calls if isinstance(call.op, Begin) and call.op.kind == "all_gather"]
    assert all(x.nbytes < whole for x in written if program.values[x.value].home < 0)


def test_over_other_links_ranks_compute_beside_it() -> None:
    """What waits later has a place of its own, and a copy."""
    step = compiled(links=FAR)
    assert "begin_exchange True" not in updating(step.program)
    assert compiled().arena_bytes <= step.arena_bytes


@pytest.mark.parametrize("shard", ["state", "gradients"])
def test_bits_are_those_of_other_links(shard: str) -> None:
    """And weights are those of one process with all samples."""
    optimizer = optim.Momentum(0.05)
    words: dict[str, Any] = {"accumulate": 2} if shard == "gradients" else {}
    alone = trained(perceptron, optimizer, 1, 24, **words)[0]
    found = trained(perceptron, optimizer, 3, 24, shard=shard, **words)
    apart = trained(perceptron, optimizer, 3, 24, shard=shard, links=FAR, **words)
    for one, other in zip(found, apart, strict=True):
        assert_same(one, other)
        assert_close(one, alone)
