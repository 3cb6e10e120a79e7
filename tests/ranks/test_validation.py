"""A model that several ranks train is measured with its weights where they lie, as one process measures it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import foreplan as fp
from foreplan import optim
from foreplan.compiler.compiled import Compiled
from foreplan.graph import Graph
from foreplan.lower.program import PARAMETERS
from tests.profile import few, values
from tests.ranks.kept import compiled_once
from tests.ranks.test_data_parallel import SHARDS, gpt, mlp
from tests.ranks.test_tensor_parallel import model
from tests.ranks.threads import Thread, run
from tests.ranks.training import Batch, batches_for, own_part

Measured = list[dict[str, float]]
STEPS, TRAINED, MEASURED = 2, 8, 6


def measured(
    build: Callable[[int], Graph],
    ranks: int,
    optimizer: Any = None,
    measure: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[list[Measured], Compiled, Compiled]:
    """Loss and accuracy before the first step and after each, on each rank; the step, and what measures it."""
    alike, optimizer = options.get("tensor", 1), optimizer or optim.Momentum(0.2)
    options = {"target": "numpy"} | options
    loss = fp.losses.cross_entropy
    step = compiled_once(build(TRAINED * alike // ranks), loss, optimizer, ranks=ranks, **options)
    evaluated = fp.evaluation(build(MEASURED), loss, ["accuracy"], freeze=options.get("freeze", ()))
    common = {"target": options["target"], "precision": options.get("precision", "float32")} | (measure or {})
    evaluation = fp.compile(evaluated, share=step, **common)
    batches = batches_for(step, TRAINED, STEPS)
    (held_out,) = batches_for(evaluation, MEASURED, 1, seed=5)

    def job(world: Thread | None) -> Measured:
        session = step.bind(seed=1)
        beside = evaluation.bind(share=session)
        height = len(session.regions[PARAMETERS])
        assert np.shares_memory(_bytes(beside.regions[PARAMETERS]), _bytes(session.regions[PARAMETERS]))
        assert beside.allocated_bytes <= evaluation.arena_bytes - height + 64
        rank = 0 if world is None else world.rank
        found = []
        for batch in _and_none(batches):
            found.append(_figures(beside, session, held_out))
            if batch is not None:
                session.step(own_part(batch, rank // alike, ranks // alike))
        return found

    return ([job(None)] if ranks == 1 else run(ranks, job)), step, evaluation


def _bytes(memory: Any) -> np.ndarray:
    return np.frombuffer(memory, np.uint8)


def _and_none(batches: list[Batch]) -> Iterator[Batch | None]:
    yield from batches
    yield None


def _figures(beside: Any, session: Any, batch: Batch) -> dict[str, float]:
    """Of the weights, and of their averages where there are any."""
    found = {}
    ways = {"": nullcontext()} | ({"average ": session.averaged()} if session.keeps_averages else {})
    for name, way in ways.items():
        with way:
            found |= {name + output: float(x) for output, x in beside.step(batch).outputs.items()}
    return found


def assert_as_one(found: list[Measured], alone: Measured, tolerance: float = 2e-4) -> None:
    """Check that all ranks measured what one process did."""
    for each in found:
        assert each == found[0]
        for now, wanted in zip(each, alone, strict=True):
            assert now == pytest.approx(wanted, rel=tolerance)


@pytest.mark.parametrize(
    ("groups", "shard", "target"), values([(2, 1), (2, 2), (4, 2)], SHARDS, ["numpy", "cpu:threads=1"])
)
def test_weights_are_measured_where_they_lie(groups: tuple[int, int], shard: str, target: str) -> None:
    """With averages, too, which are exchanged in parts."""
    ranks, tensor = groups
    adam = optim.Adam(0.01, ema=0.5)
    (alone,), _, _ = measured(model("llama"), 1, adam, target=target)
    found, step, evaluation = measured(model("llama"), ranks, adam, target=target, tensor=tensor, shard=shard)
    assert_as_one(found, alone)
    stored = [
        {slot.name for slot in each.program.stored if slot.kind in ("parameter", "frozen", "buffer")}
        for each in (step, evaluation)
    ]
    assert stored[0] == stored[1] and alone[0] != alone[1]


@pytest.mark.parametrize(("build", "shard"), values([mlp, gpt], SHARDS))
def test_other_models(build: Callable[[int], Graph], shard: str) -> None:
    (alone,), _, _ = measured(build, 1)
    assert_as_one(measured(build, 4 if build is mlp else 2, shard=shard)[0], alone)


@pytest.mark.parametrize("options", few([{"tensor": 2}, {"shard": "state"}, {"shard": "parameters"}], (0, 2)))
def test_frozen_weights_and_adapters(options: dict[str, Any]) -> None:
    def adapted(batch: int) -> Graph:
        return fp.lora(model("llama")(batch), rank=2)

    for build, more in [(adapted, {}), (model("llama"), {"freeze": ["*.mlp.*"]})]:
        (alone,), _, _ = measured(build, 1, **more)
        assert_as_one(measured(build, 4, **options, **more)[0], alone)


@pytest.mark.parametrize("precision", few(["bf16", "fp16"]))
@pytest.mark.parametrize(
    "options", few([{"tensor": 2}, {"shard": "parameters"}, {"tensor": 2, "shard": "parameters"}], (2,))
)
def test_narrow_precision(options: dict[str, Any], precision: str) -> None:
    """What is read narrow alone is gathered narrow."""
    (alone,), _, _ = measured(model("llama"), 1, precision=precision)
    found, _, evaluation = measured(model("llama"), 4, precision=precision, **options)
    for each in found:
        for now, wanted in zip(each, alone, strict=True):
            assert now["loss"] == pytest.approx(wanted["loss"], rel=3e-3)
    if options.get("shard"):
        assert evaluation.graph is not None
        gathers = [node for node in evaluation.graph.nodes if node.name.endswith("/whole")]
        assert any(node.outputs[0].dtype.name != "float32" for node in gathers)


@pytest.mark.parametrize("name", few(["bert", "t5", "vit", "gpt of a vocabulary that is odd", "tied llama"], (1, 3)))
def test_parts_are_those_of_the_step(name: str) -> None:
    """A step that reads more rows than a table has leaves that whole, and one that measures few would cut it."""
    build = model(name)
    step = fp.compile(build(8), fp.losses.cross_entropy, optim.SGD(0.1), target="numpy", ranks=2, tensor=2)
    for batch in (1, 8):
        evaluated = fp.evaluation(build(batch), fp.losses.cross_entropy, ["accuracy"])
        beside = fp.compile(evaluated, target="numpy", share=step)
        whole = fp.compile(evaluated, target="numpy")
        (inputs,) = batches_for(whole, batch, 1, labels=2)

        def job(world: Any, beside: Compiled = beside, inputs: Batch = inputs) -> dict[str, np.ndarray]:
            return beside.bind(share=step.bind(seed=1)).step(inputs).outputs

        alone = whole.bind(seed=1).step(inputs).outputs
        for each in run(2, job):
            for output, array in alone.items():
                np.testing.assert_allclose(each[output], array, rtol=2e-4)


def test_weights_that_are_cut_are_returned_whole() -> None:
    """What is no product's is gathered."""

    mlp_of_parts = fp.models.build("mlp:width=24,layers=2,batch=4")
    weights = {value.name: value for value in mlp_of_parts.stored}
    every = replace(mlp_of_parts, outputs={**mlp_of_parts.outputs, **weights})
    for shard in ("none", "parameters"):
        options: Any = {"target": "numpy", "ranks": 4, "tensor": 2, "shard": shard}
        step = fp.compile(mlp_of_parts, fp.losses.cross_entropy, optim.SGD(0.1), **options)
        assert any(slot.shard for slot in step.program.tensors)
        beside, alone = fp.compile(every, target="numpy", share=step), fp.compile(every, target="numpy")
        (inputs,) = batches_for(alone, 4, 1)

        def job(world: Any, step: Compiled = step, beside: Compiled = beside, inputs: Batch = inputs) -> Batch:
            return beside.bind(share=step.bind(seed=1)).step(inputs).outputs

        wanted = alone.bind(seed=1).step(inputs).outputs
        for each in run(4, job):
            for output, array in wanted.items():
                np.testing.assert_allclose(each[output], array, rtol=2e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"share": "step"}, "share must be a Program"),
        ({"ranks": 4}, "ranks is as in the step to share with: leave ranks=4 out"),
        ({"tensor": 2}, "leave tensor=2 out"),
        ({"shard": "state"}, "shard='state' is of what training keeps"),
        ({"prepack": True}, "leave prepack out"),
        ({"loss": fp.losses.cross_entropy, "optimizer": optim.SGD(0.1)}, "share is for inference"),
    ],
)
def test_what_cannot_be_shared(options: dict[str, Any], said: str) -> None:
    step = fp.compile(mlp(2), fp.losses.cross_entropy, optim.SGD(0.1), target="numpy", ranks=2, shard="parameters")
    with pytest.raises(fp.UsageError, match=said):
        fp.compile(mlp(2), target="numpy", **{"share": step} | options)


def test_another_model_cannot_share() -> None:
    step = fp.compile(mlp(2), fp.losses.cross_entropy, optim.SGD(0.1), target="numpy", ranks=2, shard="parameters")
    with pytest.raises(fp.UsageError, match=r"share: 'hidden0.weight' is .* here and .* in the step of 'mlp'"):
        fp.compile(fp.models.build("mlp:width=8,layers=2,batch=2"), target="numpy", share=step)
    with pytest.raises(fp.UsageError, match=r"is .* here and missing in the step"):
        fp.compile(gpt(2), target="numpy", share=step)


@pytest.mark.parametrize("options", [{"tensor": 2}, {"shard": "state"}, {"shard": "parameters"}])
def test_a_step_that_knows_nothing_of_parts_cannot_share(options: dict[str, Any]) -> None:
    """And is told what to do."""
    build = model("llama")
    step = fp.compile(build(2), fp.losses.cross_entropy, optim.SGD(0.1), target="numpy", ranks=2, **options)
    evaluation = compiled_once(fp.evaluation(build(2), fp.losses.cross_entropy), target="numpy")
    with pytest.raises(fp.SessionError, match="compile the first with share=the step of the other"):
        run(2, lambda world: evaluation.bind(share=step.bind()))


def test_averages_in_parts_are_exchanged_without_others() -> None:
    """Each rank changes what it holds, and copies no more: nothing moves between ranks."""
    step = fp.compile(
        gpt(2), fp.losses.cross_entropy, optim.Adam(0.1, ema=0.9), target="numpy", ranks=2, shard="parameters"
    )
    (batch,) = batches_for(step, 4, 1)

    def job(world: Any) -> int:
        session = step.bind(seed=1)
        session.step(own_part(batch, world.rank, 2))
        before = len(world.log)
        with session.averaged():
            return len(world.log) - before

    assert run(2, job) == [0, 0]


def test_inference_shares_with_inference() -> None:
    """For another number of samples, say."""
    options: Any = {"target": "numpy", "ranks": 2, "shard": "parameters"}
    large, small = fp.compile(gpt(4), **options), fp.compile(gpt(1), target="numpy")
    also = fp.compile(gpt(1), target="numpy", share=large)
    (inputs,) = batches_for(small, 1, 1)
    alone = small.bind(seed=1).step(inputs).outputs
    for each in run(2, lambda world: also.bind(share=large.bind(seed=1)).step(inputs).outputs):
        for name, array in alone.items():
            np.testing.assert_array_equal(each[name], array)
