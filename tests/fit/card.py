"""A card that no machine has: a T4 with little memory, so that small models do not fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from foreplan.runtime.cuda.device import device_named

MIB = 1 << 20
# Of a T4 outside the arena: 2 KiB for each of 40 x 1,024 threads, code, cuBLASLt; and the graph, in pages of 2 MiB.
FIXED = (80 + 2 + 32) * MIB


def small_card(folder: Path, memory: int, name: str = "small") -> str:
    """The target of a T4 with a memory of its own, in bytes."""
    path = folder / f"{name}.toml"
    path.write_text(replace(device_named("t4"), memory_bytes=memory).as_toml())
    return f"cuda:{path}"
