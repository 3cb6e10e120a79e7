"""Which buckets stay from one phase of a step to the next, where others are dropped and gathered again."""

from __future__ import annotations

from collections.abc import Sequence

from foreplan.passes.ranks.inference import FAR
from foreplan.passes.ranks.layout import Bucket


class KeptBuckets:
    """Buckets that stay.

    The last one that a phase reads stays. So does one that lives long in any case, and is dropped for next to nothing:
    such as one of all biases and norms, which a whole forward pass reads, and then the whole backward pass.
    """

    def __init__(self, reads: Sequence[tuple[int, Bucket]]) -> None:
        """
        Args:
            reads: the numbers of phases and the buckets that nodes read, in order. Phases do not overlap.
        """
        self.buckets = [bucket for _, bucket in reads]
        self.places: dict[tuple[int, Bucket], tuple[int, int]] = {}  # the first read in a phase, and the last one
        self.last: dict[int, Bucket] = {}  # that a phase reads
        for at, (phase, bucket) in enumerate(reads):
            first, _ = self.places.get((phase, bucket), (at, at))
            self.places[phase, bucket] = first, at
            self.last[phase] = bucket
        self.found: dict[tuple[int, Bucket], int] = {}

    def since(self, phase: int, bucket: Bucket) -> int:
        """The phase in which a bucket was gathered that a phase reads. Ask for phases in their order."""
        if (phase, bucket) not in self.found:
            stayed = self._has_stayed(phase, bucket)
            self.found[phase, bucket] = self.since(phase - 1, bucket) if stayed else phase
        return self.found[phase, bucket]

    def _has_stayed(self, phase: int, bucket: Bucket) -> bool:
        """Whether it has, since the phase before."""
        if self.last.get(phase - 1) is bucket:
            return True
        before, now = self.places.get((phase - 1, bucket)), self.places.get((phase, bucket))
        if before is None or now is None:
            return False
        return self._between(*before) >= FAR > self._between(before[1], now[0])

    def _between(self, one: int, other: int) -> int:
        """How many buckets are read between two reads of one."""
        return len({*self.buckets[one:other]} - {self.buckets[one]})
