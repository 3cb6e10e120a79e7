"""Stages train as one process with as many micro-batches does, whatever the model and wherever it is cut."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

import foreplan as fp
from foreplan import optim
from foreplan.frontend import nn
from foreplan.graph import Graph
from foreplan.lower.stage_times import run_stages
from foreplan.passes import loss_scale
from tests.profile import few, values
from tests.ranks.stages import (
    assert_as_alone,
    compiled_stages,
    one_process_goes_on,
    trained_alone,
    trained_in_stages,
    trained_saved_and_read,
)
from tests.ranks.test_batch_norm import network
from tests.ranks.threads import Thread, run
from tests.ranks.training import EPSILON

GPT = "gpt2_small:layers=2,width=32,heads=2,seq=8,vocabulary=61,batch=2"
LLAMA = "llama:layers=2,width=32,heads=2,kv_heads=1,features=40,seq=8,vocabulary=61,tied=False,batch=2"


def dropped() -> Graph:
    """Layers with dropout between them."""

    def model(x: Any) -> Any:
        for number in range(3):
            x = nn.dropout(nn.relu(nn.linear(x, 16, name=f"layer{number}")), 0.3)
        return nn.linear(x, 10, name="head")

    return fp.trace(model, fp.spec((4, 12)))


MODELS: dict[str, Callable[[], Graph]] = {
    "mlp": lambda: fp.models.build("mlp:width=23,layers=4,batch=3"),
    "tied": lambda: fp.models.build(GPT),
    "untied": lambda: fp.models.build(LLAMA),
    "dropout": dropped,
}


@pytest.mark.parametrize(("name", "counts"), values(MODELS, [(2, 1), (2, 5), (3, 2), (4, 3)]))
def test_stages_train_as_one_process(name: str, counts: tuple[int, int]) -> None:
    """Random masks, too, are those of one process."""
    stages, micro_batches = counts
    graph, optimizer = MODELS[name](), optim.Momentum(0.01)
    alone, batches = trained_alone(graph, micro_batches, optimizer=optimizer)
    compiled = compiled_stages(graph, stages, micro_batches, optimizer=optimizer)
    assert_as_alone(trained_in_stages(compiled, batches), alone)
    run_stages([(each.program, each.plan) for each in compiled])  # raises where stages would wait for ever


@pytest.mark.parametrize("stages", [2, 4])
def test_running_statistics_go_from_one_micro_batch_to_the_next(stages: int) -> None:
    graph, optimizer = network(3, 6, 6, times=4)(4), optim.Momentum(0.01)
    alone, batches = trained_alone(graph, 3, steps=1, optimizer=optimizer)
    found = trained_in_stages(compiled_stages(graph, stages, 3, optimizer=optimizer), batches)
    assert_as_alone(found, alone, 1e-4)


OPTIONS: dict[str, dict[str, Any]] = {
    "norm of all": {"optimizer": optim.AdamW(0.01, epsilon=EPSILON, clip_norm=0.1, weight_decay=0.1, decay="matrices")},
    "groups": {"optimizer": optim.SGD(0.1, groups=[optim.Group("wte*", rate=3.0), optim.Group("*ln_f*", rate=0.5)])},
    "averages": {"optimizer": optim.SGD(optim.cosine(0.1, steps=10), ema=0.9)},
    "cpu": {"optimizer": optim.SGD(0.1), "target": "cpu:threads=1"},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str) -> None:
    graph = fp.models.build(GPT)
    alone, batches = trained_alone(graph, 4, **OPTIONS[name])
    found = trained_in_stages(compiled_stages(graph, 3, 4, **OPTIONS[name]), batches)
    assert_as_alone(found, alone, 1e-4 if name == "norm of all" else 1e-5)


@pytest.mark.parametrize("precision", few(["fp16", "bf16"]))
def test_narrow_numbers(precision: str) -> None:
    """Sums over micro-batches have one order; what crosses is narrow in one process, too."""
    graph, options = fp.models.build(GPT), {"optimizer": optim.SGD(0.1), "precision": precision}
    alone, batches = trained_alone(graph, 4, **options)
    found = trained_in_stages(compiled_stages(graph, 3, 4, **options), batches)
    assert_as_alone(found, alone, 2e-3)


def test_an_overflow_in_one_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a scale that is too large, no stage updates anything, and all halve it."""
    monkeypatch.setattr(loss_scale, "FIRST", 2.0**24)
    graph, options = fp.models.build(GPT), {"optimizer": optim.SGD(0.1), "precision": "fp16"}
    alone, batches = trained_alone(graph, 4, steps=1, **options)
    compiled = compiled_stages(graph, 3, 4, **options)
    for each in (alone, *trained_in_stages(compiled, batches)):
        assert each.stored["loss_scale"] == 2.0**23 and each.stored["step"] == 0


def test_poisoned_memory_and_recomputation() -> None:
    """What is sent and what arrives stays while it moves: dead bytes hold NaN. The first stage recomputes."""
    graph = fp.models.build("gpt2_small:layers=2,width=64,heads=2,seq=32,vocabulary=61,batch=2")
    options: dict[str, Any] = {"optimizer": optim.AdamW(0.01, epsilon=EPSILON, clip_norm=0.1)}
    alone, batches = trained_alone(graph, 4, steps=2, **options)
    wide = compiled_stages(graph, 2, 4, **options)
    tight = compiled_stages(graph, 2, 4, **options, budget=int(0.93 * max(each.arena_bytes for each in wide)))
    assert tight[0].estimate()["extra_flops_ratio"] > 0
    assert_as_alone(trained_in_stages(tight, batches, poison=True), alone, 1e-4)


@pytest.mark.parametrize("stages", few([2, 3]))
def test_one_checkpoint(tmp_path: Path, stages: int) -> None:
    """All stages write one file, that of one process; each goes on from it bit for bit, and so does one process, or
    other stages.
    """
    graph, optimizer = fp.models.build(GPT), optim.Momentum(0.2)
    compiled = compiled_stages(graph, stages, 2, optimizer=optimizer)
    alone, batches = trained_alone(graph, 2, optimizer=optimizer)
    path = tmp_path / "saved.safetensors"

    def job(world: Thread) -> tuple[float, float]:
        return trained_saved_and_read(compiled[world.rank], batches, path)

    for loss, again in run(stages, job):
        assert loss == again == pytest.approx(alone.losses[2], rel=1e-5)
    one = one_process_goes_on(graph, optimizer, path, batches, alone)
    one.save(path)

    def last(world: Thread) -> dict[str, np.ndarray]:
        session = others[world.rank].bind(seed=4)
        session.load(path)
        return dict(session.stored)

    others = compiled_stages(graph, 5 - stages, 2, optimizer=optimizer)
    for stored in run(5 - stages, last):
        for name, value in stored.items():
            np.testing.assert_array_equal(value, one.stored[name], name)


def test_weights_of_the_whole_model() -> None:
    """A stage reads its own of them, of a file without an optimizer's state."""
    graph = fp.models.build(GPT)
    whole = fp.compile(graph, fp.losses.cross_entropy, optim.SGD(0.1), target="numpy").bind(seed=5)
    compiled = compiled_stages(graph, 2, 2, optimizer=optim.SGD(0.1))

    def job(world: Thread, path: Path) -> dict[str, np.ndarray]:
        session = compiled[world.rank].bind(seed=6)
        session.load(path)
        return dict(session.parameters)

    with TemporaryDirectory() as folder:
        path = Path(folder) / "whole.safetensors"
        whole.save(path)
        found = run(2, partial(job, path=path))
    for weights in found:
        for name, value in weights.items():
            np.testing.assert_array_equal(value, whole.parameters[name])
