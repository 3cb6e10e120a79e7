"""How a network is written down: a function, and the parts that it computes with."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import nn

Made = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
Forward = Callable[..., Any]
NETWORKS: dict[str, Callable[[], Made]] = {}


class Network(nn.Module):
    """Modules, parameters and buffers by name, and what is computed with them."""

    def __init__(self, forward: Forward, **parts: Any) -> None:
        super().__init__()
        self._forward = forward
        for name, part in parts.items():
            if isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *args: Any) -> Any:
        """What the function gives."""
        return self._forward(self, *args)


def network(*args: Callable[[], Any], **parts: Callable[[], Any]) -> Callable[[Forward], Forward]:
    """Make a function the forward pass of a network, of parts that are made anew, called with such arguments."""

    def add(forward: Forward) -> Forward:
        def make() -> Made:
            made = {name: part() for name, part in parts.items()}
            return Network(forward, **made), tuple(arg() for arg in args), {}

        NETWORKS[forward.__name__.strip("_")] = make
        return forward

    return add


def drawn(*shape: int) -> Callable[[], torch.Tensor]:
    """Normal numbers."""
    return lambda: torch.randn(*shape)


def trained(*shape: int) -> Callable[[], nn.Parameter]:
    """A parameter of small normal numbers."""
    return lambda: nn.Parameter(torch.randn(*shape) / 2)


def integers(high: int, *shape: int) -> Callable[[], torch.Tensor]:
    """From 0 to below `high`."""
    return lambda: torch.randint(high, shape)


def linear(*widths: int) -> Callable[[], nn.Module]:
    """Linear layers with tanh between them."""

    def make() -> nn.Module:
        layers = [part for pair in pairwise(widths) for part in (nn.Linear(*pair), nn.Tanh())]
        return nn.Sequential(*layers[:-1])

    return make


ROWS, IMAGES, WORDS = drawn(4, 6), drawn(2, 4, 8, 8), drawn(2, 5, 8)
