"""Bodies in standard ONNX of ops that ONNX Runtime's quantiser and graph optimizer write in its domain com.microsoft.

An op of quantised tensors is the op of the numbers that they stand for, between DequantizeLinear and QuantizeLinear.

Source: ONNX Runtime's ContribOperators.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from foreplan.frontend.onnx.node import OnnxNode

if TYPE_CHECKING:
    import onnx

_OPSET = 21
# Op → the op of numbers, where its operands begin (each with a scale and a zero point behind it), and where the scale
# and the zero point of the result are.
_QUANTISED: dict[str, tuple[str, Sequence[int], int]] = {
    "QLinearAdd": ("Add", (0, 3), 6),
    "QLinearMul": ("Mul", (0, 3), 6),
    "QLinearSigmoid": ("Sigmoid", (0,), 3),
    "QLinearLeakyRelu": ("LeakyRelu", (0,), 3),
    "QLinearSoftmax": ("Softmax", (0,), 3),
    "QLinearAveragePool": ("AveragePool", (0,), 3),
    "QLinearGlobalAveragePool": ("GlobalAveragePool", (0,), 3),
    "QLinearWhere": ("Where", (1, 4), 7),
}
_OWN = {"channels_last", "opset"}  # attributes that the op of numbers does not have
_FUSED = ("Relu", "Tanh", "Sigmoid", "LeakyRelu", "HardSigmoid", "Clip")


def microsoft_body(n: OnnxNode) -> onnx.FunctionProto | None:
    """The body of a node of com.microsoft; None: it has none here.

    Raises:
        UnsupportedError: the node lays out channels last, or fuses an activation without a name in ONNX.
    """
    if n.op_type in _QUANTISED:
        return _between(n, *_QUANTISED[n.op_type])
    build = _BODIES.get(n.op_type)
    return None if build is None else build(n)


@dataclass
class _Body:
    """A body that grows a node at a time; its inputs are `i0`, `i1`, …, as far as the node has them."""

    n: OnnxNode
    opset: int = _OPSET
    nodes: list[onnx.NodeProto] = field(default_factory=list)

    def given(self, *indices: int) -> list[str]:
        """The names of inputs, without those that are left out at the end."""
        names = [f"i{i}" if self.n.has(i) else "" for i in indices]
        while names and not names[-1]:
            names.pop()
        return names

    def add(self, op: str, inputs: Sequence[str], **attributes: Any) -> str:
        """A node; the name of its first result."""
        import onnx

        outputs = [f"t{len(self.nodes)}"]
        if op == "DynamicQuantizeLinear":
            outputs += [f"{outputs[0]}_scale", f"{outputs[0]}_zero"]
        self.nodes.append(onnx.helper.make_node(op, inputs, outputs, **attributes))
        return outputs[0]

    def number(self, first: int, **attributes: Any) -> str:
        """The numbers of a quantised tensor, whose scale and zero point follow it."""
        return self.add("DequantizeLinear", self.given(first, first + 1, first + 2), **attributes)

    def numbers(self, *values: int) -> str:
        """A constant of integers."""
        return self.add("Constant", [], value_ints=values)

    def finish(self, name: str) -> onnx.FunctionProto:
        """The body, which gives that tensor."""
        import onnx

        self.nodes.append(onnx.helper.make_node("Identity", [name], ["y"]))
        inputs = [f"i{i}" for i in range(len(self.n.inputs))]
        opsets = [onnx.helper.make_opsetid("", self.opset), onnx.helper.make_opsetid("com.microsoft", 1)]
        return onnx.helper.make_function("com.microsoft", self.n.op_type, inputs, ["y"], self.nodes, opsets)


def _given_attributes(n: OnnxNode) -> dict[str, Any]:
    import onnx

    return {each.name: onnx.helper.get_attribute_value(each) for each in n.proto.attribute}


def _between(n: OnnxNode, op: str, operands: Sequence[int], scale: int) -> onnx.FunctionProto:
    given = _given_attributes(n)
    if given.get("channels_last"):
        raise n.unsupported("channels_last is set; quantise the model with channels before positions")
    body = _Body(n, int(given.get("opset", _OPSET)))  # a Softmax says of which opset it is
    numbers = [body.number(first) for first in operands]
    if op == "Where":
        numbers = ["i0", *numbers]
    y = body.add(op, numbers, **{name: value for name, value in given.items() if name not in _OWN})
    return body.finish(body.add("QuantizeLinear", [y, *body.given(scale, scale + 1)]))


def _concat(n: OnnxNode) -> onnx.FunctionProto:
    body = _Body(n)
    numbers = [body.number(first) for first in range(2, len(n.inputs), 3)]
    y = body.add("Concat", numbers, axis=n.integer("axis"))
    return body.finish(body.add("QuantizeLinear", [y, *body.given(0, 1)]))


def _gemm(n: OnnxNode) -> onnx.FunctionProto:
    """(alpha · A · B + C), where C has the scale of the product; a result without a scale is a float."""
    body = _Body(n)
    turned = n.integer("transB", 0)
    operands = [body.number(0), body.number(3, axis=0 if turned else 1)]
    if n.has(6):
        scale = body.add("Mul", ["i1", "i4"])
        operands.append(body.add("DequantizeLinear", ["i6", scale], axis=len(n.shape(6)) - 1))
    y = body.add("Gemm", operands, transA=n.integer("transA", 0), transB=turned)
    if n.number("alpha", 1.0) != 1.0:
        y = body.add("Mul", [y, body.add("Constant", [], value_float=n.number("alpha"))])
    return body.finish(body.add("QuantizeLinear", [y, *body.given(7, 8)]) if n.has(7) else y)


def _product(n: OnnxNode) -> onnx.FunctionProto:
    """A product of integers, in floats: of a tensor that is quantised here, or was before."""
    body = _Body(n)
    if n.op_type == "DynamicQuantizeMatMul":
        a = body.add("DynamicQuantizeLinear", ["i0"])
        a_scale, a_zero, scale, zero, bias = f"{a}_scale", f"{a}_zero", 2, 3, 4
    else:
        a, a_scale, scale, zero, bias = "i0", "i2", 3, 5, 6
        a_zero = "i4" if n.has(4) else ""
    operands = [a, "i1", a_zero, *body.given(zero)]
    while not operands[-1]:
        operands.pop()
    sums = body.add("Cast", [body.add("MatMulInteger", operands)], to=1)
    y = body.add("Mul", [sums, body.add("Mul", [a_scale, f"i{scale}"])])
    return body.finish(body.add("Add", [y, f"i{bias}"]) if n.has(bias) else y)


def _same(n: OnnxNode) -> onnx.FunctionProto:
    """An op that has come into ONNX since."""
    body = _Body(n)
    return body.finish(body.add(n.op_type, body.given(0, 1, 2), **_given_attributes(n)))


def _fused(n: OnnxNode) -> onnx.FunctionProto:
    """A convolution or a Gemm, perhaps a sum, and an activation."""
    body, given = _Body(n), _given_attributes(n)
    op, count = n.op_type.removeprefix("Fused"), 3
    activation, params = n.text("activation"), list(given.get("activation_params", ()))
    params += [given[name] for name in ("activation_alpha", "activation_beta") if name in given]
    plain = {name: value for name, value in given.items() if not name.startswith("activation")}
    y = body.add(op, body.given(*range(count)), **plain)
    if n.has(count):
        y = body.add("Add", [y, f"i{count}"])
    if activation and activation not in _FUSED:
        raise n.unsupported(f"it fuses the activation {activation!r}; foreplan knows {', '.join(_FUSED)}")
    if activation == "Clip":
        y = body.add("Clip", [y, *(body.add("Constant", [], value_float=float(each)) for each in params[:2])])
    elif activation:
        y = body.add(activation, [y], **dict(zip(("alpha", "beta"), map(float, params))))
    return body.finish(y)


def _attention(n: OnnxNode) -> onnx.FunctionProto:
    """Attention of the numbers that inputs and weights stand for."""
    if n.has(8) or n.wants(1):
        raise n.unsupported("it has a cache of earlier keys and values (past); export the model without it")
    body = _Body(n)
    x = body.add("DequantizeLinear", ["i0", "i3", *body.given(6)])
    w = body.add("DequantizeLinear", ["i1", "i4", *body.given(7)], axis=1)
    given = {name: value for name, value in _given_attributes(n).items() if name != "past_present_share_buffer"}
    return body.finish(body.add("Attention", [x, w, *body.given(2, 5)], domain="com.microsoft", **given))


def _blocks(n: OnnxNode) -> onnx.FunctionProto:
    """A product with weights [N, K] of 4 or 8 bits, with a scale and a zero point for each block of a row."""
    body, bits, rows, terms, size = _Body(n), *(n.integer(name) for name in ("bits", "N", "K", "block_size"))
    blocks = -(-terms // size)
    if bits not in (4, 8) or n.has(4):
        raise n.unsupported(
            "its weights have other bits than 4 or 8, or are in another order (g_idx); export it without"
        )
    scale = body.add("Reshape", ["i2", body.numbers(rows, blocks, 1)])
    if n.has(3) and n.type(3).dtype.is_float:
        zero = body.add("Reshape", ["i3", body.numbers(rows, blocks, 1)])
    elif n.has(3):
        packed = body.add("Reshape", ["i3", body.numbers(rows, 1, -1)])
        zero = body.add("Transpose", [_apart(body, packed, bits, blocks)], perm=[0, 2, 1])
    else:
        zero = body.add("Constant", [], value_float=float(1 << bits - 1))
    whole = _apart(body, body.add("Reshape", ["i1", body.numbers(rows, blocks, -1)]), bits, size)
    number = body.add("Mul", [body.add("Sub", [whole, zero]), scale])
    row = body.add("Reshape", [number, body.numbers(rows, blocks * size)])
    weight = body.add("Slice", [row, body.numbers(0), body.numbers(terms), body.numbers(1)])
    y = body.add("MatMul", ["i0", body.add("Transpose", [weight], perm=[1, 0])])
    return body.finish(body.add("Add", [y, "i5"]) if n.has(5) else y)


def _apart(body: _Body, packed: str, bits: int, count: int) -> str:
    """The first `count` numbers of the last of three axes of bytes, as floats; the lower half of a byte is first."""
    if bits == 4:
        few = [body.add("Cast", [body.numbers(n)], to=2) for n in (15, 4)]
        halves = [body.add("BitwiseAnd", [packed, few[0]]), body.add("BitShift", [packed, few[1]], direction="RIGHT")]
        halves = [body.add("Unsqueeze", [half, body.numbers(3)]) for half in halves]
        packed = body.add("Reshape", [body.add("Concat", halves, axis=3), body.numbers(0, 0, -1)])
    first = body.add("Slice", [packed, body.numbers(0), body.numbers(count), body.numbers(2)])
    return body.add("Cast", [first], to=1)


_BODIES = {
    "QAttention": _attention,
    "MatMulNBits": _blocks,
    "QLinearConcat": _concat,
    "QGemm": _gemm,
    "DynamicQuantizeMatMul": _product,
    "MatMulIntegerToFloat": _product,
    "QuantizeLinear": _same,
    "DequantizeLinear": _same,
    "FusedConv": _fused,
    "FusedGemm": _fused,
}
