"""Connectionist temporal classification: the likelihood of labels, whatever places they have in time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from foreplan.base.arguments import flag, whole
from foreplan.base.errors import ShapeError, UsageError
from foreplan.frontend.losses.loss import Loss
from foreplan.frontend.tracing.elementwise import apply, convert, select
from foreplan.frontend.tracing.tensor import Tensor, as_tensor
from foreplan.graph import TensorType
from foreplan.graph.types import INT64
from foreplan.ops import expr as ex
from foreplan.ops.expr import call

_NEVER = -1e30  # the logarithm of the probability of what cannot be: -inf would give NaN in differences
_numpy: Any = np  # on tensors, which its type stubs do not know


@dataclass(frozen=True)
class CTC(Loss):
    """Mean of −log p(labels) / length of the labels (Graves et al. 2006, section 4.1). As PyTorch's CTCLoss.

    The output is [time, batch, classes], logarithms of probabilities, such as a log-softmax gives. Its further inputs
    are all int64: `target` [batch, labels], `input_lengths` [batch], the number of times that count, and
    `target_lengths` [batch], the number of labels that count. The graph has a few nodes for each time: it suits some
    hundreds of them.

    Attributes:
        labels: extent of the axis of labels; None where the loss is called with tensors.
        blank: the class that stands for no label.
        zero_infinity: labels that do not fit into the time have the loss 0 instead of infinity. Their gradient is 0 in
            either case.
    """

    name: ClassVar[str] = "ctc"
    further: ClassVar[tuple[str, ...]] = ("target", "input_lengths", "target_lengths")
    labels: int | None = None
    blank: int = 0
    zero_infinity: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "labels", None if self.labels is None else whole("labels", self.labels, 0))
        object.__setattr__(self, "blank", whole("blank", self.blank, 0))
        object.__setattr__(self, "zero_infinity", flag("zero_infinity", self.zero_infinity))

    def inputs(self, *outputs: TensorType) -> dict[str, TensorType]:
        """`target`, `input_lengths` and `target_lengths`."""
        (x,) = outputs
        self._check(x.shape)
        if self.labels is None:
            raise UsageError("ctc needs the most labels that a sample has: losses.CTC(labels=20)")
        lengths = TensorType(INT64, (x.shape[1],))
        target = TensorType(INT64, (x.shape[1], self.labels))
        return {"target": target, "input_lengths": lengths, "target_lengths": lengths}

    def _check(self, shape: tuple[int, ...]) -> None:
        if len(shape) != 3 or not shape[2] > self.blank:
            wanted = f"[time, batch, classes] with more than {self.blank} classes"
            raise ShapeError(f"ctc needs an output {wanted}, and it is {list(shape)}")

    def __call__(self, *tensors: Tensor, **inputs: Tensor) -> Tensor:
        """Args: logarithms of probabilities, target and both lengths. Returns: a scalar."""
        x, target, times, lengths = self.arguments(tensors, inputs)
        losses = self.of_samples(x, target, times, lengths)
        return (losses / _numpy.maximum(convert(lengths, losses.dtype), 1.0)).mean()

    def of_samples(self, x: Tensor, target: Tensor, times: Tensor, lengths: Tensor) -> Tensor:
        """−log p(labels) of each sample, [batch]; the arguments are those of a call.

        Raises:
            ShapeError: they do not fit together.
        """
        self._check(x.shape)
        x = convert(x, x.value.dtype.wide)
        batch = x.shape[1]
        if target.ndim != 2 or (target.shape[0], *times.shape, *lengths.shape) != (batch,) * 3:
            raise ShapeError(f"ctc: {target!r}, {times!r} and {lengths!r} do not fit {x!r}")
        last = self._last(x, self._with_blanks(target, lengths), times)
        return self._of_labels(last, lengths)

    def _with_blanks(self, target: Tensor, lengths: Tensor) -> Tensor:
        """[batch, 2·labels + 1]: a blank before each label and behind the last; labels that do not count are blanks."""
        batch, labels = target.shape
        here = apply("counted", lambda i, n: i < n, np.arange(labels)[None, :], lengths.reshape(batch, 1))
        blanks = select(here, target, self.blank) if labels else target
        pairs: Tensor = _numpy.stack([blanks * 0 + self.blank, blanks], axis=2).reshape(batch, 2 * labels)
        return _numpy.concatenate([pairs, np.full((batch, 1), self.blank)], axis=1)

    def _last(self, x: Tensor, states: Tensor, times: Tensor) -> Tensor:
        """[batch, states]: log of the probability of all ways to each state by the last time that counts."""
        (steps, batch, _), count = x.shape, states.shape[1]
        at: Tensor = _numpy.broadcast_to(states.reshape(1, batch, count), (steps, batch, count))
        seen: Tensor = _numpy.take_along_axis(x, at, axis=2)
        emitted = apply("seen", lambda x: ex.maximum(x, _NEVER), seen)
        live = apply("live", lambda t, n: t < n, np.arange(steps)[:, None, None], times.reshape(1, batch, 1))
        two_before = _numpy.pad(states[:, :-2], ((0, 0), (2, 0)), constant_values=self.blank)[:, :count]
        other = apply(
            "other", lambda s, p: call("and", call("ne", s, self.blank), call("ne", s, p)), states, two_before
        )
        ways = as_tensor(np.where(np.arange(count) == 0, 0.0, _NEVER).astype(np.float32)[None, :].repeat(batch, 0))
        ways = convert(ways, x.value.dtype)
        for t in range(steps):
            padded = _numpy.pad(ways, ((0, 0), (2, 0)), constant_values=_NEVER)
            before = (padded[:, 2:], padded[:, 1:-1], padded[:, :-2])
            ways = apply("ways", _next, *before, other, emitted[t], live[t])
        return ways

    def _of_labels(self, last: Tensor, lengths: Tensor) -> Tensor:
        """[batch]: −log of the probability to end in the last label or in the blank behind it."""
        ends = (lengths * 2).reshape(-1, 1)
        blank: Tensor = _numpy.take_along_axis(last, ends, axis=1)
        label: Tensor = _numpy.take_along_axis(last, _numpy.maximum(ends - 1, 0), axis=1)
        instead = 0.0 if self.zero_infinity else float("inf")

        def loss(blank: ex.Expr, label: ex.Expr, end: ex.Expr) -> ex.Expr:
            either = -_either(blank, ex.where(end > 0, label, _NEVER))
            return ex.where(either > -0.1 * _NEVER, instead, either)

        return apply("loss", loss, blank, label, ends).reshape(-1)


def _next(stays: ex.Expr, comes: ex.Expr, skips: ex.Expr, other: ex.Expr, emitted: ex.Expr, live: ex.Expr) -> ex.Expr:
    """One state after one more time: it was there, in the one before, or, between labels that differ, two before."""
    ways = _either(_either(stays, comes), ex.where(other, skips, _NEVER))
    return ex.where(live, ex.maximum(ways + emitted, _NEVER), stays)


def _either(a: ex.Expr, b: ex.Expr) -> ex.Expr:
    """log(eᵃ + eᵇ)."""
    return ex.maximum(a, b) + call("log1p", ex.exp(-call("abs", a - b)))
