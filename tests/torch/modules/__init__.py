"""Small PyTorch modules as users write them: name → a function that makes the module and its example inputs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from tests.torch.modules import attention, cnn, dense, images, parameters, recommenders, recurrent, signals, tokens

Made = tuple[nn.Module, tuple[torch.Tensor, ...]]
GROUPS: dict[str, dict[str, Callable[[], Made]]] = {
    "dense": dense.MODULES,
    "parameters": parameters.MODULES,
    "convolutions": cnn.MODULES,
    "images": images.MODULES,
    "attention": attention.MODULES,
    "tokens": tokens.MODULES,
    "recurrent": recurrent.MODULES,
    "signals": signals.MODULES,
    "recommenders": recommenders.MODULES,
}
MODULES = {name: make for group in GROUPS.values() for name, make in group.items()}
