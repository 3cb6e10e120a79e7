"""Measured memory of cards outside the arena, and the table of calibrations that comes with foreplan."""

from __future__ import annotations

from collections.abc import Iterable

from foreplan.base.calibration import Kind, Table, known

LIBRARIES = ("cudnn", "cublaslt")
_ALWAYS = ("context_bytes", "code_bytes", "graph_bytes_per_launch")
_OF_LIBRARIES = tuple(f"{name}_bytes" for name in LIBRARIES)  # of those with which it was made
_OF_RANKS = ("nccl_bytes", "nccl_bytes_per_peer")  # which takes several cards to measure
CARDS = Kind(
    file="calibration.toml",
    package="foreplan.runtime.cuda",
    key="card",
    always=_ALWAYS,
    perhaps=(*_OF_LIBRARIES, *_OF_RANKS),
    assumed=("context_bytes_per_thread", *_ALWAYS[1:], *_OF_LIBRARIES, *_OF_RANKS),
    what="What processes hold on cards besides their arenas",
    page="docs/cuda.md",
)


def is_of(kernel: str, library: str) -> bool:
    """Whether a kernel, by its name in plans, is one of a library's."""
    return kernel == library or kernel.startswith(f"{library} ")


def libraries_of(kernels: Iterable[str]) -> list[str]:
    """The libraries that kernels are of, by name."""
    named = set(kernels)
    return sorted(library for library in LIBRARIES if any(is_of(kernel, library) for kernel in named))


def calibrations() -> Table:
    """The calibrations of cards that come with foreplan, and the user's.

    Raises:
        TargetError: the user's file cannot be read or is broken.
    """
    return known(CARDS)
