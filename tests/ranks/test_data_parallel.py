"""Several ranks train as one process does on all of their samples, whatever of the training state each holds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import foreplan as fp
from foreplan import optim
from foreplan.graph import Graph
from foreplan.passes.ranks import setting
from tests.profile import few, pairs, pick, values
from tests.ranks.kept import compiled_once
from tests.ranks.threads import Thread, run
from tests.ranks.training import EPSILON, assert_close, assert_same, batches_for, own_part, trained

SHARDS = ["none", "state", "gradients", "parameters"]


def mlp(batch: int) -> Graph:
    """Sizes that no number of ranks divides."""
    return fp.models.build(f"mlp:width=23,layers=2,batch={batch}")


def gpt(batch: int) -> Graph:
    """Two blocks, and a table that is read twice."""
    return fp.models.build(f"gpt2_small:layers=2,width=32,heads=2,seq=8,vocabulary=61,batch={batch}")


MODELS = {"mlp": mlp, "gpt": gpt}
OPTIMIZERS: dict[str, Any] = {
    "sgd": optim.SGD(0.1),
    "momentum": optim.Momentum(0.1, weight_decay=0.01, decay="matrices"),
    "clipped": optim.AdamW(0.01, epsilon=EPSILON, clip_norm=0.1, weight_decay=0.1, decay="matrices"),
    "groups": optim.AdamW(0.01, epsilon=EPSILON, groups=[optim.Group("*0*", rate=3.0)]),
    "averages": optim.Adam(optim.cosine(0.01, steps=10), epsilon=EPSILON, ema=0.9),
    "lion": optim.Lion(0.001, clip_value=0.01),
}


@pytest.mark.parametrize(("name", "ranks", "shard", "target"), pairs(MODELS, [2, 3, 4], SHARDS, ["numpy", "cpu"]))
def test_ranks_train_as_one_process(name: str, ranks: int, shard: str, target: str) -> None:
    (alone,) = trained(MODELS[name], optim.AdamW(0.01, epsilon=EPSILON), 1, 12, target=target)
    found = trained(MODELS[name], optim.AdamW(0.01, epsilon=EPSILON), ranks, 12, target=target, shard=shard)
    assert_close(found[0], alone)
    for each in found[1:]:
        assert_same(each, found[0])
        assert each.log == found[0].log, "ranks make the same exchanges in the same order"


@pytest.mark.parametrize(("name", "accumulate"), values(OPTIMIZERS, [1, 2]))
def test_sums_have_one_order(name: str, accumulate: int) -> None:
    """Modes, and runs, give the same bits. Two sums have another order: the norm of all gradients is one of parts; and
    gradients in parts are summed over ranks before they are summed over micro-batches.
    """
    runs = {shard: trained(mlp, OPTIMIZERS[name], 4, 16, shard=shard, accumulate=accumulate) for shard in SHARDS}
    (alone,) = trained(mlp, OPTIMIZERS[name], 1, 16)
    again = pick(SHARDS[-1:], SHARDS[-1:], SHARDS)
    for shard, each in runs.items():
        assert_close(each[0], alone, 3e-3 if name == "lion" else 1e-4)
        parts_first = accumulate > 1 and shard in ("gradients", "parameters")
        if name != "clipped":
            assert_same(each[0], runs["gradients" if parts_first else "none"][0])
        if shard in again:
            assert_same(trained(mlp, OPTIMIZERS[name], 4, 16, shard=shard, accumulate=accumulate)[0], each[0])


@pytest.mark.parametrize("shard", SHARDS)
def test_parts_are_smaller(shard: str) -> None:
    """What is held in parts is a quarter, and the rest is there whole."""

    def kept(ranks: int) -> dict[str, int]:
        step = compiled_once(
            mlp(4), fp.losses.cross_entropy, optim.AdamW(0.01), target="numpy", ranks=ranks, shard=shard
        )
        return {str(category): nbytes for category, nbytes in step.memory.categories.items()}

    one, four = kept(1), kept(4)
    assert (four["optimizer_state"] < one["optimizer_state"] / 3) == (shard != "none")
    assert four["optimizer_state"] >= one["optimizer_state"] / 4 or shard == "none"
    assert (four["parameters"] < one["parameters"]) == (shard == "parameters")


@pytest.mark.parametrize("optimizer", [optim.Adafactor(), optim.Muon(0.01), optim.LAMB(0.01)])
def test_optimizers_of_whole_tensors(optimizer: Any) -> None:
    (alone,) = trained(mlp, optimizer, 1, 8)
    assert_close(trained(mlp, optimizer, 2, 8)[0], alone, 1e-3)
    with pytest.raises(fp.UsageError, match=r"computes with whole tensors, such as .*'none'"):
        trained(mlp, optimizer, 2, 8, shard="state")


@pytest.mark.parametrize(("precision", "shard"), values(["bf16", "fp16"], SHARDS))
def test_narrow_precision(precision: str, shard: str) -> None:
    (alone,) = trained(gpt, optim.AdamW(0.001), 1, 8, precision=precision)
    found = trained(gpt, optim.AdamW(0.001), 2, 8, precision=precision, shard=shard)
    np.testing.assert_allclose(found[0].losses, alone.losses, rtol=2e-3)
    assert_same(found[1], found[0])


def of_two(model: Graph, **options: Any) -> Graph:
    """The graph of a step of two ranks, with parameters in parts."""
    options = {"target": "numpy", "ranks": 2, "shard": "parameters"} | options
    step = compiled_once(model, fp.losses.cross_entropy, optim.SGD(0.1), **options)
    assert step.graph is not None
    return step.graph


def test_narrow_precision_gathers_narrow_weights() -> None:
    """Weights are read as bfloat16 alone, so they are gathered so, and none lies there from the forward pass to the
    backward one.
    """
    wide, less = (
        [node.outputs[0].type for node in graph.nodes if node.outputs[0].name.endswith("/again")]
        for graph in (of_two(gpt(2)), of_two(gpt(2), precision="bf16"))
    )
    assert {type.dtype.name for type in less} == {"bfloat16"}
    assert 0.9 * sum(type.size for type in wide) < sum(type.size for type in less)
    assert sum(type.nbytes for type in less) < 0.6 * sum(type.nbytes for type in wide)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_what_lives_through_a_pass_is_gathered_once(accumulate: int) -> None:
    """In bfloat16 biases and norms, which are read wide, share a bucket, which the whole step reads: to drop it where
    the step turns back would save nothing, and what is recomputed from it would gather it once more.
    """
    model = fp.models.build("gpt2_small:layers=6,width=32,heads=2,seq=8,vocabulary=64,batch=2")
    graph = of_two(model, precision="bf16", accumulate=accumulate)
    gathers = [node for node in graph.nodes if node.op.name == "all_gather"]
    wide = [node.name for node in gathers if node.outputs[0].dtype.name == "float32"]
    assert wide and all(name.endswith("/whole") for name in wide)
    assert any(node.name.endswith("/again") for node in gathers)


@pytest.mark.parametrize("shard", few(SHARDS, (1, 3)))
def test_frozen_parts_and_adapters(shard: str) -> None:
    """Frozen weights lie in parts, too, where parameters do; adapters are trained as ever."""

    def adapted(batch: int) -> Graph:
        return fp.lora(gpt(batch), rank=2)

    (alone,) = trained(adapted, optim.AdamW(0.01, epsilon=EPSILON), 1, 8)
    assert_close(trained(adapted, optim.AdamW(0.01, epsilon=EPSILON), 2, 8, shard=shard)[0], alone)
    (alone,) = trained(mlp, optim.AdamW(0.01, epsilon=EPSILON), 1, 8, freeze=["hidden0"])
    assert_close(trained(mlp, optim.AdamW(0.01, epsilon=EPSILON), 2, 8, shard=shard, freeze=["hidden0"])[0], alone)


@pytest.mark.parametrize("shard", SHARDS)
def test_weights_that_no_gradient_reaches(shard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They stay as they are, decay or not, and the others of their bucket are trained."""
    monkeypatch.setattr(setting, "LEAST", 1 << 20)

    def stopped(batch: int) -> Graph:
        def model(x: Any) -> Any:
            frozen = fp.nn.linear(x, 12, name="idle")
            return fp.nn.linear(x, 12, name="used") + 0.5 * fp.stop_gradient(frozen)

        return fp.trace(model, fp.spec((batch, 6)))

    optimizer = optim.AdamW(0.01, epsilon=EPSILON, weight_decay=0.1)
    (alone,) = trained(stopped, optimizer, 1, 8)
    found = trained(stopped, optimizer, 2, 8, shard=shard)
    for name, value in alone.stored.items():
        np.testing.assert_allclose(found[0].stored[name], value, atol=1e-5, err_msg=name)
    assert set(found[0].stored) == set(alone.stored)


def test_narrow_parts_are_made_again() -> None:
    """What is gathered for the backward pass is another narrow copy of a rank's part than that of the forward pass, so
    that none lies there in between.
    """
    options: Any = {"target": "numpy", "ranks": 2, "shard": "parameters", "precision": "bf16"}
    step = fp.compile(gpt(2), fp.losses.cross_entropy, optim.SGD(0.1), **options)
    assert step.graph is not None
    gathers = [node for node in step.graph.nodes if node.op.name == "all_gather" and node.name.startswith("bucket")]
    sent = [node.inputs[0] for node in gathers if node.inputs[0].dtype.name == "bfloat16"]
    assert len(set(sent)) == len(sent) >= 6 and sum(node.name.endswith("/again") for node in gathers) >= 3


@pytest.mark.parametrize(("ranks", "tensor"), [(2, 1), (2, 2), (4, 2)])
def test_gradients_that_are_returned(ranks: int, tensor: int) -> None:
    """Without an optimizer each rank returns those of the mean of all losses, of whole parameters."""

    def compiled(batch: int, **options: Any) -> fp.Compiled:
        graph = fp.models.build(f"gpt2_small:layers=1,width=16,heads=2,seq=6,vocabulary=22,batch={batch}")
        return fp.compile(graph, fp.losses.cross_entropy, target="numpy", **options)

    step = compiled(4 * tensor // ranks, ranks=ranks, tensor=tensor)
    (whole,) = batches_for(step, 4, 1)

    def job(world: Thread) -> dict[str, np.ndarray]:
        own = own_part(whole, world.rank // tensor, ranks // tensor)
        return dict(step.bind(seed=1).step(own).gradients)

    wanted = compiled(4).bind(seed=1).step(whole).gradients
    for found in run(ranks, job):
        assert found.keys() == wanted.keys() and len(found) > 10
        for name, gradient in found.items():
            np.testing.assert_allclose(gradient, wanted[name], atol=1e-7, err_msg=name)
