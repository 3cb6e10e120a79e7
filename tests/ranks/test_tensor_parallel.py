"""Groups of ranks that compute parts of products train as one process does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import foreplan as fp
from foreplan import optim
from foreplan.frontend import Tensor, nn
from foreplan.graph import Array, Fill, Graph, GraphBuilder, Kind, TensorType
from foreplan.graph.shard import Shard, Sharded
from foreplan.graph.types import DTYPES
from foreplan.lower.exchanges import cluster_from
from foreplan.lower.targets import target_named
from foreplan.ops.collective import AllReduce
from foreplan.ops.local_index import LocalIndex
from foreplan.ops.map import elementwise
from foreplan.passes.constants import Known
from foreplan.passes.simplify import fold_constants
from foreplan.runtime.session import Session
from tests.profile import few, values
from tests.ranks.kept import compiled_once
from tests.ranks.test_plans import edited
from tests.ranks.threads import run
from tests.ranks.training import EPSILON, assert_close, assert_same, batches_for, own_part, trained

SHARDS = ["none", "state", "gradients", "parameters"]
TEXTS = {
    "gpt": "gpt2_small:layers=2,width=32,heads=4,seq=8,vocabulary=60",
    "gpt of a vocabulary that is odd": "gpt2_small:layers=1,width=32,heads=4,seq=8,vocabulary=61",
    "llama": "llama:layers=1,width=32,heads=8,kv_heads=4,features=48,seq=8,vocabulary=60,tied=False",
    "tied llama": "llama:layers=1,width=32,heads=4,kv_heads=4,features=48,seq=8,vocabulary=60",
    "bert": "bert_base:layers=1,width=32,heads=4,seq=8,vocabulary=60",
    "t5": "t5_small:layers=1,width=32,heads=4,depth=8,features=48,seq=8,decoder_seq=6,vocabulary=60",
    "vit": "vit_b16:layers=1,width=32,heads=4,size=32,patch=8,classes=20",
}
LABELS = 2  # BERT has two segments


def model(name: str) -> Callable[[int], Graph]:
    """From a batch to a graph."""
    return lambda batch: fp.models.build(f"{TEXTS[name]},batch={batch}")


@pytest.mark.parametrize(("name", "groups", "shard"), values(TEXTS, [(2, 2), (4, 2), (4, 4)], ["none", "parameters"]))
def test_groups_train_as_one_process(name: str, groups: tuple[int, int], shard: str) -> None:
    """Not by Adam: the gradient of a key's bias is zero but for rounding, of which Adam takes the sign."""
    ranks, tensor = groups
    (alone,) = trained(model(name), optim.Momentum(0.2), 1, 8, labels=LABELS)
    found = trained(model(name), optim.Momentum(0.2), ranks, 8, labels=LABELS, tensor=tensor, shard=shard)
    assert_close(found[0], alone)
    for each in found[1:]:
        assert_same(each, found[0])
        assert each.log == found[0].log, "ranks make the same exchanges in the same order"


def swin(batch: int) -> Graph:
    """Its queries, keys and values lie in one product, and heads of them pass through rolls and windows."""
    return fp.models.build(f"swin_t:width=16,heads=2,size=16,window=2,patch=1,classes=20,batch={batch}")


def test_heads_of_windows_are_cut() -> None:
    step = fp.compile(swin(4), target="numpy", ranks=2, tensor=2)
    (note,) = [note for note in step.program.notes if note.startswith("tensor=2")]
    assert note.startswith("tensor=2: 49 of 52 products are computed in parts")


@pytest.mark.thorough
def test_heads_of_windows_train_as_one_process() -> None:
    (alone,) = trained(swin, optim.Momentum(0.2), 1, 4, steps=1)
    found = trained(swin, optim.Momentum(0.2), 2, 4, steps=1, tensor=2)
    assert_close(found[0], alone)
    assert_same(found[1], found[0])


OPTIMIZERS: dict[str, Any] = {
    "clipped": optim.AdamW(0.01, epsilon=EPSILON, clip_norm=0.1, weight_decay=0.1, decay="matrices"),
    "averages": optim.Adam(optim.cosine(0.01, steps=10), epsilon=EPSILON, ema=0.9),
    "momentum": optim.Momentum(0.1),
}


@pytest.mark.parametrize(("name", "accumulate", "shard"), values(OPTIMIZERS, [1, 2], SHARDS))
def test_optimizers(name: str, accumulate: int, shard: str) -> None:
    (alone,) = trained(model("llama"), OPTIMIZERS[name], 1, 8)
    options = {"tensor": 2, "shard": shard, "accumulate": accumulate}
    found = trained(model("llama"), OPTIMIZERS[name], 4, 8, **options)
    assert_close(found[0], alone)
    assert_same(found[3], found[0])


@pytest.mark.parametrize(("precision", "target"), values(["bf16", "fp16"], ["numpy", "cpu:threads=1"]))
def test_narrow_precision(precision: str, target: str) -> None:
    (alone,) = trained(model("gpt"), optim.AdamW(0.001), 1, 8, precision=precision, target=target)
    found = trained(model("gpt"), optim.AdamW(0.001), 2, 8, precision=precision, target=target, tensor=2)
    np.testing.assert_allclose(found[0].losses, alone.losses, rtol=2e-3)
    assert_same(found[1], found[0])


@pytest.mark.parametrize("target", ["cpu:threads=1"])
@pytest.mark.parametrize("name", few(["llama", "gpt", "bert"]))
def test_the_cpu(name: str, target: str) -> None:
    (alone,) = trained(model(name), optim.Momentum(0.2), 1, 8, labels=LABELS, target=target)
    found = trained(model(name), optim.Momentum(0.2), 4, 8, labels=LABELS, target=target, tensor=2, shard="state")
    assert_close(found[0], alone)


def test_what_each_rank_holds() -> None:
    """A half of each matrix, and of what is kept of it; vectors whole."""
    build = model("llama")

    def kept(kind: str, **options: Any) -> int:
        step = compiled_once(build(2), fp.losses.cross_entropy, optim.Momentum(0.1), target="numpy", **options)
        return sum(
            slot.operand.type.nbytes for slot in step.program.stored if slot.kind == kind and slot.name != "step"
        )

    types = [value.type for value in build(2).stored if value.kind == "parameter"]
    vectors = sum(type.nbytes for type in types if type.rank == 1)
    matrices = sum(type.nbytes for type in types if type.rank > 1)
    for kind in ("parameter", "state"):
        assert kept(kind) == vectors + matrices
        assert kept(kind, ranks=2, tensor=2) == vectors + matrices // 2


def test_masks_differ_where_ranks_compute_parts() -> None:
    """Ones through a dense layer of ones: the result is the number of units that are kept. Two ranks with one mask
    would keep an even number.
    """

    ones = Fill(1.0)

    def units(x: Tensor) -> dict[str, Tensor]:
        hidden = nn.dropout(nn.linear(x, 64, name="up", weight_init=ones, bias=False), 0.5)
        return {"kept": nn.linear(hidden, 1, name="down", weight_init=ones, bias=False)}

    graph = fp.trace(units, fp.spec((1, 1), "float32"))
    step = fp.compile(graph, fp.losses.mse, optim.SGD(0.0), target="numpy", ranks=2, tensor=2)

    def job(world: Any) -> list[float]:
        session = step.bind(seed=1)
        batch = {"x": np.ones((1, 1), np.float32), "target": np.zeros((1, 1), np.float32)}
        return [session.step(batch).loss for _ in range(12)]

    squares, others = run(2, job)
    counts = [np.sqrt(square) / 2 for square in squares]  # what is kept is doubled
    assert squares == others and {round(count) % 2 for count in counts} == {0, 1}, counts


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        ("mlp:width=8,layers=1", {"ranks": 4, "tensor": 3}, r"tensor=3 does not divide ranks=4: take one of 1, 2, 4"),
        ("mlp:width=8,layers=1", {"tensor": 2}, "tensor=2 does not divide ranks=1"),
        (
            "mlp:width=9,layers=1,classes=9",
            {"ranks": 2, "tensor": 2},
            r"2 ranks do not divide the 9 elements .* \(1 or 3 would\)",
        ),
        ("resnet18:size=32,classes=9", {"ranks": 2, "tensor": 2}, "nothing of 'resnet18' can be computed in parts"),
        ("mlp:width=8,layers=1", {"ranks": 2, "tensor": 2, "optimizer": optim.Muon(0.01)}, "take tensor=1, or"),
        ("mlp:width=8,layers=1", {"ranks": 2, "tensor": 2, "optimizer": optim.LAMB(0.01)}, "take tensor=1, or"),
    ],
)
def test_what_cannot_be_in_parts(text: str, options: dict[str, Any], said: str) -> None:
    given: dict[str, Any] = {"loss": fp.losses.cross_entropy, "optimizer": optim.SGD(0.1), "target": "numpy"} | options
    with pytest.raises(fp.UsageError, match=said):
        fp.compile(fp.models.build(f"{text},batch=2"), **given)


def test_what_stays_whole_is_said() -> None:
    """And what more ranks would be too many for."""
    build, loss = model("gpt of a vocabulary that is odd"), fp.losses.cross_entropy
    step = fp.compile(build(2), loss, optim.SGD(0.1), target="numpy", ranks=2, tensor=2)
    (note,) = [note for note in step.program.notes if note.startswith("tensor=2")]
    weights = [slot.operand.type.size for slot in step.program.tensors if slot.kind == "parameter"]
    halves = [slot.operand.type.size for slot in step.program.tensors if slot.kind == "parameter" and slot.shard]
    share = f"{sum(halves) / sum(weights):.0%} of all weights"
    assert note.startswith(
        f"tensor=2: 4 of 5 products are computed in parts, with {share}; every rank computes 'matmul'"
    )
    assert "2 ranks do not divide the 61 elements" in note and step.estimate()["tensor"] == 2
    with pytest.raises(fp.UsageError, match="nothing of 'gpt2_small' can be computed in parts"):
        fp.compile(build(2), loss, optim.SGD(0.1), target="numpy", ranks=7, tensor=7)


@pytest.mark.parametrize("shard", ["none", "parameters"])
def test_plan_files(tmp_path: Path, shard: str) -> None:
    """A plan that is read does what the one that was written does."""
    compiled = fp.compile(
        model("bert")(4),
        fp.losses.cross_entropy,
        optim.Momentum(0.1),
        target="numpy",
        ranks=4,
        tensor=2,
        shard=shard,
    )
    compiled.save(tmp_path / "a.plan")
    read = fp.load_plan(tmp_path / "a.plan")
    batch = batches_for(compiled, 8, 1, LABELS)[0]

    def job(step: Any) -> Callable[[Any], tuple[float, dict[str, np.ndarray]]]:
        def of_rank(world: Any) -> tuple[float, dict[str, np.ndarray]]:
            session = step.bind(seed=1)
            return session.step(own_part(batch, world.rank // 2, 2)).loss, dict(session.stored)

        return of_rank

    for found, wanted in zip(run(4, job(read)), run(4, job(compiled)), strict=True):
        assert found[0] == wanted[0] and found[1].keys() == wanted[1].keys()
        for name, array in wanted[1].items():
            np.testing.assert_array_equal(found[1][name], array)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (r'"shard":\[2,', '"shard":[4,', "is not 1/4"),
        (r'"shard":\[2,0,1\]', '"shard":[2,0,7]', "is not 1/2 of each of 7 blocks"),
        (r'"shard":\[2,', '"shard":[1,', "is not 1/1"),
        (r'"shard":\[2,[01],', '"shard":[2,7,', "is not 1/2 along axis 7"),
        (r"begin_exchange\(ranks=2", "begin_exchange(ranks=3", "multiple of the 3 ranks|are not made up"),
        (r"begin_exchange\(ranks=2([^)]*)stride=2", r"begin_exchange(ranks=2\1stride=3", "not made up of groups|waits"),
    ],
)
def test_files_that_are_wrong(tmp_path: Path, old: str, new: str, said: str) -> None:
    path = tmp_path / "a.plan"
    options: Any = {"target": "numpy", "ranks": 4, "tensor": 2}
    compiled_once(model("llama")(2), fp.losses.cross_entropy, optim.Momentum(0.1), **options).save(path)
    edited(path, old, new)
    with pytest.raises(fp.PlanError, match=said):
        fp.load_plan(path)


def test_groups_have_links_of_their_own() -> None:
    """Four neighbours of a node of eight; and every fourth rank of sixteen, two of them in each node."""
    cluster = cluster_from("nvlink4*8+infiniband-ndr", target_named("cuda:h100").profile, 16)
    assert (cluster.group(4).ranks, cluster.group(4).devices, cluster.group(4).nodes) == (4, 2, 2)
    assert (cluster.group(16).ranks, cluster.group(16).nodes) == (1, 1)
    options: Any = {"target": "cuda:h100", "ranks": 16, "links": "nvlink4*8+infiniband-ndr"}
    build = fp.models.build("gpt2_small:layers=2,width=1024,heads=16,vocabulary=50264,batch=1")
    steps = [
        fp.compile(build, fp.losses.cross_entropy, optim.AdamW(0.1), tensor=tensor, **options) for tensor in (8, 16)
    ]
    beside, across = (step.estimate()["exchange_seconds"] for step in steps)
    assert across > 1.4 * beside, "a group that lies on two nodes exchanges by slower links"


def test_what_ranks_make_of_constants_is_not_computed_at_once() -> None:
    """It is another thing on each: an index within a rank's rows, a sum, a part of a constant."""
    b, type = GraphBuilder(), TensorType(DTYPES["int64"], (4,))
    places = b.store("places", type, Kind.CONSTANT, Array(np.arange(4)))
    local = b.apply(LocalIndex(2, extent=2), places)
    total = b.apply(AllReduce(2), places)
    part = b.store("part", TensorType(DTYPES["int64"], (2,)), Kind.CONSTANT, Sharded(Shard(2, 0), type, places.init))
    moved = elementwise(b, lambda x: x + 1, part)
    graph = fold_constants(b.finish({"local": local, "total": total, "moved": moved}))
    assert [node.op.name for node in graph.nodes] == ["local_index", "all_reduce", "map"]
    assert not Known(graph, 1 << 20).decided.intersection((*graph.outputs.values(), part))
    program = fp.lower(graph, "numpy")
    plan = fp.plan(program)
    outputs = run(2, lambda world: Session(program, plan).step({}).outputs)
    for rank, found in enumerate(outputs):
        np.testing.assert_array_equal(found["local"], [[0, 1, -1, -1], [-1, -1, 0, 1]][rank])
        np.testing.assert_array_equal(found["total"], [0, 2, 4, 6])
        np.testing.assert_array_equal(found["moved"], [[1, 2], [3, 4]][rank])


@pytest.mark.parametrize("how", ["checkpoint", "offload", "budget"])
def test_less_memory_beside_parts(how: str) -> None:
    """What is recomputed, copied to the host, or planned within a budget, gives the same."""
    text = TEXTS["llama"].replace("layers=1", "layers=2")

    def deep(batch: int) -> Graph:
        return fp.models.build(f"{text},batch={batch}")

    (alone,) = trained(deep, optim.Momentum(0.2), 1, 8)
    options: dict[str, Any] = {"ranks": 2, "tensor": 2, "target": "numpy"}
    free = compiled_once(deep(8), fp.losses.cross_entropy, optim.Momentum(0.2), **options).arena_bytes
    more: dict[str, Any] = {
        "checkpoint": {"checkpoint": ["model.layers.*"]},
        "offload": {"offload": True},
        "budget": {"budget": free * 97 // 100},
    }[how]
    found = trained(deep, optim.Momentum(0.2), 2, 8, tensor=2, **more)
    assert_close(found[0], alone)
    assert_same(found[1], found[0])
    assert found[0].allocated < free or how == "offload"
