"""Which part of a module runs: in its forward pass by the calls of modules, backward by the functions of autograd that
the forward pass of that part has made.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from foreplan.eager.storage import Memory, Use


class Paths:
    """The path of the part that runs, such as `layers.0.mlp`.

    Args:
        module: the whole of it.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.names = {each: name for name, each in module.named_modules()}
        self.running: list[str] = []
        self.makers: dict[int, str] = {}

    @contextmanager
    def noted(self) -> Iterator[None]:
        """While the module runs."""
        handles = [
            register_module_forward_pre_hook(self._begins),
            register_module_forward_hook(self._ends, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _begins(self, module: torch.nn.Module, inputs: Any) -> None:
        if (name := self.names.get(module)) is not None:
            self.running.append(name)

    def _ends(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if module in self.names:
            self.running.pop()

    def mark(self, memory: Memory) -> None:
        """Tell what an op that runs now belongs to. In the backward pass, what a checkpointed part makes again are
        activations.
        """
        node = torch._C._current_autograd_node()
        if self.running:
            memory.node = self.running[-1]
            memory.use = Use.ACTIVATION
            if torch.is_grad_enabled():
                self.makers[torch.autograd._get_sequence_nr() - 1] = memory.node
        elif node is not None:
            memory.node = self.makers.get(node._sequence_nr(), "")
            memory.use = Use.GRADIENT
        else:
            memory.node = ""
