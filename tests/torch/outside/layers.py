"""The layers of `torch.nn` with options and inputs of PyTorch's own tests of them (`module_db`), some of each drawn."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.testing._internal.common_modules import module_db
from torch.utils import _pytree as pytree

from tests.torch.outside.written.network import Made

SAMPLES = 6  # of a layer


class Behind(nn.Module):
    """A layer behind a trained factor, so that a gradient goes through it and something is trained."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.factor = layer, nn.Parameter(torch.tensor(0.9))

    def forward(self, first: Any, *args: Any, **kwargs: Any) -> Any:
        """What the layer gives."""
        scaled = pytree.tree_map_only(torch.Tensor, lambda x: x * self.factor if x.is_floating_point() else x, first)
        return self.layer(scaled, *args, **kwargs)


def from_layers() -> Iterator[tuple[str, Callable[[], Made]]]:
    """Each layer, by the number of its sample."""

    def make(info: Any, at: int) -> Made:
        sample = samples(info)[at]
        given, options = sample.forward_input, sample.constructor_input
        args, kwargs = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, (given.args, given.kwargs))
        return Behind(info.module_cls(*options.args, **options.kwargs)), tuple(args), dict(kwargs)

    def samples(info: Any) -> list[Any]:
        torch.manual_seed(0)
        found = info.module_inputs_func(info, device="cpu", dtype=torch.float32, requires_grad=False, training=True)
        return [sample for sample in found if sample.forward_input is not None]

    for info in module_db:
        count = len(samples(info))
        for at in sorted(random.Random(0).sample(range(count), min(count, SAMPLES))):
            yield f"torch.nn/{info.name.removeprefix('nn.')}.{at}", lambda info=info, at=at: make(info, at)
