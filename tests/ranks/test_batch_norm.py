"""Batch normalisation over the batches of all ranks, and by each rank's own batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest

import foreplan as fp
from foreplan import nn, optim
from foreplan.graph import Graph
from tests.profile import few, pick, values
from tests.ranks.kept import compiled_once
from tests.ranks.threads import Thread, run
from tests.ranks.training import EPSILON, Batch, Trained, assert_close, assert_same, batches_for, own_part, trained

SHARDS = ["none", "state", "gradients", "parameters"]
LAYERS = 6  # of batch normalisation in `residual`
UNIT = 2.0**-24  # half of what lies between 1 and the next number of float32


def residual(dtype: str, activation: Callable[[Any], Any]) -> Callable[[int], Graph]:
    """A residual network: a convolution, two blocks, the second of half the size, and classes."""

    def convolved(x: Any, channels: int, size: int, stride: int = 1) -> Any:
        return nn.batch_norm(nn.conv(x, channels, size, stride=stride, padding=size // 2, bias=False))

    def block(x: Any, channels: int, stride: int) -> Any:
        y = convolved(activation(convolved(x, channels, 3, stride)), channels, 3)
        return activation(y + (x if stride == 1 else convolved(x, channels, 1, stride)))

    def forward(x: Any) -> Any:
        x = block(block(activation(convolved(x, 6, 3)), 6, 1), 12, 2)
        return nn.linear(nn.global_avg_pool(x), 10)

    return lambda batch: fp.trace(forward, fp.spec((batch, 3, 6, 6), dtype))


def network(
    *shape: int, channels: int = 6, momentum: float = 0.9, epsilon: float = 1e-5, times: int = 2
) -> Callable[[int], Graph]:
    """Convolutions (of [N, C], products), each normalised, and classes."""

    def forward(x: Any) -> Any:
        for i in range(times):
            more = {"bias": False}  # its gradient would be roundings alone
            x = nn.conv(x, channels + i, 3, padding=1, **more) if shape[1:] else nn.linear(x, channels + i, **more)
            x = np.tanh(nn.batch_norm(x, momentum, epsilon))  # smooth: a ReLU turns at a rounding
        return nn.linear(nn.flatten(x), 10)

    return lambda batch: fp.trace(forward, fp.spec((batch, *shape)))


def each_alone(compiled: Any, parts: list[list[Batch]]) -> list[tuple[list[float], dict[str, np.ndarray]]]:
    """Losses and stored values of a rank for each list of batches, as threads; of one process if it is one list."""

    def job(world: Thread | None) -> tuple[list[float], dict[str, np.ndarray]]:
        session = compiled.bind(seed=1)
        losses = [session.step(batch).loss for batch in parts[0 if world is None else world.rank]]
        return losses, dict(session.stored)

    return [job(None)] if len(parts) == 1 else run(len(parts), job)


def compiled_for(model: Graph, ranks: int, batch_norm: str = "sync", **options: Any) -> Any:
    given = {"target": "numpy", "optimizer": optim.Momentum(0.05)} | options
    return compiled_once(model, fp.losses.cross_entropy, ranks=ranks, batch_norm=batch_norm, **given)


def distance(found: Trained, wanted: Trained) -> float:
    """Of all that is trained, the most by which one is off: a share of the tensor's norm."""
    wide = {name: value.astype(np.float64) for name, value in wanted.stored.items() if value.dtype.kind == "f"}
    off = {name: np.linalg.norm(found.stored[name] - value) / np.linalg.norm(value) for name, value in wide.items()}
    return float(max(off.values()))


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_residual_network_trains_as_in_one_process(ranks: int) -> None:
    """In float64: there sums in another order move nothing across the zero of a ReLU, behind which gradients jump. The
    bound is that of the test below in units of float64, 2^29 of which are one of float32.
    """
    model, optimizer = residual("float64", nn.relu), optim.Momentum(0.01)
    (alone,) = trained(model, optimizer, 1, 12)
    found = trained(model, optimizer, ranks, 12, batch_norm="sync")
    local = trained(model, optimizer, ranks, 12)
    assert found[0].losses == pytest.approx(alone.losses, rel=1e-6)  # which is float32
    assert distance(found[0], alone) < 1e-13 < 1 < distance(local[0], alone)
    for each in found[1:]:
        assert_same(each, found[0])
        assert each.log == found[0].log
    assert len(found[0].log) == len(local[0].log) + 3 * 2 * LAYERS, "one a layer and direction, in each of three steps"


@pytest.mark.parametrize(("ranks", "target"), values([2, 3], ["numpy", "cpu"]))
def test_a_smooth_residual_network_rounds_no_more_than_its_calls(ranks: int, target: str) -> None:
    """From the same network in float64 it lies no farther than one rounding of all that it begins with leads, times
    4 √n for the n calls of the steps, each of which rounds once (Higham and Mary 2019, SIAM J. Sci. Comput. 41(5)).
    """
    optimizer, steps = optim.Momentum(0.01), 3
    wide = compiled_once(residual("float64", np.tanh)(12), fp.losses.cross_entropy, optimizer, target="numpy")
    batches = batches_for(wide, 12, steps)
    exact, moved = (_stored_after(wide, batches, unit) for unit in (0.0, UNIT))
    found = trained(residual("float32", np.tanh), optimizer, ranks, 12, steps, target=target, batch_norm="sync")
    calls = steps * len(wide.program.calls)
    assert distance(found[0], exact) < 4 * calls**0.5 * distance(moved, exact) < 1e-4


def _stored_after(compiled: Any, batches: list[Batch], unit: float) -> Trained:
    """What a session stores after some steps, where each number that it begins with is off by a unit, up or down."""
    rng = np.random.default_rng(0)

    def moved(x: np.ndarray) -> np.ndarray:
        return x * (1 + unit * rng.choice([-1.0, 1.0], x.shape)) if x.dtype.kind == "f" else x

    session = compiled.bind(seed=1)
    for name, weight in session.parameters.items():
        session.parameters[name] = moved(weight)
    for batch in batches:
        session.step({name: moved(array) for name, array in batch.items()})
    return Trained([], dict(session.stored), [], 0)


@pytest.mark.parametrize(("ranks", "target", "shard"), values([2, 3, 4], ["numpy", "cpu"], SHARDS))
def test_all_that_ranks_hold_parts_of(ranks: int, target: str, shard: str) -> None:
    model = network(3, 7, 5)
    (alone,) = trained(model, optim.AdamW(0.01, epsilon=EPSILON), 1, 24, target=target)
    found = trained(model, optim.AdamW(0.01, epsilon=EPSILON), ranks, 24, target=target, shard=shard, batch_norm="sync")
    assert_close(found[0], alone)
    for each in found[1:]:
        assert_same(each, found[0])


@pytest.mark.parametrize("seed", range(pick(4, 6, 200)))
def test_drawn_layers(seed: int) -> None:
    """Of [N, C] and images of one to three axes, with any momentum and epsilon."""
    rng = Random(seed)
    shape = (rng.randint(1, 4), *(rng.randint(1, 5) for _ in range(rng.randint(0, 3))))
    of_model = {
        "channels": rng.choice([1, 3, 8, 17]),
        "momentum": rng.uniform(0, 1),
        "epsilon": 10 ** rng.uniform(-5, -1),
        "times": rng.randint(1, 3),
    }
    ranks, samples = rng.randint(2, 4), rng.randint(2, 4)
    options = {"target": rng.choice(["numpy", "cpu"]), "batch_norm": "sync"}
    model = network(*shape, **of_model)  # type: ignore[arg-type]
    (alone,) = trained(model, optim.Momentum(0.01), 1, ranks * samples, **options)
    found = trained(model, optim.Momentum(0.01), ranks, ranks * samples, shard=rng.choice(SHARDS), **options)
    assert_close(found[0], alone)
    for each in found[1:]:
        assert_same(each, found[0])


@pytest.mark.parametrize(("target", "shard"), values(["numpy", "cpu"], SHARDS))
def test_narrow_images(shard: str, target: str) -> None:
    """Statistics and what is exchanged stay float32."""
    options = {"precision": "bf16", "target": target, "batch_norm": "sync"}
    (alone,) = trained(network(3, 6, 6), optim.Momentum(0.01), 1, 16, **options)
    found = trained(network(3, 6, 6), optim.Momentum(0.01), 2, 16, shard=shard, **options)
    np.testing.assert_allclose(found[0].losses, alone.losses, rtol=2e-3)
    for name, value in alone.stored.items():
        if "running" in name:
            np.testing.assert_allclose(found[0].stored[name], value, rtol=2e-3, atol=2e-3, err_msg=name)
    assert_same(found[1], found[0])


def test_a_rank_with_statistics_of_its_own() -> None:
    """It normalises as if it were alone with its batch; then a loss is not that of one process with all samples."""
    model = network(3, 6, 6)
    one = compiled_for(model(4), 1)
    (batch,) = batches_for(one, 8, 1)
    parts = [[own_part(batch, rank, 2)] for rank in range(2)]
    alone = [each_alone(one, [part])[0] for part in parts]
    together = each_alone(compiled_for(model(4), 2, "train"), parts)
    for rank in range(2):
        assert together[rank][0] == pytest.approx([np.mean([losses for losses, _ in alone])], rel=1e-6)
        for name, value in alone[rank][1].items():
            if "running" in name:
                np.testing.assert_array_equal(together[rank][1][name], value, name)
                assert not np.array_equal(together[1 - rank][1][name], value)
    ((losses, _),) = each_alone(compiled_for(model(8), 1), [[batch]])
    assert abs(losses[0] - together[0][0][0]) > 1e-3


def test_micro_batches_are_normalised_each_by_itself() -> None:
    """Over all ranks: as one process does whose micro-batches are those of all ranks."""
    model = network(3, 6, 6)
    options = {"accumulate": 3}
    one, two = compiled_for(model(8), 1, **options), compiled_for(model(4), 2, **options)
    wholes = batches_for(one, 24, 2)
    parts = [[own_part(batch, rank, 2, 3) for batch in wholes] for rank in range(2)]
    joined = [{name: np.concatenate([part[name] for part in both], 1) for name in both[0]} for both in zip(*parts)]
    ((losses, stored),) = each_alone(one, [joined])
    found = each_alone(two, parts)
    np.testing.assert_allclose(found[0][0], losses, rtol=2e-5)
    for name, value in stored.items():
        np.testing.assert_allclose(found[0][1][name], value, atol=1e-4, err_msg=name)


def test_a_mean_far_from_zero_costs_no_digits() -> None:
    """Nor do means that differ from rank to rank."""

    def normalised(batch: int) -> Graph:
        return fp.trace(lambda x: nn.linear(nn.batch_norm(x, momentum=0.0), 10), fp.spec((batch, 5)))

    compiled = compiled_for(normalised(16), 4)
    (batch,) = batches_for(compiled, 64, 1)
    (name,) = (name for name, x in batch.items() if x.dtype == np.float32)
    batch[name] = batch[name] + np.float32(1e4) + np.repeat(np.arange(4, dtype=np.float32), 16)[:, None]
    found = each_alone(compiled, [[own_part(batch, rank, 4)] for rank in range(4)])
    (variance,) = (value for name, value in found[0][1].items() if name.endswith("running_var"))
    exact = batch[name].astype(np.float64).var(0)
    np.testing.assert_allclose(variance, exact, rtol=1e-5, atol=2 * 2 * np.spacing(np.float32(1e4)))  # of two means


def test_gradients_of_gradients() -> None:
    """The cotangents of the statistics are those of all ranks, too."""

    def forward(x: Any) -> Any:
        y = nn.linear(nn.sigmoid(nn.batch_norm(nn.linear(x, 6))), 10)
        slopes = fp.gradient((y * y).sum(), x)
        return y + nn.linear(nn.batch_norm(slopes * slopes), 10)

    def model(batch: int) -> Graph:
        return fp.trace(forward, fp.spec((batch, 5)))

    (alone,) = trained(model, optim.SGD(0.1), 1, 12)
    for ranks in (2, 3):
        assert_close(trained(model, optim.SGD(0.1), ranks, 12, batch_norm="sync")[0], alone)


def test_frozen_statistics_are_exchanged_by_nobody() -> None:
    """Of layers whose scale and bias are frozen."""
    logs = {
        name: trained(network(3, 6, 6), optim.SGD(0.1), 2, 8, batch_norm=name, freeze=["batch_norm*"])[0].log
        for name in ("sync", "train", "frozen")
    }
    assert logs["sync"] == logs["train"] == logs["frozen"]


def test_one_rank_runs_the_same_graph() -> None:
    texts = [compiled_for(network(3, 6, 6)(4), 1, name).program.as_text() for name in ("sync", "train")]
    assert texts[0] == texts[1]


def test_what_is_exchanged() -> None:
    """Means and variances of all channels at once, and the sums of their gradients at once."""
    (first,) = {tuple(each.log) for each in trained(network(3, 6, 6), optim.SGD(0.1), 2, 8, 1, batch_norm="sync")}
    (other,) = {tuple(each.log) for each in trained(network(3, 6, 6), optim.SGD(0.1), 2, 8, 1)}
    sent = {channels: 2 * channels * 4 for channels in (6, 7)}
    wanted = Counter((2, "all_gather", 0, nbytes, 2 * nbytes) for nbytes in (*sent.values(), *sent.values()))
    assert Counter(first) - Counter(other) == wanted and not Counter(other) - Counter(first)


@pytest.mark.parametrize(("target", "precision"), values(["numpy", "cpu"], ["float32", "bf16"]))
def test_memory(target: str, precision: str) -> None:
    """Nothing more is kept for the backward pass: only the exchanged vectors are there beside it."""

    def nbytes(model: Graph, name: str, **more: Any) -> int:
        compiled = compiled_for(model, 4, name, target=target, precision=precision, remat="off", **more)
        return int(compiled.arena_bytes)

    images = fp.models.build("resnet18:size=64,classes=10,batch=64")
    assert nbytes(images, "sync") <= 1.02 * nbytes(images, "train")
    small = network(3, 64, 64, channels=16, times=4)(16)
    vectors = 2 * 4 * (16 + 17 + 18 + 19) * (4 + 4)  # two of each layer: of four ranks, and four more of its own
    assert nbytes(small, "sync") <= nbytes(small, "train") + vectors + 4096


@pytest.mark.parametrize("budget", few([0.75, 0.9]))
def test_recomputation_exchanges_nothing_again(budget: float) -> None:
    model = network(3, 16, 16, channels=8, times=3)
    free = trained(model, optim.SGD(0.1), 2, 16, batch_norm="sync", remat="off")
    tight = trained(model, optim.SGD(0.1), 2, 16, batch_norm="sync", budget=budget)
    assert tight[0].allocated < free[0].allocated
    # In parts of channels there are more exchanges, of fewer bytes each.
    sent = [sum(nbytes for _, _, _, nbytes, _ in each[0].log) for each in (tight, free)]
    assert sent[0] == sent[1]
    assert_close(tight[0], free[0])
