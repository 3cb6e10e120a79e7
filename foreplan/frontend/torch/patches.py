"""What of PyTorch is another thing for a while, or is done beside it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@contextlib.contextmanager
def patched(owner: Any, name: str, new: Any) -> Iterator[None]:
    """While the body runs, an attribute of a class or module is another one; if this PyTorch has it."""
    if not hasattr(owner, name):
        yield
        return
    is_own, before = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, new)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, before)
        else:  # a base class has it
            delattr(owner, name)


@contextlib.contextmanager
def around_forward(
    module: torch.nn.Module, begin: Callable[..., None], end: Callable[..., Any] | None = None
) -> Iterator[None]:
    """While the body runs, calls of a module begin with one hook, before others, and end with another one."""
    handles = [module.register_forward_pre_hook(begin, prepend=True)]
    if end is not None:
        handles.append(module.register_forward_hook(end))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
