"""Steps of training of one module in PyTorch and in foreplan, side by side."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import foreplan as fp
from foreplan.graph import Graph

RATE = 0.05


class Squares(nn.Module):
    """The mean squares of all outputs of a module, added up: a loss of any module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """One number."""
        outputs = pytree.tree_leaves(self.inner(*args, **kwargs))
        return sum(y.square().mean() for y in outputs if isinstance(y, torch.Tensor) and y.dtype.is_floating_point)


def feeds(graph: Graph, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, np.ndarray]:
    tensors = [x for x in pytree.tree_leaves((args, dict(kwargs))) if isinstance(x, torch.Tensor)]
    return {value.name: x.detach().numpy() for value, x in zip(graph.inputs, tensors, strict=True)}


def assert_trains_as_pytorch(
    module: Any, theirs: Any, args: tuple[Any, ...], *, steps: int = 3, kwargs: Mapping[str, Any] | None = None
) -> Any:
    """Losses agree to 1e-5, and what a step changes to a hundredth of the largest change; a session of the weights."""
    ours, theirs, named = Squares(module), Squares(theirs), dict(kwargs or {})
    before = {name: tensor.clone() for name, tensor in theirs.state_dict().items()}
    graph = fp.from_torch(ours, *args, kwargs=named)
    session = fp.compile(graph, lambda output: output, fp.optim.SGD(RATE), target="numpy").bind()
    optimizer = torch.optim.SGD([p for p in theirs.parameters() if p.requires_grad], RATE)
    for _ in range(steps):
        loss = theirs(*copy.deepcopy(args), **named)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert session.step(feeds(graph, args, named)).loss == pytest.approx(loss.item(), rel=1e-5, abs=1e-6)
    found, after = session.state_dict(), theirs.state_dict()
    floats = [name for name, tensor in after.items() if tensor.is_floating_point()]
    moved = max(((after[name] - before[name]).abs().max().item() for name in floats if after[name].numel()), default=0)
    for name in found:
        off = np.abs(np.asarray(found[name], np.float64) - after[name].double().numpy())
        assert off.size == 0 or off.max() <= 0.01 * moved + 1e-6, name
    return session
