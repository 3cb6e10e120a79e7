"""What a place in a formula proves of a constant that stands there: exponents, bounds, what keeps a root from zero.

Such a constant is one number, or one number everywhere. Nobody learns it, whatever it is called. Where a learned number
may stand too, as in most products and sums, a place proves nothing; other rules then tell the role of the tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

if TYPE_CHECKING:
    import onnx

REARRANGING = {"Identity", "Transpose", "Reshape", "Unsqueeze", "Squeeze", "Flatten", "Cast", "CastLike", "Split"}
REARRANGING |= {"Slice", "Expand", "Concat", "Tile"}
_FEW = 4  # nodes that merely rearrange
_NEAR = 3e-7  # of a number, which float32 does not tell apart
_SMALL = 1e-3  # what keeps a divisor from zero is less, or a round number

# Op → inputs that hold scales of quantisation.
_SCALES: dict[str, Sequence[int]] = {
    "QuantizeLinear": (1,),
    "DequantizeLinear": (1,),
    "MatMulIntegerToFloat": (2, 3),
    "DynamicQuantizeMatMul": (2,),
    "DynamicQuantizeLSTM": (8, 10),
    "MatMulNBits": (2,),
    "QAttention": (3, 4),
    "QGemm": (1, 4, 7),
}
# What gives scales of data, or products of integers: a factor of these is a scale too.
_INTEGERS = {"DynamicQuantizeLinear", "MatMulInteger", "ConvInteger"}
# Op → inputs that hold the state before the first step.
_STATES: dict[str, Sequence[int]] = {
    "RNN": (5,),
    "GRU": (5,),
    "LSTM": (5, 6),
    "DynamicQuantizeLSTM": (5, 6),
    "Loop": range(2, 64),
    "Scan": range(64),
}
_BOUNDS: dict[str, Sequence[int]] = {"Clip": (1, 2), "Max": range(8), "Min": range(8)}
# What has no end at zero, or no value: (op, input).
_SINGULAR = {("Sqrt", 0), ("Log", 0), ("Reciprocal", 0), ("Div", 1), ("Pow", 0)}
# Numbers of GELU, of its form with tanh, and of that with a sigmoid (Hendrycks and Gimpel, 2016), and of SELU
# (Klambauer and others, 2017).
_ACTIVATIONS = (math.sqrt(2), math.sqrt(0.5), math.sqrt(2 / math.pi), 0.044715, 1.702, 1.0507010, 1.6732632, 1.7580993)


@dataclass(frozen=True)
class Near:
    """The nodes around a place, by the names of their outputs and of their inputs."""

    makers: Mapping[str, onnx.NodeProto]
    readers: Mapping[str, Sequence[tuple[onnx.NodeProto, int]]]

    def maker(self, name: str) -> onnx.NodeProto | None:
        """The node that made a tensor, which was merely rearranged since."""
        for _ in range(_FEW):
            node = self.makers.get(name)
            if node is None or node.op_type not in REARRANGING:
                return node
            name = node.input[0] if node.input else ""
        return None

    def makers_beside(self, node: onnx.NodeProto, slot: int) -> list[onnx.NodeProto]:
        """The nodes that made the other inputs of a node."""
        others = (self.maker(name) for i, name in enumerate(node.input) if i != slot)
        return [made for made in others if made is not None]

    def goes_to(self, names: Sequence[str], places: Set[tuple[str, int]]) -> bool:
        """Whether one of the places reads one of the tensors, merely rearranged on the way."""
        return any((node.op_type, slot) in places for node, slot in self._ahead(names, _FEW))

    def _ahead(self, names: Sequence[str], depth: int) -> Iterator[tuple[onnx.NodeProto, int]]:
        for name in names:
            for node, slot in self.readers.get(name, ()):
                yield node, slot
                if depth and slot == 0 and node.op_type in REARRANGING:
                    yield from self._ahead(node.output, depth - 1)


def proof(node: onnx.NodeProto, slot: int, number: float | None, single: bool, near: Near) -> str:
    """Why nobody learns what stands in an input of a node, for people; empty: the place does not say.

    Args:
        number: what stands everywhere in the tensor; NaN where it is not known; None: several numbers.
        single: whether the tensor has one element.
    """
    op = node.op_type
    if slot in _SCALES.get(op, ()) or op.startswith("QLinear"):
        return "a scale of quantisation"
    if op == "Mul" and any(made.op_type in _INTEGERS for made in near.makers_beside(node, slot)):
        return "a scale of quantisation"
    if number is None:
        return ""
    if slot in _STATES.get(op, ()) and number == 0:
        return "a zero state before the first step"
    if slot in _BOUNDS.get(op, ()):
        return "a bound"
    if op == "Pow" and ((slot == 1 and (number != number or is_round(number))) or (slot == 0 and single)):
        return "an exponent, or what has one"
    if op in ("Range", "Mod", "CumSum") or (op == "Pad" and slot == 2):
        return "part of places and paddings"
    return _in_formula(node, slot, number, single, near)


def _in_formula(node: onnx.NodeProto, slot: int, number: float, single: bool, near: Near) -> str:
    """The same for sums and products: numbers that formulas have, beside ops that they have."""
    op = node.op_type
    small = 0 < abs(number) <= _SMALL
    near_zero = op in ("Add", "Sub", "Sum") and (small or (single and number and is_round(number)))
    if near_zero and near.goes_to(node.output, _SINGULAR):
        return "keeps a root, a logarithm or a divisor from zero"
    if op in ("Mul", "Div") and near.goes_to(node.output, {("Erf", 0)}) and is_round(number) and number not in (0, 1):
        return "part of GELU"
    if not single:
        return ""
    made = {each.op_type for each in near.makers_beside(node, slot)}
    if op == "Mul" and any(_is(abs(number), each) for each in _ACTIVATIONS):
        return "part of an activation function"
    if op == "Add" and number == 1 and made & {"Erf", "Tanh", "Exp", "Sigmoid"}:
        return "part of an activation function"
    if op == "Add" and is_round(number) and number and near.goes_to(node.output, {("Clip", 0)}):
        return "part of a hard sigmoid"
    if op in ("Sub", "Div") and slot == 0 and is_round(number):
        return "what something is taken from, or divided"
    return ""


def is_round(number: float) -> bool:
    """Whether formulas have such a number: few digits, a fraction, a root or a logarithm of one, or a part of pi."""
    size = abs(number)
    if not 0 < size < math.inf or math.frexp(size)[0] == 0.5 or has_few_digits(size) or _is_narrow(size):
        return True
    return any(_has_digits(each, 3) or _is_fraction(each) for each in _origins(size))


def has_few_digits(number: float) -> bool:
    """Whether a number has four digits at most, as those that people write."""
    return number == 0 or _has_digits(abs(number), 4)


def _is(number: float, known: float) -> bool:
    """Whether a number is a known one, in float32 or in fewer bits."""
    return math.isclose(number, known, rel_tol=1e-3 if _is_narrow(number) else 1e-6)


def _is_narrow(number: float) -> bool:
    """Whether a number was kept in float16 or bfloat16: it has few digits then, whatever it was."""
    with np.errstate(over="ignore"):
        return any(float(np.asarray(number, dtype)) == number for dtype in (np.float16, ml_dtypes.bfloat16))


def _origins(number: float) -> Iterator[float]:
    """What a number may have been computed from."""
    yield from (number, 1 / number, number**2, 1 / number**2, number / math.pi, math.pi / number, number**2 * math.pi)
    for power in (number, 1 / number, 10 / number):
        if power < 20:
            yield from (math.exp(power), math.exp(-power), 10**power)


def _has_digits(number: float, digits: int) -> bool:
    """Whether a number has no more digits, as far as float32 tells."""
    return abs(float(f"{number:.{digits - 1}e}") - number) <= _NEAR * number


def _is_fraction(number: float) -> bool:
    """Whether a number is whole, or a fraction, of small numbers."""
    parts = (number * part for part in (1, 3, 6, 7))
    return number < 4096 and any(part >= 0.5 and abs(round(part) - part) <= _NEAR * part for part in parts)
