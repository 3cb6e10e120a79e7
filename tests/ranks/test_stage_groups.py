"""Stages of several ranks each: replicas, parts of products, and training state in parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import foreplan as fp
from foreplan import optim
from foreplan.compiled import Compiled
from foreplan.graph import Graph
from foreplan.lower.stage_times import run_stages
from tests.ranks.stages import assert_as_alone, compiled_stages, trained_alone
from tests.ranks.threads import Thread, run
from tests.ranks.training import Batch, Trained, assert_same

GPT = "gpt2_small:layers=3,width=32,heads=4,seq=8,vocabulary=60"
LLAMA = "llama:layers=3,width=32,heads=4,kv_heads=2,features=48,seq=8,vocabulary=60,tied=False"
MLP = "mlp:width=24,layers=4"
SHARDS = ["none", "state", "gradients", "parameters"]


def model(text: str) -> Callable[[int], Graph]:
    """From a batch to a graph."""
    return lambda batch: fp.models.build(f"{text},batch={batch}")


def of_replica(batch: Batch, number: int, count: int) -> Batch:
    """What one of several replicas takes of each micro-batch, which is the first axis."""
    found = {}
    for name, array in batch.items():
        parts = np.split(array, count, axis=1 if array.ndim > 1 else 0)
        found[name] = np.ascontiguousarray(parts[number])
    return found


def trained_in_groups(compiled: Sequence[Compiled], batches: Sequence[Batch], ranks: int, tensor: int) -> list[Trained]:
    """What each rank comes to, stage by stage.

    Args:
        ranks: of each stage.
    """

    def job(world: Thread) -> Trained:
        step = compiled[world.rank // ranks]
        session = step.bind(seed=1)
        names = [slot.name for slot in step.program.required_inputs]
        losses = []
        for batch in batches:
            own = of_replica(batch, world.rank % ranks // tensor, ranks // tensor)
            losses.append(session.step({name: own[name] for name in names}).loss)
        assert session.allocated_bytes == step.arena_bytes
        return Trained(losses, dict(session.stored), list(world.log), session.allocated_bytes)

    return run(len(compiled) * ranks, job)


def check(
    text: str, stages: int, ranks: int, micro_batches: int = 3, steps: int = 3, tolerance: float = 1e-5, **options: Any
) -> list[Trained]:
    """Train in stages of so many ranks, and in one process on all samples; check that they come to the same."""
    tensor = options.get("tensor", 1)
    replicas = ranks // tensor
    others = {name: value for name, value in options.items() if name not in ("tensor", "shard")}
    alone, batches = trained_alone(model(text)(replicas), micro_batches, steps=steps, **others)
    compiled = compiled_stages(model(text)(1), stages, micro_batches, ranks=stages * ranks, **options)
    assert [step.program.of_stage for step in compiled] == [ranks] * stages
    found = trained_in_groups(compiled, batches, ranks, tensor)
    assert_as_alone(found, alone, tolerance)
    for first in range(0, len(found), ranks):
        for each in found[first + 1 : first + ranks]:
            assert_same(each, found[first])
    run_stages([(each.program, each.plan) for each in compiled])
    return found


@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize(("ranks", "tensor"), [(2, 1), (2, 2), (4, 2)])
@pytest.mark.parametrize("text", [GPT, LLAMA], ids=["tied", "untied"])
def test_groups_train_as_one_process(text: str, ranks: int, tensor: int, shard: str) -> None:
    check(text, 2, ranks, optimizer=optim.Momentum(0.01), tensor=tensor, shard=shard)


@pytest.mark.parametrize("micro_batches", [2, 5])
@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("stages", [2, 4])
def test_replicas_of_many_stages(stages: int, shard: str, micro_batches: int) -> None:
    check(MLP, stages, 2, micro_batches, optimizer=optim.Momentum(0.01), shard=shard)
