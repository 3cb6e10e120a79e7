"""Stages train as one process with as many micro-batches does, whatever the model and wherever it is cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import foreplan as fp
from foreplan import optim
from foreplan.graph import Graph
from tests.ranks.stages import assert_as_alone, compiled_stages, trained_alone, trained_in_stages

MODELS: dict[str, Callable[[], Graph]] = {
    "mlp": lambda: fp.models.build("mlp:width=23,layers=4,batch=3"),
    "gpt": lambda: fp.models.build("gpt2_small:layers=3,width=32,heads=2,seq=8,vocabulary=61,batch=2"),
    "gpt untied": lambda: fp.models.build("llama:layers=3,width=32,heads=2,kv_heads=1,features=40,seq=8,vocabulary=61,tied=False,batch=2"),
    "resnet": lambda: fp.models.build("resnet18:size=32,classes=10,batch=2"),
}


@pytest.mark.parametrize("micro_batches", [1, 2, 5])
@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_stages_train_as_one_process(model: Callable[[], Graph], stages: int, micro_batches: int) -> None:
    graph = model()
    alone, batches = trained_alone(graph, micro_batches, optimizer=optim.Momentum(0.01))
    found = trained_in_stages(compiled_stages(graph, stages, micro_batches, optimizer=optim.Momentum(0.01)), batches)
    assert_as_alone(found, alone)
