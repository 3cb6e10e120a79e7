"""Losses, each as the one op that PyTorch has for it."""

from __future__ import annotations

from foreplan.eager.autograd import Backward, Grads, Needs, Saved, Tape
from foreplan.eager.rules.elementwise import operands, sub, unary
from foreplan.eager.rules.layers import softmax
from foreplan.eager.rules.shape import reduce
from foreplan.eager.storage import Tensor


def nll(tape: Tape, x: Tensor, target: Tensor) -> Tensor:
    """`F.nll_loss`: logarithms of probabilities, target and the sum of weights are saved."""
    (x,) = operands(tape, "loss", x)
    result = tape.new((), x.dtype, "loss")
    total = tape.new((), x.dtype, "total weight")
    tape.record((x,), (result,), _loss_backward, (x, target, total))
    return result


def cross_entropy(tape: Tape, logits: Tensor, target: Tensor) -> Tensor:
    """`F.cross_entropy`: a log_softmax, and `nll_loss` of it."""
    (logits,) = operands(tape, "cross_entropy", logits)
    return nll(tape, softmax(tape, logits, "log_softmax", typed=True), target)


def item_losses(tape: Tape, logits: Tensor, target: Tensor) -> Tensor:
    """`F.cross_entropy(..., reduction="none")`: a number for each item."""
    (logits,) = operands(tape, "cross_entropy", logits)
    scores = softmax(tape, logits, "log_softmax", typed=True)
    (scores,) = operands(tape, "loss", scores)
    result = tape.new(target.shape, scores.dtype, "losses")
    total = tape.new((), scores.dtype, "total weight")
    tape.record((scores,), (result,), _loss_backward, (scores, target, total))
    return result


def mse(tape: Tape, x: Tensor, target: Tensor) -> Tensor:
    """`F.mse_loss`, and others that are one op: both operands are saved."""
    return _of_both(tape, x, target, _loss_backward)


def _of_both(tape: Tape, x: Tensor, target: Tensor, backward: Backward) -> Tensor:
    x, target = operands(tape, "loss", x, target)
    result = tape.new((), x.dtype, "loss")
    tape.record((x,), (result,), backward, (x, target))
    return result


def _loss_backward(tape: Tape, saved: Saved, needs: Needs, grads: Grads) -> Grads:
    x = saved[0]
    assert x is not None
    return (tape.new(x.shape, x.dtype, "gradient of the loss"),)


def binary_cross_entropy(tape: Tape, x: Tensor, target: Tensor) -> Tensor:
    """`F.binary_cross_entropy_with_logits`: both operands are saved."""
    return _of_both(tape, x, target, _binary_backward)


def _binary_backward(tape: Tape, saved: Saved, needs: Needs, grads: Grads) -> Grads:
    """(sigmoid(x) - target) * grad / n."""
    x = saved[0]
    assert x is not None
    sigmoid = tape.like(x, "sigmoid")
    held = tape.like(x, "backward of the loss")
    del sigmoid
    result = tape.like(x, "gradient of the loss")
    del held
    return (result,)


def mean_absolute(tape: Tape, x: Tensor, target: Tensor) -> Tensor:
    """`F.l1_loss`: |x - target| and its mean are ops of their own."""
    x, target = operands(tape, "loss", x, target)
    size = unary(tape, "abs", sub(tape, x, target))
    return reduce(tape, "mean", size, range(x.rank), False)
