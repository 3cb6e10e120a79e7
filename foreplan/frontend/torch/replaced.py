"""What of PyTorch is another thing for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def replaced(owner: Any, name: str, new: Any) -> Iterator[None]:
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
