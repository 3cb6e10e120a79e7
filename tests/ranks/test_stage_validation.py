"""A model that is trained in stages is measured in them, with its weights where they lie: as by one process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

import foreplan as fp
from foreplan import optim
from foreplan.base.errors import UsageError
from foreplan.graph import Graph
from foreplan.runtime.ranks.statistics import of_first_rank
from foreplan.runtime.session import Session
from tests.profile import few, pick, values
from tests.ranks.kept import compiled_once
from tests.ranks.stages import compiled_stages
from tests.ranks.test_batch_norm import network
from tests.ranks.test_tensor_drawn import Draw
from tests.ranks.threads import Thread, run
from tests.ranks.training import batches_for, own_part

Measured = list[dict[str, float]]
MICRO_BATCHES, STEPS, SAMPLES = 2, 2, 3
MODELS: dict[str, Callable[[int], Graph]] = {
    name: lambda batch, text=text: fp.models.build(f"{text},batch={batch}")  # type: ignore[misc]
    for name, text in {
        "tied gpt": "gpt2_small:layers=2,width=32,heads=4,seq=8,vocabulary=60",
        "llama": "llama:layers=1,width=32,heads=8,kv_heads=4,features=48,seq=8,vocabulary=60,tied=False",
        "t5": "t5_small:layers=1,width=32,heads=4,depth=8,features=48,seq=8,decoder_seq=6,vocabulary=60",
        "mlp": "mlp:width=32,layers=4",
    }.items()
}
MODELS["statistics"] = network(3, 6, 6, times=3)
MODELS["adapters"] = lambda batch: fp.lora(MODELS["tied gpt"](batch), rank=2)


def measured(
    build: Callable[[int], Graph], stages: int, ranks: int, metrics: list[str], **options: Any
) -> list[Measured]:
    """Loss and metrics before the first step and after each, on each rank of the last stage; on one process alone where
    there is one stage.
    """
    tensor, shard = options.pop("tensor", 1), options.pop("shard", "none")
    options = {"loss": fp.losses.cross_entropy, "target": "numpy", "optimizer": optim.Momentum(0.01)} | options
    replicas = ranks // tensor
    whole = compiled_once(build(replicas), accumulate=MICRO_BATCHES, **options)
    spread = {"ranks": stages * ranks, "tensor": tensor, "shard": shard}
    steps = [whole] if stages == 1 else compiled_stages(build(1), stages, MICRO_BATCHES, **spread, **options)
    batches = [own_part(batch, 0, 1, MICRO_BATCHES) for batch in batches_for(whole, MICRO_BATCHES * replicas, STEPS)]
    evaluated = fp.evaluation(build(SAMPLES), options["loss"], metrics)
    (held_out,) = batches_for(compiled_once(evaluated, target="numpy"), SAMPLES, 1, seed=5)
    common = {name: options[name] for name in ("target", "precision") if name in options}

    def figures(beside: Session, session: Session, world: Thread | None) -> dict[str, float]:
        found: dict[str, float] = {}
        own = {slot.name: held_out[slot.name] for slot in beside.program.required_inputs}
        ways = {"": nullcontext()} | ({"average ": session.averaged()} if session.keeps_averages else {})
        for name, way in ways.items():
            statistics = nullcontext() if world is None else of_first_rank(session.program, session.stored, world)
            with way, statistics:
                found |= {name + output: float(x) for output, x in beside.step(own).outputs.items()}
        return found

    def job(world: Thread | None) -> Measured:
        rank = 0 if world is None else world.rank
        session = steps[rank // ranks].bind(seed=1)
        evaluation = fp.compile(evaluated, share=session, **common)
        kept = [
            {slot.name for slot in program.stored if slot.kind in ("parameter", "frozen", "buffer")}
            for program in (session.program, evaluation.program)
        ]
        assert kept[0] == kept[1], "it stores nothing of other stages"
        beside = evaluation.bind(share=session)
        names, part = [slot.name for slot in session.program.required_inputs], rank % ranks // tensor
        found = [figures(beside, session, world)]
        for batch in batches:
            own = batch if world is None else {name: each[:, part : part + 1] for name, each in batch.items()}
            session.step({name: own[name] for name in names})
            found.append(figures(beside, session, world))
        return found

    return [job(None)] if stages == 1 else run(stages * ranks, job)


def check(build: Callable[[int], Graph], stages: int, ranks: int, tolerance: float = 2e-4, **options: Any) -> None:
    """Check that the last stage measures what one process does, and that others measure nothing."""
    metrics = options.pop("metrics", ["accuracy"])
    plain = {name: value for name, value in options.items() if name != "shard"}
    (alone,) = measured(build, 1, ranks, metrics, **plain)
    found = measured(build, stages, ranks, metrics, **options)
    assert alone[0] != alone[-1]
    for each in found[:-ranks]:
        assert not any(each)
    for each in found[-ranks:]:
        for now, wanted in zip(each, alone, strict=True):
            assert now == pytest.approx(wanted, rel=tolerance)


@pytest.mark.parametrize(("name", "stages"), values(MODELS, [2, 3]))
def test_stages_measure_as_one_process(name: str, stages: int) -> None:
    """Weights in two stages; running statistics; adapters; what is read in a later stage alone."""
    check(MODELS[name], stages, 1)


GROUPS = [(2, 1), (2, 2), (4, 2)]  # ranks of a stage, and how many have parts of products


@pytest.mark.parametrize(
    ("name", "groups", "shard", "target"),
    values(["tied gpt", "llama"], GROUPS, ["none", "state", "parameters"], ["numpy", "cpu:threads=1"]),
)
def test_stages_of_several_ranks(name: str, groups: tuple[int, int], shard: str, target: str) -> None:
    ranks, tensor = groups
    check(MODELS[name], 2, ranks, tensor=tensor, shard=shard, target=target)


@pytest.mark.parametrize("shard", ["none", "parameters"])
def test_averages(shard: str) -> None:
    check(MODELS["tied gpt"], 2, 2, optimizer=optim.Momentum(0.01, ema=0.5), shard=shard)


@pytest.mark.parametrize("shard", ["none", "parameters"])
def test_running_statistics_are_those_of_a_stages_first_rank(shard: str) -> None:
    """Each rank of a stage follows its own samples, and all measure by the first one's."""
    found = measured(MODELS["statistics"], 2, 2, ["accuracy"], shard=shard)
    assert found[2] == found[3] and found[2][0] != found[2][2]


@pytest.mark.parametrize("precision", few(["bf16", "fp16"]))
def test_narrow_precision(precision: str) -> None:
    check(MODELS["llama"], 2, 2, precision=precision, shard="parameters", tolerance=3e-3, metrics=[])


@pytest.mark.parametrize("seed", range(pick(2, 3, 80)))
def test_drawn_networks(seed: int) -> None:
    drawn, rng = Draw(seed), np.random.default_rng(2000 + seed)
    stages, replicas = (int(x) for x in rng.integers((2, 1), (4, 3)))
    check(
        drawn.build,
        stages,
        drawn.tensor * replicas,
        loss=fp.losses.mse,
        metrics=[],
        optimizer=optim.Momentum(0.002),
        tensor=drawn.tensor,
        shard=["none", "state", "parameters"][rng.integers(3)],
        tolerance=1e-3,
    )


def test_a_step_does_not_know_what_other_stages_have() -> None:
    step = compiled_stages(MODELS["mlp"](1), 2, 2, optimizer=optim.SGD(0.1))[0]
    with pytest.raises(UsageError, match="one stage of several: give its session"):
        fp.compile(fp.evaluation(MODELS["mlp"](1), fp.losses.cross_entropy), share=step)


def test_another_model_is_refused() -> None:
    steps = compiled_stages(MODELS["mlp"](1), 2, 2, optimizer=optim.SGD(0.1))
    other = fp.evaluation(fp.models.build("mlp:width=48,layers=4,batch=1"), fp.losses.cross_entropy)

    def job(world: Thread) -> None:
        with pytest.raises(UsageError, match="compile both from one model"):
            fp.compile(other, share=steps[world.rank].bind(), target="numpy")

    run(2, job)
