"""What `DistributedDataParallel` keeps beside a step: all gradients once more, in buckets that are exchanged whole.

Reference: `torch/nn/parallel/distributed.py`, `torch/csrc/distributed/c10d/reducer.cpp` of PyTorch 2.13, with its
defaults: `gradient_as_bucket_view=False`, so that `.grad` has bytes of its own.
"""

from __future__ import annotations

from collections.abc import Iterable

FIRST, FURTHER = 1 << 20, 25 << 20  # bytes: a bucket is closed when it has as many


def buckets(gradients: Iterable[tuple[int, str]]) -> list[int]:
    """Bytes of each bucket.

    Args:
        gradients: bytes and element type of each, in the order of the parameters. Buckets are filled from the last on,
            those of each type apart.
    """
    closed: list[int] = []
    open_ones: dict[str, int] = {}
    limits: dict[str, int] = {}
    for nbytes, dtype in reversed(list(gradients)):
        open_ones[dtype] = open_ones.get(dtype, 0) + nbytes
        if open_ones[dtype] >= limits.get(dtype, FIRST):
            closed.append(open_ones.pop(dtype))
            limits[dtype] = FURTHER
    return closed + list(open_ones.values())
