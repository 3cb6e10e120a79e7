"""Ops that take every element: what each saves, and how many tensors its derivative needs beside the result.

References: `tools/autograd/derivatives.yaml` and `torch/csrc/autograd/FunctionsManual.cpp` of PyTorch 2.13.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from foreplan.eager.autograd import Grads, Needs, Saved, Tape, only
from foreplan.eager.storage import Tensor, strides_like
from foreplan.graph.types import BOOL, DTYPES, FLOAT32, DType, broadcast_shapes


class Keeps(Enum):
    """What a function of one tensor saves."""

    NOTHING = "nothing"
    INPUT = "its input"
    RESULT = "its result"


@dataclass(frozen=True)
class Unary:
    """A function of one tensor.

    Attributes:
        keeps: what it saves for backward.
        temporaries: tensors of its size that its derivative holds beside the result.
        masks: the same of one byte an element.
    """

    keeps: Keeps
    temporaries: int = 0
    masks: int = 0


UNARY = {
    "relu": Unary(Keeps.RESULT),
    "sigmoid": Unary(Keeps.RESULT),
    "tanh": Unary(Keeps.RESULT),
    "exp": Unary(Keeps.RESULT),
    "sqrt": Unary(Keeps.RESULT, 1),  # grad / (2 * result)
    "rsqrt": Unary(Keeps.RESULT, 2),  # -0.5 * grad * result³
    "expm1": Unary(Keeps.RESULT, 1),  # grad * (result + 1)
    "reciprocal": Unary(Keeps.RESULT, 2),  # -grad * (result * result)
    "tan": Unary(Keeps.RESULT, 2),
    "log": Unary(Keeps.INPUT),
    "log1p": Unary(Keeps.INPUT, 1),  # grad / (self + 1)
    "abs": Unary(Keeps.INPUT, 1),  # grad * sgn(self)
    "square": Unary(Keeps.INPUT, 2),  # grad * (2 * self¹)
    "pow": Unary(Keeps.INPUT, 2),
    "erf": Unary(Keeps.INPUT, 4),  # grad * (2 / √π * exp(-(self²)))
    "sin": Unary(Keeps.INPUT, 1),  # grad * cos(self)
    "cos": Unary(Keeps.INPUT, 2),  # grad * -sin(self)
    "atan": Unary(Keeps.INPUT, 2),
    "sinh": Unary(Keeps.INPUT, 1),
    "cosh": Unary(Keeps.INPUT, 1),
    "gelu": Unary(Keeps.INPUT),
    "silu": Unary(Keeps.INPUT),
    "softplus": Unary(Keeps.INPUT),
    "mish": Unary(Keeps.INPUT),
    "elu": Unary(Keeps.INPUT),
    "leaky_relu": Unary(Keeps.INPUT),
    "hardswish": Unary(Keeps.INPUT),
    "hardsigmoid": Unary(Keeps.INPUT),
    "hardtanh": Unary(Keeps.INPUT),
    "clamp": Unary(Keeps.INPUT, 0, 2),  # where(self >= low && self <= high, grad, 0)
    "clamp_min": Unary(Keeps.INPUT, 0, 1),
    "clamp_max": Unary(Keeps.INPUT, 0, 1),
    "neg": Unary(Keeps.NOTHING),
    "mul_scalar": Unary(Keeps.NOTHING),
    "div_scalar": Unary(Keeps.NOTHING),
    "rsub": Unary(Keeps.NOTHING),
    "sign": Unary(Keeps.NOTHING),
    "floor": Unary(Keeps.NOTHING),
    "ceil": Unary(Keeps.NOTHING),
    "trunc": Unary(Keeps.NOTHING),
    "round": Unary(Keeps.NOTHING),
}


def unary(tape: Tape, name: str, x: Tensor, in_place: bool = False) -> Tensor:
    """A function of one tensor, of the table.

    Args:
        in_place: it writes over its input; only for what saves its result.
    """
    rule = UNARY[name]
    (x,) = operands(tape, name, x)
    result = x.detached() if in_place else tape.like(x, name)
    saved = {Keeps.NOTHING: (), Keeps.INPUT: (x,), Keeps.RESULT: (result,)}[rule.keeps]

    def backward(tape: Tape, saved: Saved, needs: Needs, grads: Grads) -> Grads:
        grad = only(grads)
        zero = tape.new((), grad.dtype, "0") if rule.masks else None
        masks = [tape.new(grad.shape, BOOL, f"mask of {name}") for _ in range(rule.masks)]
        held = [tape.like(grad, f"backward of {name}") for _ in range(rule.temporaries)]
        result = tape.like(grad, f"backward of {name}")
        del zero, masks, held
        return (result,)

    tape.record((x,), (result,), backward, saved)
    return result


def passed_on(tape: Tape, x: Tensor, op: str) -> Tensor:
    """A sum with a number: the gradient goes on as it is."""
    result = tape.like(x, op)
    tape.record((x,), (result,), lambda tape, saved, needs, grads: grads)
    return result


def _broadcast(tape: Tape, op: str, operands: Sequence[Tensor], dtype: DType | None = None) -> Tensor:
    """A new tensor; without a type, of the widest of the operands."""
    shape = broadcast_shapes(*(each.shape for each in operands))
    dtype = widest(*(each.dtype for each in operands)) if dtype is None else dtype
    return tape.new(shape, dtype, op, strides_like(shape, *operands))


def widest(*dtypes: DType) -> DType:
    """The type of a result; of floating-point types, that which holds the others, or float32."""
    floats = [dtype for dtype in dict.fromkeys(dtypes) if dtype.is_float]
    if not floats or len(floats) == 1:
        return (floats or list(dtypes))[0]
    largest = max(floats, key=lambda dtype: dtype.itemsize)
    return largest if largest.itemsize > DTYPES["float16"].itemsize else FLOAT32


def operands(tape: Tape, op: str, *given: Tensor | None) -> tuple[Any, ...]:
    """The operands of an op, in the type that autocast has for it. The last is converted first, as compiled by GCC, and
    narrow copies of trained weights are kept.
    """
    autocast = tape.autocast
    dtype = None if autocast is None else autocast.operand_type(op)
    if autocast is None or dtype is None:
        return given
    found: list[Tensor | None] = []
    for x in reversed(given):
        if x is None or not x.dtype.is_float or x.dtype in (dtype, DTYPES["float64"]):
            found.append(x)
        elif x.trained and x.dtype == FLOAT32:
            if x not in autocast.weights:
                autocast.weights[x] = cast(tape, x, dtype)
            found.append(autocast.weights[x])
        else:
            found.append(cast(tape, x, dtype))
    return tuple(reversed(found))


def add(tape: Tape, a: Tensor, b: Tensor) -> Tensor:
    """a + b: nothing is saved, and the gradient is shared by both."""
    result = _broadcast(tape, "add", (a, b))
    tape.record((a, b), (result,), lambda tape, saved, needs, grads: [grads[0] if need else None for need in needs])
    return result


def sub(tape: Tape, a: Tensor, b: Tensor) -> Tensor:
    """a - b."""
    result = _broadcast(tape, "sub", (a, b))
    tape.record((a, b), (result,), _sub_backward)
    return result


def _sub_backward(tape: Tape, saved: Saved, needs: Needs, grads: Grads) -> Grads:
    grad = only(grads)
    other = tape.like(grad, "neg") if needs[1] else None
    return (grad if needs[0] else None, other)


def mul(tape: Tape, a: Tensor, b: Tensor) -> Tensor:
    """a · b: each is saved if the other has a gradient."""
    result = _broadcast(tape, "mul", (a, b))
    saved = (a if b.needs_grad else None, b if a.needs_grad else None)
    tape.record((a, b), (result,), _mul_backward, saved)
    return result


def _mul_backward(tape: Tape, saved: Saved, needs: Needs, grads: Grads) -> Grads:
    grad = only(grads)
    other = tape.like(grad, "backward of mul") if needs[1] else None
    return (tape.like(grad, "backward of mul") if needs[0] else None, other)


def div(tape: Tape, a: Tensor, b: Tensor) -> Tensor:
    """a / b."""
    result = _broadcast(tape, "div", (a, b))
    tape.record((a, b), (result,), _div_backward, (a if b.needs_grad else None, b))
    return result


def _div_backward(tape: Tape, saved: Saved, needs: Needs, grads: Grads) -> Grads:
    grad = only(grads)
    other = None
    if needs[1]:  # -grad * ((self / other) / other)
        held = [tape.like(grad, "backward of div") for _ in range(3)]
        other = tape.like(grad, "backward of div")
        del held
    return (tape.like(grad, "backward of div") if needs[0] else None, other)


def power(tape: Tape, a: Tensor, b: Tensor) -> Tensor:
    """a to the b, both tensors: both and the result are saved."""
    a, b = operands(tape, "pow", a, b)
    result = _broadcast(tape, "pow", (a, b))

    def backward(tape: Tape, saved: Saved, needs: Needs, grads: Grads) -> Grads:
        grad = only(grads)
        given: list[Tensor | None] = []
        for need in needs:
            held = [tape.like(grad, "backward of pow") for _ in range(3 * need)]
            given.append(tape.like(grad, "backward of pow") if need else None)
            del held
        return given

    tape.record((a, b), (result,), backward, (a, b, result))
    return result


def extremum(tape: Tape, op: str, a: Tensor, b: Tensor) -> Tensor:
    """The larger or the smaller of two."""
    result = _broadcast(tape, op, (a, b))
    tape.record((a, b), (result,), _extremum_backward, (a, b))
    return result


def _extremum_backward(tape: Tape, saved: Saved, needs: Needs, grads: Grads) -> Grads:
    grad = only(grads)
    given: list[Tensor | None] = [None, None]
    for i in (1, 0):  # where(self == other, grad / 2, grad).masked_fill_(self < other, 0)
        if needs[i]:
            half, same = tape.like(grad, "half of the gradient"), tape.new(grad.shape, BOOL, "mask")
            given[i] = tape.like(grad, f"backward of {'maximum'}")
            mask = tape.new(grad.shape, BOOL, "mask")
            del half, same, mask
    return given


def select(tape: Tape, condition: Tensor, a: Tensor | None, b: Tensor | None, dtype: DType) -> Tensor:
    """`torch.where`; an operand that is a number is None."""
    chosen = [each for each in (a, b) if each is not None]
    shape = broadcast_shapes(condition.shape, *(each.shape for each in chosen))
    number = tape.new((), dtype, "number") if len(chosen) < 2 else None
    result = tape.new(shape, dtype, "where", strides_like(shape, condition, *chosen))
    del number
    saved = (condition,)

    def backward(tape: Tape, saved: Saved, needs: Needs, grads: Grads) -> Grads:
        grad = only(grads)
        given: list[Tensor | None] = []
        for need in needs:
            zero = tape.new((), grad.dtype, "0") if need else None
            given.append(tape.like(grad, "backward of where") if need else None)
            del zero
        return given

    tape.record(chosen, (result,), backward, saved)
    return result


def without_gradient(tape: Tape, op: str, operands: Sequence[Tensor], dtype: DType) -> Tensor:
    """A comparison, a logical op, or arithmetic of whole numbers."""
    return _broadcast(tape, op, operands, dtype)


def cast(tape: Tape, x: Tensor, dtype: DType) -> Tensor:
    """`x.to(dtype)`."""
    if x.dtype == dtype:
        return x
    result = tape.new(x.shape, dtype, f"to {dtype}", strides_like(x.shape, x))
    before = x.dtype

    def backward(tape: Tape, saved: Saved, needs: Needs, grads: Grads) -> Grads:
        grad = only(grads)
        return (tape.new(grad.shape, before, f"to {before}", strides_like(grad.shape, grad)),)

    tape.record((x,), (result,), backward)
    return result
