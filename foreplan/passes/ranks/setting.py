"""How many ranks train together, and what of the training state each of them holds."""

from __future__ import annotations

from dataclasses import dataclass

BUCKET = 25 << 20  # bytes of gradients that are exchanged together, as PyTorch's DistributedDataParallel has it


@dataclass(frozen=True)
class Ranks:
    """The ranks of a job.

    Attributes:
        count: how many.
        shard: what is spread over ranks, each holding one part of it (Rajbhandari et al., "ZeRO: Memory Optimizations
            Toward Training Trillion Parameter Models", SC 2020): none; the optimizer's state; gradients, too; and
            parameters, too.
        bucket: gradients of so many bytes, or more, are exchanged together.
    """

    count: int = 1
    shard: str = "none"
    bucket: int = BUCKET


ALONE = Ranks()
