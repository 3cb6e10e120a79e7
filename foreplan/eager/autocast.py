"""`torch.autocast`: the types that ops take their operands in.

Some ops take narrow operands, some float32 ones, and the others what they are given; on a card more are float32 than on
a processor. Reference: `aten/src/ATen/autocast_mode.h` of PyTorch 2.13.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from foreplan.eager.storage import Tensor
from foreplan.graph.types import FLOAT32, DType

_NARROW = frozenset({"linear", "matmul", "convolution", "attention"})
_WIDE = frozenset({"loss"})
_WIDE_ON_CARD = frozenset(
    {"layer_norm", "group_norm", "rms_norm", "softmax", "log_softmax", "interpolate", "pow", "square", "exp", "expm1"}
    | {"log", "log1p", "rsqrt", "reciprocal", "softplus", "sinh", "cosh", "tan", "acos", "asin"}
)
_WIDE_RESULTS_ON_CARD = frozenset({"sum", "cumsum"})
_WIDE_ON_PROCESSOR = frozenset({"cross_entropy"})


@dataclass(eq=False)
class Autocast:
    """A region of autocast, while it runs.

    Attributes:
        dtype: of narrow operands.
        cuda: whether this is a card.
        weights: narrow copies of trained float32 weights, which are kept until the region ends.
    """

    dtype: DType
    cuda: bool
    weights: dict[Tensor, Tensor] = field(default_factory=dict)
    runs: bool = False

    @contextmanager
    def region(self, runs: bool = True) -> Iterator[None]:
        """While it runs, or is turned off within; the outermost region ends with its copies of weights."""
        before, self.runs = self.runs, runs
        try:
            yield
        finally:
            self.runs = before
            if not before:
                self.weights.clear()

    def operand_type(self, op: str) -> DType | None:
        """The type of an op's operands; None: as they are."""
        if not self.runs:
            return None
        if op in _NARROW:
            return self.dtype
        return FLOAT32 if op in _WIDE or op in (_WIDE_ON_CARD if self.cuda else _WIDE_ON_PROCESSOR) else None

    def result_type(self, op: str) -> DType | None:
        """The type of an op's result where it is not that of its operands; None: it is."""
        return FLOAT32 if self.runs and self.cuda and op in _WIDE_RESULTS_ON_CARD else None
