"""How many ranks train together, and what of the training state each of them holds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from foreplan.base.errors import UsageError
from foreplan.graph import Value
from foreplan.graph.shard import Sharded
from foreplan.ops.collective import Group

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
        tensor: so many neighbours take the same samples, and each computes a part of the products.
    """

    count: int = 1
    shard: str = "none"
    tensor: int = 1

    def __post_init__(self) -> None:
        """Check that groups make up all ranks.

        Raises:
            UsageError: they do not.
        """
        if self.count % self.tensor:
            fitting = [n for n in range(1, self.count + 1) if self.count % n == 0]
            raise UsageError(
                f"tensor={self.tensor} does not divide ranks={self.count}: take one of {', '.join(map(str, fitting))}, "
                "or other ranks"
            )

    def with_other_samples(self, weight: Value) -> Group:
        """The ranks whose gradients of a weight are summed: of one that is cut, those that have the same part of it. Of
        another, all: those that take the same samples have summands of its gradient.
        """
        if isinstance(weight.init, Sharded):
            return Group(self.count // self.tensor, self.tensor)
        return Group(self.count)

    @staticmethod
    def bucket(weights: Iterable[Value]) -> int:
        """Gradients of so many bytes, or more, are exchanged together, of these weights."""
        return min(MOST, max(LEAST, sum(weight.type.nbytes for weight in weights) // SHARE))


ALONE = Ranks()
