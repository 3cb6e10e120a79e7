"""Stages of several ranks each: replicas, parts of products, and training state in parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import foreplan as fp
from foreplan import optim
from foreplan.base.errors import SessionError
from foreplan.compiler.compiled import Compiled
from foreplan.graph import Graph
from foreplan.lower.stage_times import run_stages
from foreplan.passes.ranks import overlap
from tests.profile import few, pick, values
from tests.ranks.stages import (
    assert_as_alone,
    compiled_stages,
    one_process_goes_on,
    trained_alone,
    trained_saved_and_read,
)
from tests.ranks.test_batch_norm import network
from tests.ranks.test_tensor_drawn import Draw
from tests.ranks.threads import Thread, run
from tests.ranks.training import EPSILON, Batch, Trained, assert_same

GPT = "gpt2_small:layers=2,width=32,heads=4,seq=8,vocabulary=60"
LLAMA = "llama:layers=2,width=32,heads=4,kv_heads=2,features=48,seq=8,vocabulary=60,tied=False"
SMALL = GPT.replace("layers=2", "layers=1")
MLP = "mlp:width=24,layers=4"
SHARDS = ["none", "state", "gradients", "parameters"]


def model(text: str) -> Callable[[int], Graph]:
    """From a batch to a graph."""
    return lambda batch: fp.models.build(f"{text},batch={batch}")


def of_replica(batch: Batch, number: int, count: int, axis: int) -> Batch:
    """What one of several replicas takes of each micro-batch, whose samples lie along an axis."""
    return {name: np.ascontiguousarray(np.split(array, count, axis)[number]) for name, array in batch.items()}


def trained_in_groups(
    compiled: Sequence[Compiled], batches: Sequence[Batch], ranks: int, tensor: int = 1, axis: int = 1, **bind: Any
) -> list[Trained]:
    """What each rank comes to, stage by stage.

    Args:
        ranks: of each stage.
        axis: along which samples lie in batches.
    """

    def job(world: Thread) -> Trained:
        step = compiled[world.rank // ranks]
        session = step.bind(seed=1, **bind)
        names = [slot.name for slot in step.program.required_inputs]
        losses = []
        for batch in batches:
            own = of_replica(batch, world.rank % ranks // tensor, ranks // tensor, axis)
            losses.append(session.step({name: own[name] for name in names}).loss)
        assert session.allocated_bytes == step.arena_bytes
        return Trained(losses, dict(session.stored), list(world.log), session.allocated_bytes)

    return run(len(compiled) * ranks, job)


def check(
    build: Callable[[int], Graph],
    stages: int,
    ranks: int,
    micro_batches: int = 3,
    steps: int = 3,
    tolerance: float = 1e-5,
    **options: Any,
) -> list[Trained]:
    """Train in stages of so many ranks, and in one process on all samples; check that they come to the same, that ranks
    of one stage come to the same bits, by the same exchanges, and that no plan waits for ever.
    """
    tensor = options.get("tensor", 1)
    replicas = ranks // tensor
    others = {name: value for name, value in options.items() if name not in ("tensor", "shard")}
    alone, batches = trained_alone(build(replicas), micro_batches, steps=steps, **others)
    compiled = compiled_stages(build(1), stages, micro_batches, ranks=stages * ranks, **options)
    assert [step.program.of_stage for step in compiled] == [ranks] * stages
    found = trained_in_groups(compiled, batches, ranks, tensor, axis=int(micro_batches > 1))
    assert_as_alone(found, alone, tolerance)
    for first in range(0, len(found), ranks):
        for each in found[first + 1 : first + ranks]:
            assert_same(each, found[first])
            assert each.log == found[first].log
    run_stages([(each.program, each.plan) for each in compiled])
    return found


@pytest.mark.parametrize(("text", "groups", "shard"), values([GPT, LLAMA], [(2, 1), (2, 2), (4, 2)], SHARDS))
def test_groups_train_as_one_process(text: str, groups: tuple[int, int], shard: str) -> None:
    ranks, tensor = groups
    check(model(text), 2, ranks, optimizer=optim.Momentum(0.01), tensor=tensor, shard=shard)


@pytest.mark.parametrize(("stages", "shard", "micro_batches"), values([2, 4], SHARDS, [5, 2]))
def test_replicas_of_many_stages(stages: int, shard: str, micro_batches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "SOON", 0)
    check(model(MLP), stages, 2, micro_batches, optimizer=optim.Momentum(0.01), shard=shard)


@pytest.mark.parametrize("seed", range(pick(3, 4, 120)))
def test_drawn_networks(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever they are cut, also within what ranks compute in parts; with exchanges that others go on beside."""
    monkeypatch.setattr(overlap, "SOON", 0)
    drawn, rng = Draw(seed), np.random.default_rng(1000 + seed)
    stages, replicas, micro_batches = (int(x) for x in rng.integers((2, 1, 1), (4, 3, 4)))
    check(
        drawn.build,
        stages,
        drawn.tensor * replicas,
        micro_batches,
        loss=fp.losses.mse,
        optimizer=optim.Momentum(0.002),
        target="numpy" if seed % 3 else "cpu:threads=1",
        tensor=drawn.tensor,
        shard=SHARDS[rng.integers(4)],
        tolerance=1e-4,
    )


OPTIONS: dict[str, dict[str, Any]] = {
    "norm of all": {"optimizer": optim.AdamW(0.01, epsilon=EPSILON, clip_norm=0.1, weight_decay=0.1, decay="matrices")},
    "groups": {"optimizer": optim.SGD(0.1, groups=[optim.Group("wte*", rate=3.0), optim.Group("*ln_f*", rate=0.5)])},
    "averages": {"optimizer": optim.SGD(optim.cosine(0.1, steps=10), ema=0.9)},
    "cpu": {"optimizer": optim.SGD(0.1), "target": "cpu:threads=1"},
    "frozen": {"optimizer": optim.SGD(0.1), "freeze": ["wte*", "*mlp*"]},
}


@pytest.mark.parametrize(("name", "shard"), values(OPTIONS, SHARDS))
def test_options(name: str, shard: str) -> None:
    tolerance = 1e-4 if name == "norm of all" else 1e-5
    check(model(SMALL), 2, 4, 2, tolerance=tolerance, tensor=2, shard=shard, **OPTIONS[name])


@pytest.mark.parametrize(("precision", "shard"), few(product(["bf16", "fp16"], SHARDS), (0, 7)))
def test_narrow_numbers(precision: str, shard: str) -> None:
    options: dict[str, Any] = {"optimizer": optim.SGD(0.1), "precision": precision}
    alone, batches = trained_alone(model(SMALL)(2), 4, **options)
    found = trained_in_groups(compiled_stages(model(SMALL)(1), 2, 4, ranks=4, shard=shard, **options), batches, 2)
    for each in found:
        np.testing.assert_allclose(each.losses, alone.losses, rtol=2e-3)
    assert_same(found[1], found[0])
    assert_same(found[3], found[2])


@pytest.mark.parametrize("shard", few(["parameters", "none"]))
def test_adapters(shard: str) -> None:
    check(lambda batch: fp.lora(model(SMALL)(batch), rank=2), 2, 2, optimizer=optim.Momentum(0.01), shard=shard)


@pytest.mark.parametrize("stages", [2, 3])
def test_statistics_of_all_samples(stages: int) -> None:
    """Batch normalisation over the ranks of a stage."""
    build = network(3, 6, 6)
    alone, batches = trained_alone(build(4), 2, optimizer=optim.Momentum(0.01))
    options = {"optimizer": optim.Momentum(0.01), "ranks": 2 * stages, "batch_norm": "sync"}
    found = trained_in_groups(compiled_stages(build(2), stages, 2, **options), batches, 2)
    assert_as_alone(found, alone, 1e-4)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_masks_differ_from_replica_to_replica(dropout: float) -> None:
    """Of the same samples, two replicas have the mean loss of one with one mask alone where there is no mask."""
    build, options = model(f"{SMALL},dropout={dropout}"), {"optimizer": optim.SGD(0.1)}
    alone, batches = trained_alone(build(1), 2, steps=1, **options)
    twice = [{name: np.concatenate([array, array], 1) for name, array in batch.items()} for batch in batches]
    found = trained_in_groups(compiled_stages(build(1), 2, 2, ranks=4, **options), twice, 2)
    assert len({tuple(each.losses) for each in found}) == 1
    assert np.allclose(found[0].losses, alone.losses, rtol=1e-5) == (not dropout)


@pytest.mark.parametrize("shard", SHARDS)
def test_what_each_rank_holds(shard: str) -> None:
    """A stage's bytes of optimizer state and of parameters, by its rank: an eighth of a quarter, or more."""
    build, options = model("mlp:width=256,layers=4"), {"optimizer": optim.Adam(0.01), "ranks": 8}
    whole = compiled_stages(build(1), 2, 2, optimizer=optim.Adam(0.01))
    parts = compiled_stages(build(1), 2, 2, shard=shard, **options)
    for one, other in zip(whole, parts):
        wanted, found = one.estimate()["categories"], other.estimate()["categories"]
        of_state, of_weights = (4 if shard != "none" else 1), (4 if shard == "parameters" else 1)
        assert found["optimizer_state"] == pytest.approx(wanted["optimizer_state"] / of_state, rel=0.02)
        assert found["parameters"] == pytest.approx(wanted["parameters"] / of_weights, rel=0.02)


def test_poisoned_memory() -> None:
    """What is sent, gathered and summed stays while it moves: dead bytes hold NaN."""
    build, options = model(SMALL), {"optimizer": optim.AdamW(0.01, epsilon=EPSILON, clip_norm=0.1)}
    alone, batches = trained_alone(build(2), 4, steps=2, **options)
    compiled = compiled_stages(build(1), 2, 4, ranks=8, tensor=2, shard="parameters", **options)
    assert_as_alone(trained_in_groups(compiled, batches, 4, 2, poison=True), alone, 1e-4)


@pytest.mark.parametrize("shard", few(SHARDS, (1, 3)))
def test_one_checkpoint(tmp_path: Path, shard: str) -> None:
    """All ranks of all stages write one file, that of one process; each goes on from it bit for bit, and so does one
    process.
    """
    build, optimizer = model(SMALL), optim.Momentum(0.2)
    alone, batches = trained_alone(build(2), 2, optimizer=optimizer)
    compiled = compiled_stages(build(1), 2, 2, optimizer=optimizer, ranks=8, tensor=2, shard=shard)
    path = tmp_path / "saved.safetensors"

    def job(world: Thread) -> tuple[float, float]:
        own = [of_replica(batch, world.rank % 4 // 2, 2, 1) for batch in batches]
        return trained_saved_and_read(compiled[world.rank // 4], own, path)

    for loss, again in run(8, job):
        assert loss == again == pytest.approx(alone.losses[2], rel=1e-5)
    one_process_goes_on(build(2), optimizer, path, batches, alone)


def test_ranks_of_other_stages_are_refused() -> None:
    compiled = compiled_stages(model(MLP)(1), 2, 2, optimizer=optim.SGD(0.1), ranks=4)

    def job(world: Thread) -> Any:
        return compiled[world.rank % 2].bind()

    with pytest.raises(SessionError, match=r"rank 1 has stage 1 instead of stage 0.*ranks 0 to 1 with stage=0"):
        run(4, job)


def test_ranks_with_another_plan_of_their_stage_are_refused() -> None:
    usual = compiled_stages(model(MLP)(1), 2, 2, optimizer=optim.SGD(0.1), ranks=4)
    other = compiled_stages(model(MLP)(1), 2, 2, optimizer=optim.Momentum(0.1), ranks=4)

    def job(world: Thread) -> Any:
        return (other if world.rank == 3 else usual)[world.rank // 2].bind()

    with pytest.raises(SessionError, match="rank 3 has another plan of stage 1 than rank 2"):
        run(4, job)
