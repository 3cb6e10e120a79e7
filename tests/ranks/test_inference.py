"""The forward pass on several ranks gives what one process gives, whatever each rank holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import foreplan as fp
from foreplan.graph import Graph
from tests.profile import pairs
from tests.ranks.kept import compiled_once
from tests.ranks.test_data_parallel import MODELS, gpt, mlp
from tests.ranks.test_tensor_parallel import TEXTS, model
from tests.ranks.threads import Thread, run
from tests.ranks.training import Batch, batches_for, own_part

Outputs = dict[str, np.ndarray]
LABELS = 2  # BERT has two segments


def weights_of(graph: Graph) -> dict[str, np.ndarray]:
    """Random weights."""
    rng = np.random.default_rng(11)
    return {v.name: 0.2 * rng.standard_normal(v.shape, np.float32) for v in graph.stored if v.kind == "parameter"}


def outputs(build: Callable[[int], Graph], ranks: int, samples: int, **options: Any) -> tuple[list[Outputs], Any]:
    """What each rank gives for its part of the samples, or for that of its group; and the compiled step."""
    alike = options.get("tensor", 1)
    options = {"target": "numpy"} | options
    graph = build(samples * alike // ranks)
    compiled = compiled_once(graph, ranks=ranks, **options)
    weights = weights_of(graph)
    (batch,) = batches_for(compiled, samples, 1, LABELS)

    def job(world: Thread | None) -> Outputs:
        session = compiled.bind(seed=1)
        assert session.allocated_bytes == compiled.arena_bytes
        rank = 0 if world is None else world.rank
        for name, array in weights.items():
            session.parameters[name] = array
        own: Batch = own_part(batch, rank // alike, ranks // alike)
        return session.step(own).outputs

    return [job(None)] if ranks == 1 else run(ranks, job), compiled


def joined(found: list[Outputs], alike: int = 1) -> Outputs:
    """The outputs for all samples, one group behind the other, after a check that ranks of a group have the same."""
    for rank, each in enumerate(found):
        for name, array in each.items():
            np.testing.assert_array_equal(array, found[rank // alike * alike][name])
    return {name: np.concatenate([each[name] for each in found[::alike]]) for name in found[0]}


@pytest.mark.parametrize(("name", "ranks", "target"), pairs(MODELS, [2, 3, 4], ["numpy", "cpu:threads=1"]))
def test_gathered_weights_give_the_outputs_of_one_process(name: str, ranks: int, target: str) -> None:
    one, _ = outputs(MODELS[name], 1, 12, target=target)
    found, compiled = outputs(MODELS[name], ranks, 12, target=target, shard="parameters")
    assert compiled.program.ranks == ranks
    for output, wanted in one[0].items():
        np.testing.assert_allclose(joined(found)[output], wanted, rtol=2e-4, atol=2e-5)


def test_gathered_weights_give_the_same_bits() -> None:
    """Each rank computes what a process with the same samples computes."""

    def job(compiled: Any, batch: Batch) -> Callable[[Any], Outputs]:
        def of_rank(world: Any) -> Outputs:
            session = compiled.bind(seed=5)
            return session.step(batch).outputs

        return of_rank

    whole, parts = fp.compile(gpt(3), target="numpy"), fp.compile(gpt(3), target="numpy", ranks=4, shard="parameters")
    (batch,) = batches_for(whole, 3, 1)
    alone = job(whole, batch)(None)
    for each in run(4, job(parts, batch)):
        for name, array in alone.items():
            np.testing.assert_array_equal(each[name], array)


@pytest.mark.parametrize(("name", "groups", "shard"), pairs(TEXTS, [(2, 2), (4, 2), (4, 4)], ["none", "parameters"]))
def test_groups_give_the_outputs_of_one_process(name: str, groups: tuple[int, int], shard: str) -> None:
    ranks, tensor = groups
    (one,), _ = outputs(model(name), 1, 4)
    found, compiled = outputs(model(name), ranks, 4, tensor=tensor, shard=shard)
    assert compiled.program.tensor == tensor
    for output, array in joined(found, tensor).items():
        np.testing.assert_allclose(array, one[output], rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("options", [{"shard": "parameters"}, {"tensor": 2}, {"tensor": 2, "shard": "parameters"}])
def test_narrow_precision(options: dict[str, Any], precision: str) -> None:
    (one,), _ = outputs(model("llama"), 1, 4, precision=precision)
    found, _ = outputs(model("llama"), 4, 4, precision=precision, **options)
    for output, array in joined(found, options.get("tensor", 1)).items():
        np.testing.assert_allclose(array, one[output], atol=0.05 * np.abs(one[output]).max())


def deep(batch: int) -> Graph:
    """Layers that fill a bucket each."""
    return fp.models.build(f"mlp:width=256,layers=16,batch={batch}")


def test_a_rank_needs_its_part_and_buckets() -> None:
    """Two buckets at a time, and what arrives: an eighth each of all weights."""
    whole, parts = (fp.compile(deep(2), target="numpy", **more) for more in ({}, {"ranks": 16, "shard": "parameters"}))
    weights = sum(slot.operand.type.nbytes for slot in whole.program.stored)
    stored = sum(slot.operand.type.nbytes for slot in parts.program.stored)
    assert weights / 16 <= stored < weights / 15
    assert parts.arena_bytes < stored + 3 * weights / 8 < whole.arena_bytes / 2
    assert parts.estimate()["ranks"] == 16 and parts.estimate()["mode"] == "inference"


def test_a_table_that_is_read_at_both_ends_is_gathered_twice() -> None:
    """The table of embeddings is also that of the logits: it does not lie there in between."""
    text = "gpt2_small:layers=6,width=64,heads=2,seq=8,vocabulary=600,batch=1"
    step = fp.compile(fp.models.build(text), target="numpy", ranks=4, shard="parameters")
    assert step.graph is not None
    gathers = [node for node in step.graph.nodes if node.op.name == "all_gather"]
    again = [node for node in gathers if node.name.endswith("/again")]
    assert len(again) == 1 and again[0].outputs[0].type.size >= 600 * 64
    sent = [node.inputs[0] for node in gathers]
    assert len(sent) == len(set(sent)) + 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"ranks": 2, "shard": "state"}, r"shard='state' .* this is inference: .*'parameters'"),
        ({"ranks": 2, "shard": "gradients"}, r"shard='gradients' .* this is inference: .*'parameters'"),
        ({"ranks": 3, "tensor": 2}, "tensor=2 does not divide ranks=3"),
        ({"ranks": 2, "tensor": 2}, r"nothing of .* can be computed in parts"),
        ({"ranks": 2, "shard": "parameters", "prepack": True}, "prepack .* parts"),
        ({"ranks": 2, "batch_norm": "sync"}, "batch_norm='sync' .* this is inference"),
        ({"ranks": 2, "stages": 2}, "stages=2 are of a training step"),
        ({"gradients": ["x"]}, "gradients are of a loss, and this is inference"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(fp.UsageError, match=said):
        fp.compile(fp.models.build("mlp:width=9,layers=1,batch=2,classes=9"), target="numpy", **options)


def test_parts_of_a_step_without_an_optimizer_are_refused() -> None:
    with pytest.raises(fp.UsageError, match=r"shard='parameters' .* optimizer"):
        fp.compile(mlp(2), fp.losses.cross_entropy, target="numpy", ranks=2, shard="parameters")


@pytest.mark.parametrize("options", [{"shard": "parameters"}, {"tensor": 2}, {"tensor": 2, "shard": "parameters"}])
def test_plan_files(tmp_path: Path, options: dict[str, Any]) -> None:
    """A plan that is read does what the one that was written does."""
    compiled = fp.compile(model("bert")(2), target="numpy", ranks=4, **options)
    compiled.save(tmp_path / "a.plan")
    read = fp.load_plan(tmp_path / "a.plan")
    (batch,) = batches_for(compiled, 2, 1, LABELS)

    def job(step: Any) -> Callable[[Any], Outputs]:
        return lambda world: step.bind(seed=1).step(batch).outputs

    for found, wanted in zip(run(4, job(read)), run(4, job(compiled)), strict=True):
        for name, array in wanted.items():
            np.testing.assert_array_equal(found[name], array)


@pytest.mark.parametrize("options", [{"tensor": 2}, {"shard": "parameters"}])
def test_groups_of_inference_stand_by_themselves(options: dict[str, Any]) -> None:
    """A step of two ranks runs on four, two by two; not on three."""
    build = model("llama")
    step, whole = fp.compile(build(1), target="numpy", ranks=2, **options), fp.compile(build(1), target="numpy")
    batches = batches_for(whole, 1, 2)
    alone = [next(iter(whole.bind(seed=1).step(batch).outputs.values())) for batch in batches]
    found = run(4, lambda world: step.bind(seed=1).step(batches[world.rank // 2]).outputs)
    for rank, each in enumerate(found):
        np.testing.assert_allclose(next(iter(each.values())), alone[rank // 2], rtol=2e-4, atol=2e-5)
    with pytest.raises(fp.SessionError, match="planned for 2 ranks, and this job has 3"):
        run(3, lambda world: step.bind(seed=1))


def drawn_net(seed: int) -> Callable[[int], Graph]:
    """Dense layers, norms and residuals of odd sizes, in a random order, some with one weight in two places."""

    def net(x: Any) -> Any:
        rng = np.random.default_rng(seed)
        width = int(rng.integers(3, 20))
        shared = bool(rng.integers(2))
        x = first = fp.nn.linear(x, width, name="in")
        for i in range(int(rng.integers(1, 6))):
            way = rng.integers(4)
            if way == 0:
                x = fp.nn.layer_norm(x, name=f"norm{i}")
            elif way == 1:
                x = x + fp.nn.linear(fp.nn.relu(fp.nn.linear(x, 2 * width, name=f"up{i}")), width, name=f"down{i}")
            elif way == 2:
                x = fp.nn.gelu(fp.nn.linear(x, width, name=f"same{i}", bias=bool(rng.integers(2))))
            else:
                x = x + first
        return {"y": fp.nn.linear(x, int(rng.integers(2, 9)), name="in2" if shared else "out"), "x": x}

    return lambda batch: fp.trace(net, fp.spec((batch, 7)))


@pytest.mark.parametrize("seed", range(12))
def test_drawn_models(seed: int) -> None:
    """Whatever ranks hold, and whether products can be cut or not."""
    rng = np.random.default_rng(seed)
    tensor = int(rng.choice([1, 2]))
    ranks = tensor * int(rng.choice([1, 2, 3]))
    options: dict[str, Any] = {"shard": rng.choice(["none", "parameters"]).item(), "tensor": tensor}
    (one,), _ = outputs(drawn_net(seed), 1, 6)
    try:
        found, _ = outputs(drawn_net(seed), ranks, 6, **options)
    except fp.UsageError as error:
        assert "nothing of" in str(error) and tensor > 1
        return
    for output, array in joined(found, tensor).items():
        np.testing.assert_allclose(array, one[output], rtol=1e-3, atol=1e-4)
