"""What the system says of this machine's processor."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

_MAKERS = {"AuthenticAMD": "AMD", "GenuineIntel": "Intel"}


def model() -> str:
    """Its own name."""
    return _said().get("model name", "unknown")


def cores() -> int:
    """How many of its cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def family() -> str:
    """Its maker and family, such as "AMD family 25", whose members are about equally fast; empty: not known."""
    maker = _MAKERS.get(_said().get("vendor_id", ""))
    return f"{maker} family {_said().get('cpu family', '')}" if maker else ""


def instructions() -> tuple[str, ...]:
    """All that decides which instructions it has, as the system tells; empty: the system does not tell."""
    return tuple(filter(None, map(_said().get, ("vendor_id", "cpu family", "model", "stepping", "flags"))))


def has(*flags: str) -> bool:
    """Whether it has features, by Linux's names."""
    return set(flags) <= set(_said().get("flags", "").split())


def text_of(path: str | Path) -> str:
    """What a file of the system says; empty if there is none."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""


@lru_cache(maxsize=1)
def _said() -> Mapping[str, str]:
    """Of the first core, by name."""
    found: dict[str, str] = {}
    for line in text_of("/proc/cpuinfo").splitlines():
        name, _, text = line.partition(":")
        found.setdefault(name.strip(), text.strip())
    return found
