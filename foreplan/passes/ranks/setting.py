"""How many ranks train together, and what of the training state each of them holds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from foreplan.graph import Value

# Bytes of gradients that are exchanged together: at most as PyTorch's DistributedDataParallel has it. Two buckets are
# under way at a time, and what arrives of them, so that of a small model a bucket is an eighth.
MOST, LEAST, SHARE = 25 << 20, 1 << 20, 8


@dataclass(frozen=True)
class Ranks:
    """The ranks of a job.

    Attributes:
        count: how many.
        shard: what is spread over ranks, each holding one part of it (Rajbhandari et al., "ZeRO: Memory Optimizations
            Toward Training Trillion Parameter Models", SC 2020): none; the optimizer's state; gradients, too; and
            parameters, too.
    """

    count: int = 1
    shard: str = "none"

    @staticmethod
    def bucket(weights: Iterable[Value]) -> int:
        """Gradients of so many bytes, or more, are exchanged together, of these weights."""
        return min(MOST, max(LEAST, sum(weight.type.nbytes for weight in weights) // SHARE))


ALONE = Ranks()
