"""Modules that PyTorch's exporter wrote as ONNX, counted as PyTorch runs them: to the byte, once more."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make setup-torch")

import foreplan as fp  # noqa: E402
from foreplan.eager import Variant, as_pytorch  # noqa: E402
from foreplan.frontend.losses import attach_loss  # noqa: E402
from tests.torch.alive import phases  # noqa: E402
from tests.torch.exports import example  # noqa: E402

MODULES = (
    "mlp with dropout",
    "highway",
    "vgg",
    "squeeze excite",
    "clip",
    "input normalization",
    "wide and deep",
    "siamese",
)


def first(result: Any) -> Any:
    """The first tensor of what a module gives."""
    while isinstance(result, (tuple, list)):
        result = result[0]
    return result


@pytest.mark.slow
@pytest.mark.parametrize("name", MODULES)
def test_exported_modules(name: str) -> None:
    made = example(name)
    graph = fp.from_torch(made.module, *made.inputs)
    graph = attach_loss(graph, "mean", [next(iter(graph.outputs))])
    mine = as_pytorch(graph, None, fp.optim.SGD(0.1), Variant(), watched=True).phases
    module = made.module.train()
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    theirs = phases(module, tuple(made.inputs), None, lambda result, _: first(result).mean(), optimizer)
    for phase, (live, most) in zip(mine[1:], theirs[1:], strict=True):
        assert phase.live == live, phase
        assert phase.most == most or phase.name == "forward", phase  # a module's variables may live on there
