"""Modules that PyTorch's exporter wrote as ONNX, counted as PyTorch runs them: to the byte, once more."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make setup-torch")

from torch import nn  # noqa: E402

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


def block() -> nn.Module:
    """What differs by mode, and a norm that counts its batches."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Dropout(0.1), nn.Linear(288, 5)
    )


@pytest.mark.parametrize("how", ["float32", "bf16", "all bf16"])
@pytest.mark.parametrize("target", ["cpu", "cuda:a100"])
def test_a_graph_takes_what_its_module_takes(how: str, target: str) -> None:
    """Within autocast; and with all of the module in bf16."""
    module, x = block(), torch.zeros(4, 3, 8, 8)
    if how == "all bf16":
        module, x = module.bfloat16(), x.bfloat16()
    precision = "bf16" if how == "bf16" else "float32"
    step = fp.compile(
        fp.from_torch(module, x), "cross_entropy", fp.optim.Momentum(0.1), target="numpy", precision=precision,
        narrow_weights=how == "all bf16",
    )  # fmt: skip
    mine = step.as_pytorch(workspace=0, device="cpu" if target == "cpu" else "cuda").eager
    theirs = fp.eager_memory(
        module, x, loss="cross_entropy", optimizer=lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        precision=precision, target=target, variant={"workspace": 0},
    )  # fmt: skip
    assert [phase.live for phase in mine.phases] == [phase.live for phase in theirs.phases]
    assert mine.peak == theirs.peak
