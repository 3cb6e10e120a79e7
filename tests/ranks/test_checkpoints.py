"""One checkpoint, whatever the ranks: what some wrote, others go on from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import foreplan as fp
from foreplan import optim
from foreplan.frontend import Tensor, nn
from tests.profile import few, pick
from tests.ranks.kept import compiled_once
from tests.ranks.threads import Thread, run
from tests.ranks.training import batches_for, own_part

SAMPLES = 12


def steps(
    ranks: int,
    shard: str,
    first: int,
    last: int,
    read: Path | None = None,
    write: Path | None = None,
    dropout: float = 0.0,
    tensor: int = 1,
) -> list[tuple[list[float], dict[str, np.ndarray]]]:
    """Losses of some steps, and what was stored then, of each rank, from a checkpoint on and to one."""
    text = f"gpt2_small:layers=1,width=24,heads=2,seq=6,vocabulary=38,dropout={dropout}"
    text += f",batch={SAMPLES * tensor // ranks}"
    model, loss = fp.models.build(text), fp.losses.cross_entropy
    options: Any = {"target": "numpy", "ranks": ranks, "shard": shard, "tensor": tensor}
    step = compiled_once(model, loss, optim.AdamW(0.01, ema=0.9), **options)
    batches = batches_for(step, SAMPLES, last)[first:]

    def job(world: Thread | None) -> tuple[list[float], dict[str, np.ndarray]]:
        session = step.bind(seed=1)
        if read is not None:
            session.load(read)
        assert session.steps_done == first
        rank = 0 if world is None else world.rank
        place = rank // tensor, ranks // tensor
        losses: list[Any] = [session.step(own_part(batch, *place)).loss for batch in batches]
        if write is not None:
            session.save(write)
        return losses, dict(session.stored)

    return [job(None)] if ranks == 1 else run(ranks, job)


@pytest.mark.parametrize(
    ("ranks", "shard", "tensor"),
    few(
        [
            (2, "none", 1),
            (2, "state", 1),
            (3, "parameters", 1),
            (4, "gradients", 1),
            (2, "none", 2),
            (4, "parameters", 2),
        ],
        (2, 3, 5),
    ),
)
def test_other_ranks_go_on_where_some_stopped(tmp_path: Path, ranks: int, shard: str, tensor: int) -> None:
    path = tmp_path / "w.safetensors"
    steps(ranks, shard, 0, 2, write=path, tensor=tensor)
    ((wanted, whole),) = steps(1, "none", 0, 4)
    others = [(1, "none", 1), (2, "parameters", 1), (4, "state", 2), (ranks, shard, tensor), (4, "state", 1)]
    others = others[: pick(4, 4, 5)]
    for count, mode, alike in others:
        for losses, stored in steps(count, mode, 2, 4, read=path, tensor=alike):
            np.testing.assert_allclose(losses, wanted[2:], rtol=2e-5)
            for name, array in whole.items():
                np.testing.assert_allclose(stored[name].astype(float), array.astype(float), atol=2e-4, err_msg=name)


@pytest.mark.parametrize("shard", ["none", "parameters"])
def test_going_on_changes_no_bit(tmp_path: Path, shard: str) -> None:
    """Dropout goes on as it was on each rank, too."""
    path = tmp_path / "w.safetensors"
    at_once = steps(3, shard, 0, 4, dropout=0.3)
    steps(3, shard, 0, 2, write=path, dropout=0.3)
    for found, wanted in zip(steps(3, shard, 2, 4, read=path, dropout=0.3), at_once):
        assert found[0] == wanted[0][2:]
        for name, array in wanted[1].items():
            np.testing.assert_array_equal(found[1][name], array, name)


def test_the_file_is_the_same_whatever_is_in_parts(tmp_path: Path) -> None:
    files = []
    for shard in ("none", "state", "gradients", "parameters"):
        steps(3, shard, 0, 2, write=tmp_path / shard)
        files.append((tmp_path / shard).read_bytes())
    assert len(set(files)) == 1


def test_masks_of_parts_do_not_hinder(tmp_path: Path) -> None:
    """Ranks that draw numbers of their own keep no state of their own: one process goes on, and they go on from it."""

    def step(ranks: int) -> Any:
        def units(x: Tensor) -> dict[str, Tensor]:
            return {"y": nn.linear(nn.dropout(nn.linear(x, 8, name="up"), 0.5), 3, name="down")}

        graph = fp.trace(units, fp.spec((2, 5)))
        return fp.compile(graph, fp.losses.mse, optim.Adam(0.1), target="numpy", ranks=ranks, tensor=ranks)

    batch = {"x": np.ones((2, 5), np.float32), "target": np.zeros((2, 3), np.float32)}

    def job(world: Thread | None, compiled: Any, read: Path | None, write: Path) -> float:
        session = compiled.bind(seed=1)
        if read is not None:
            session.load(read)
        loss: float = session.step(batch).loss
        session.save(write)
        return loss

    one, two = step(1), step(2)
    run(2, lambda world: job(world, two, None, tmp_path / "a"))
    job(None, one, tmp_path / "a", tmp_path / "b")
    twice = [run(2, lambda world: job(world, two, tmp_path / "b", tmp_path / "c"))[0] for _ in range(2)]
    assert twice[0] == twice[1]


def test_the_same_file_from_groups(tmp_path: Path) -> None:
    """Whatever is in parts, for two groups of two ranks."""
    files = []
    for shard in ("none", "state", "parameters"):
        steps(4, shard, 0, 2, write=tmp_path / shard, tensor=2)
        files.append((tmp_path / shard).read_bytes())
    assert len(set(files)) == 1


@pytest.mark.parametrize("shard", ["none", "parameters"])
def test_a_file_that_cannot_be_written_is_told_to_all(tmp_path: Path, shard: str) -> None:
    """Nobody waits for ever, and what was there stays."""
    step = fp.compile(
        fp.models.build("mlp:width=8,layers=1,batch=2"),
        fp.losses.cross_entropy,
        optim.SGD(0.1),
        target="numpy",
        ranks=3,
        shard=shard,
    )

    def job(world: Thread) -> str:
        session = step.bind(seed=1)
        with pytest.raises(fp.ForeplanError) as caught:
            session.save(tmp_path / "nowhere" / "w.safetensors")
        session.save(tmp_path / "w.safetensors")  # it still can
        return str(caught.value)

    first, *others = run(3, job)
    assert "create the directory" in first and others == [f"rank 0 failed: {first}"] * 2
    assert os.listdir(tmp_path) == ["w.safetensors"]


def test_masks_differ_from_rank_to_rank() -> None:
    """The same samples on all ranks give other losses under dropout, and the same weights all the same."""
    model = fp.models.build("gpt2_small:layers=1,width=24,heads=2,seq=6,vocabulary=37,dropout=0.5,batch=2")
    step = fp.compile(model, fp.losses.cross_entropy, optim.SGD(0.1), target="numpy", ranks=2, outputs=["logits"])
    (batch,) = batches_for(step, 2, 1)

    def job(world: Thread) -> tuple[np.ndarray, float, dict[str, np.ndarray]]:
        session = step.bind(seed=1)
        result = session.step(batch)
        assert result.loss is not None
        return result.outputs["logits"], result.loss, dict(session.stored)

    one, two = run(2, job)
    assert np.abs(one[0] - two[0]).max() > 0.01 and one[1] == two[1]
    for name, array in one[2].items():
        np.testing.assert_array_equal(two[2][name], array, name)
