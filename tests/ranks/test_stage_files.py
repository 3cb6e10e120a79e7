"""Adapters and averages of a model in stages: the files of one process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import foreplan as fp
from foreplan import optim
from foreplan.graph import Graph
from tests.profile import values
from tests.ranks.kept import compiled_once
from tests.ranks.stages import compiled_stages
from tests.ranks.threads import Thread, run
from tests.ranks.training import batches_for, own_part

GPT = "gpt2_small:layers=3,width=32,heads=4,seq=8,vocabulary=60,batch={batch}"
MODELS: dict[str, Callable[[Graph], Graph]] = {
    "all products": lambda graph: fp.lora(graph, rank=2),
    "the last block": lambda graph: fp.lora(graph, 2, targets=["h.2.*"]),
    "with magnitudes": lambda graph: fp.lora(graph, 2, targets=["h.*.mlp.*"], dora=True),
}
GROUPS = [(2, 1, "none"), (3, 2, "parameters"), (2, 2, "state")]  # stages, ranks of each, what lies in parts


def written(
    path: Path,
    build: Callable[[Graph], Graph],
    write: Callable[[fp.Session, Path], None],
    groups: tuple[int, int, str],
    **options: Any,
) -> tuple[Path, Path]:
    """Where one process has written something after three steps, and where all stages have."""
    (stages, ranks, shard), micro_batches = groups, 2
    alone = compiled_once(
        build(fp.models.build(GPT.format(batch=ranks))),
        fp.losses.cross_entropy,
        target="numpy",
        accumulate=micro_batches,
        **options,
    )
    batches = batches_for(alone, micro_batches * ranks, 3)
    batches = [own_part(batch, 0, 1, micro_batches) for batch in batches]
    session = alone.bind(seed=1)
    for batch in batches:
        session.step(batch)
    write(session, path / "one")
    whole = build(fp.models.build(GPT.format(batch=1)))
    compiled = compiled_stages(whole, stages, micro_batches, ranks=stages * ranks, shard=shard, **options)

    def job(world: Thread) -> None:
        step = compiled[world.rank // ranks]
        own, names = step.bind(seed=1), [slot.name for slot in step.program.required_inputs]
        for batch in batches:
            part = world.rank % ranks
            own.step({name: batch[name][:, part : part + 1] for name in names})
        write(own, path / "many")

    run(stages * ranks, job)
    return path / "one", path / "many"


def assert_alike(one: Path, many: Path) -> None:
    """Check that two files have the same tensors, to rounding."""
    wanted, found = load_file(one), load_file(many)
    assert wanted.keys() == found.keys() and wanted
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(("name", "groups"), values(MODELS, GROUPS))
def test_adapters(tmp_path: Path, name: str, groups: tuple[int, int, str]) -> None:
    """Also where a stage has none, and where other weights are trained beside them, one of which two stages share."""
    options = {"optimizer": optim.Momentum(0.05), "train": ["wte*", "h.1.ln_1*"]}
    one, many = written(tmp_path, MODELS[name], lambda session, path: session.save_adapters(path), groups, **options)
    assert_alike(one / "adapter_model.safetensors", many / "adapter_model.safetensors")
    told = [json.loads((folder / "adapter_config.json").read_text()) for folder in (one, many)]
    assert told[0] == told[1]


def test_no_adapters(tmp_path: Path) -> None:
    with pytest.raises(fp.SessionError, match="has no adapters"):
        written(
            tmp_path,
            lambda graph: graph,
            lambda session, path: session.save_adapters(path),
            GROUPS[0],
            optimizer=optim.SGD(0.1),
        )


@pytest.mark.parametrize(("train", "groups"), values([("*",), ("h.2.*",)], GROUPS))
def test_averages(tmp_path: Path, train: tuple[str], groups: tuple[int, int, str]) -> None:
    """Also where a stage trains nothing, and keeps none."""
    one, many = written(
        tmp_path,
        lambda graph: graph,
        lambda session, path: session.save(path, ema=True),
        groups,
        optimizer=optim.Momentum(0.05, ema=0.5),
        train=list(train),
    )
    assert_alike(one, many)


def test_no_averages(tmp_path: Path) -> None:
    with pytest.raises(fp.SessionError, match="keeps no averages"):
        written(
            tmp_path,
            lambda graph: graph,
            lambda session, path: session.save(path, ema=True),
            GROUPS[0],
            optimizer=optim.SGD(0.1),
        )
