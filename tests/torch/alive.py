"""The judge: bytes of PyTorch's storages that are alive, step by step, as ops make and drop them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class Alive(TorchDispatchMode):
    """Counts the bytes of the storages that ops have made, or were given, for as long as these are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.seen = weakref.WeakSet[torch.UntypedStorage]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_iter((args, kwargs, result)):
            if isinstance(value, torch.Tensor):
                self.count(value)
        return result

    def count(self, tensor: torch.Tensor) -> None:
        """Of a tensor whose storage may have been counted already."""
        storage = tensor.untyped_storage()
        if storage not in self.seen:
            self.seen.add(storage)
            self.change(storage.nbytes())
            weakref.finalize(storage, self.change, -storage.nbytes())

    def change(self, nbytes: int) -> None:
        """More bytes, or fewer."""
        self.now += nbytes
        self.most = max(self.most, self.now)

    def mark(self) -> tuple[int, int]:
        """Bytes that are alive, and the most of them since the last call."""
        most, self.most = self.most, self.now
        return self.now, most


def phases(
    module: torch.nn.Module,
    inputs: tuple[torch.Tensor, ...],
    target: torch.Tensor | None,
    loss_of: Callable[[Any, Any], torch.Tensor],
    optimizer: torch.optim.Optimizer | None,
    *,
    to_none: bool = True,
    steps: int = 3,
) -> list[tuple[int, int]]:
    """After the inputs, the model, and of each step after forward, backward and update: alive, and most before.

    Args:
        loss_of: from the module's output and the target to the loss.
    """
    alive = Alive()
    for tensor in (*inputs, *(() if target is None else (target,))):
        alive.count(tensor)
    found = [alive.mark()]
    for tensor in (*module.parameters(), *module.buffers()):
        alive.count(tensor)
    found.append(alive.mark())
    for kept in () if optimizer is None else optimizer.state.values():  # what the optimizer makes at once
        for tensor in filter(torch.is_tensor, kept.values()):
            alive.count(tensor)
    with alive:
        for _ in range(steps):
            if optimizer is not None:
                optimizer.zero_grad(set_to_none=to_none)
                alive.mark()
            loss = loss_of(module(*inputs), target)
            found.append(alive.mark())
            loss.backward()
            found.append(alive.mark())
            if optimizer is not None:
                optimizer.step()
                found.append(alive.mark())
            del loss
    return found


def most_within(record: Any, name: str) -> int:
    """The most bytes that the allocator had given at once, more than when it began to be recorded, from where a region
    of that name begins.
    """
    now = most = 0
    for event in sorted(record.profiler.kineto_results.events(), key=lambda each: each.start_ns()):
        if event.name() == name:
            most = now
        elif event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most
