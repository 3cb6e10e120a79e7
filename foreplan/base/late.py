"""What a part calls that stands above it."""

from __future__ import annotations

import importlib
from typing import Any


def late(place: str) -> Any:
    """A function of a part that the one that asks does without, found when it is called.

    It serves methods for people alone, such as `Compiled.explain`, and what few steps need, such as other ranks. The
    types of what it takes and gives are declared below both. tests/test_structure.py holds every place.

    Args:
        place: `module:function`.
    """
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)
