"""What reading a file that nobody trusts may take: one rule for each format, as a function of the file's size.

Readers take time that grows with the file. Where a few bytes can stand for many, such as compressed or computed
tensors, they ask an `Allowance` before they allocate. The table in docs/trust.md states these figures.
"""

from __future__ import annotations

from dataclasses import dataclass

from foreplan.base.errors import UsageError
from foreplan.base.units import format_bytes

LEAST_BYTES = 256 << 20  # of memory, for a file of any size
LEAST_SECONDS = 5.0  # of processor time, for a file of any size
_WORK = 1 << 29  # bytes or operations in a second, at least


@dataclass(frozen=True)
class Rule:
    """What reading a file of one format may take.

    Attributes:
        largest: bytes; a larger file is refused unread.
        times: bytes of memory for each byte of the file, beside `LEAST_BYTES`.
        seconds: processor time for each MiB of the file, beside `LEAST_SECONDS`.
    """

    largest: int
    times: int
    seconds: float

    def nbytes(self, size: int) -> int:
        """The most memory that a file of some size takes."""
        return LEAST_BYTES + self.times * size

    def processor_seconds(self, size: int) -> float:
        """The most processor time that a file of some size takes."""
        return LEAST_SECONDS + self.seconds * size / (1 << 20)


ANY = 1 << 62  # no limit to the size
RULES = {
    "ONNX": Rule(ANY, 256, 30.0),  # of its bytes without the weights, which stay in the file
    "plan": Rule(1 << 30, 128, 30.0),
    "shared plan": Rule(1 << 24, 128, 30.0),
    "checkpoint": Rule(ANY, 128, 10.0),  # of its header; values are read where they go
    "adapters": Rule(1 << 24, 128, 10.0),  # adapter_config.json; the tensors are a checkpoint's
    "snapshot": Rule(ANY, 96, 2.0),
    "data": Rule(ANY, 1032, 10.0),  # the most that deflate, with which NumPy compresses, makes of a byte
    "CSV": Rule(1 << 30, 128, 10.0),
    "TOML": Rule(1 << 14, 128, 30.0),  # its reader takes the square of the parts of a key
}


class Allowance:
    """What is left of the memory and of the work that a file of some size may take, for what stands for more than its
    own bytes; the rest of the reader has half of `LEAST_BYTES`.
    """

    def __init__(self, format: str, size: int) -> None:
        rule = RULES[format]
        self._left, self._work = rule.nbytes(size) - LEAST_BYTES // 2, int(rule.processor_seconds(size) * _WORK)

    def has(self, nbytes: int) -> bool:
        """Take bytes of memory if there are that many."""
        if nbytes > self._left:
            return False
        self._left -= nbytes
        return True

    def has_work(self, amount: int) -> bool:
        """Take bytes that are read and written, or operations, if there are that many."""
        if amount > self._work:
            return False
        self._work -= amount
        return True


def contents(path: str, format: str) -> bytes:
    """All bytes of a file, or of a pipe.

    Raises:
        OSError: it cannot be read.
        UsageError: it is larger than such a file may be.
    """
    largest = RULES[format].largest
    with open(path, "rb") as file:
        data = file.read(largest + 1 if largest < ANY else -1)
    if len(data) > largest:
        raise UsageError(f"{path!r} has more than {format_bytes(largest)}, the most that such a file may have")
    return data
