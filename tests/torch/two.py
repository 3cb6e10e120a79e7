"""Small modules that do one thing between two layers: what trains as in PyTorch, and what is refused, and why."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

import foreplan as fp
from foreplan.base.errors import ForeplanError, UnsupportedError
from tests.torch.beside import Squares

X = torch.linspace(-1, 1, 12).reshape(4, 3)


class Two(nn.Module):
    """Two layers. Cases change what is between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 2)
        self.begin()

    def begin(self) -> None:
        """What the case has beside the layers."""

    def between(self, y: Any) -> Any:
        """What it does with the first one's result."""
        return y

    def forward(self, x: Any) -> Any:
        """Two numbers a row."""
        return self.second(self.between(self.first(x)))


Case = type[Two]


@dataclass
class Cases:
    """Modules by name.

    Attributes:
        right: they train as in PyTorch.
        refused: with what the error says.
    """

    right: dict[str, Case] = field(default_factory=dict)
    refused: dict[str, tuple[Case, str]] = field(default_factory=dict)

    def case(self, kind: Case) -> Case:
        """Add one that is right."""
        self.right[kind.__name__] = kind
        return kind

    def wrong(self, why: str) -> Callable[[Case], Case]:
        """Add one that is refused."""

        def add(kind: Case) -> Case:
            self.refused[kind.__name__] = kind, why
            return kind

        return add

    @property
    def every(self) -> dict[str, Case]:
        """Both."""
        return {**self.right, **{name: kind for name, (kind, _) in self.refused.items()}}


def assert_is_refused(kind: Case, why: str) -> None:
    with pytest.raises(UnsupportedError, match=why):
        fp.from_torch(Squares(kind()), X, check=False)


def assert_stays_as_it_is(module: Any) -> None:
    """Whether from_torch takes it or not."""
    attributes = {key: x for key, x in vars(module).items() if not key.startswith("_")}
    shown = repr(attributes)
    before = {key: x.clone() for key, x in module.state_dict().items()}
    with contextlib.suppress(ForeplanError):
        fp.from_torch(module, X)
    now = {key: x for key, x in vars(module).items() if not key.startswith("_")}
    assert repr(now) == shown and all(now[key] is x for key, x in attributes.items())
    assert all(torch.equal(module.state_dict()[key], x) and x.equal(before[key]) for key, x in before.items())
    assert all(p.requires_grad and type(p) is nn.Parameter for p in module.parameters())
    handles = (module._forward_hooks, module._forward_pre_hooks)
    assert not any(handles) and "register_hook" in vars(torch.Tensor) and "data" not in vars(torch.Tensor)
