"""ONNX models drawn op by op, with random attributes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper

from tests.fuzz.drawing import BOOL, FLOAT, INT32, INT64, Drawing, Tensor

OPSETS = (7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22)
# Ops that are nowhere steep, so that results which differ in the last bits stay close behind them.
SMOOTH = (
    *("Abs", "Neg", "Sigmoid", "Tanh", "Relu", "Identity", "Softsign", "Softplus", "Elu", "LeakyRelu"),
    *("Selu", "HardSigmoid", "Sin", "Cos", "Atan", "Erf", "Celu", "HardSwish", "Mish", "Gelu"),
    *("Sinh", "Asinh"),
)
STEEP = (
    "Exp",
    "Log",
    "Sqrt",
    "Reciprocal",
    "Floor",
    "Ceil",
    "Round",
    "Sign",
    "Tan",
    "ThresholdedRelu",
    "Shrink",
    "Cosh",
)
ALPHAS = {"Elu", "LeakyRelu", "Celu", "ThresholdedRelu", "HardSigmoid"}
SINCE = {"Erf": 9, "Celu": 12, "HardSwish": 14, "Mish": 18, "Gelu": 20, "Sinh": 9, "Asinh": 9, "Cosh": 9, "Round": 11}
SINCE |= {"Sign": 9, "Shrink": 9}
REDUCTIONS = ("Sum", "Mean", "Max", "Min", "Prod", "L1", "L2", "SumSquare", "LogSum", "LogSumExp")


def drawn(rng: random.Random) -> onnx.ModelProto:
    """A model of one to five nodes."""
    while True:
        drawing = Drawing(rng, rng.choice(OPSETS))
        for _ in range(rng.randint(1, 5)):
            rng.choice(FAMILIES)(drawing)
        if drawing.nodes:
            return drawing.model()


def _unary(d: Drawing) -> None:
    op = d.rng.choice(SMOOTH + STEEP)
    if d.opset < SINCE.get(op, 1):
        return
    if op in ("Sqrt", "Log"):
        d.add("Abs", [d.floats(exact=True).name], exact=True)  # engines differ in what the maximum of NaN is
    attributes = {"alpha": d.rng.choice((0.1, 0.5, 1.0, 2.0))} if op in ALPHAS and d.rng.random() < 0.7 else {}
    d.add(op, [d.floats(exact=op in STEEP).name], exact=op in ("Neg", "Abs", "Relu", "Identity"), **attributes)


def _binary(d: Drawing) -> None:
    op = d.rng.choice(
        ("Add", "Sub", "Mul", "Div", "Max", "Min", "Pow", "PRelu", "Less", "Greater", "Equal", "Mean", "Sum")
    )
    x = d.floats(exact=op in ("Div", "Pow", "Less", "Greater", "Equal"))
    shape = [1 if d.rng.random() < 0.3 else extent for extent in x.shape[d.rng.randint(0, len(x.shape)) :]]
    other = d.weight(*shape)
    if op == "Pow":
        other = d.constant(d.rng.choice((1.0, 2.0, 3.0)), np.float32)
    names = [x.name, other] if op in ("PRelu", "Pow") or d.rng.random() < 0.7 else [other, x.name]
    d.add(op, names, exact=op in ("Max", "Min"))


def _integers(d: Drawing) -> None:
    dtype, made = d.rng.choice(((INT32, np.int32), (INT64, np.int64)))
    x = d.input(d.shape(), dtype)
    op = d.rng.choice(("Add", "Sub", "Mul", "Div", "Mod", "Max", "Min", "Abs", "Neg", "Cast", "ReduceSum", "ReduceMax"))
    if op in ("Abs", "Neg"):
        d.add(op, [x.name], exact=True)
    elif op == "Cast":
        d.add(op, [x.name], exact=True, to=d.rng.choice((FLOAT, INT32, INT64, BOOL, 2, 3, 10, 11)))
    elif op.startswith("Reduce"):
        d.add(op, [x.name], exact=True, keepdims=d.rng.randint(0, 1))
    else:
        d.add(op, [x.name, d.constant(d.rng.choice((1, 2, 3, 7, -2, -5)), made)], exact=True)


def _where(d: Drawing) -> None:
    x = d.floats(1)
    if d.opset >= 9:
        flag = d.constant([d.rng.random() < 0.5 for _ in range(x.shape[-1])], np.bool_)
        d.add("Where", [flag, x.name, d.weight(*d.rng.choice(((), x.shape[-1:])))], exact=True)


def _clip(d: Drawing) -> None:
    x, bounds = d.floats(), (d.rng.choice((-1.0, 0.0, -0.3)), d.rng.choice((0.5, 6.0)))
    if d.opset < 11:
        d.add("Clip", [x.name], exact=True, min=bounds[0], max=bounds[1])
    else:
        given = ["" if d.rng.random() < 0.2 else d.constant(bound, np.float32) for bound in bounds]
        d.add("Clip", [x.name, *given], exact=True)


def _axes(d: Drawing, op: str, since: int, x: Tensor, axes: Sequence[int], **attributes: Any) -> None:
    """A node whose axes became an input in some opset."""
    if d.opset >= since:
        d.add(op, [x.name, d.constant(axes)], **attributes)
    else:
        d.add(op, [x.name], axes=list(axes), **attributes)


def _some_axes(d: Drawing, rank: int) -> list[int]:
    axes = d.rng.sample(range(rank), d.rng.randint(1, rank)) if rank else []
    return [axis - rank if d.opset >= 11 and d.rng.random() < 0.3 else axis for axis in axes]


def _reduce(d: Drawing) -> None:
    how, x, keep = d.rng.choice(REDUCTIONS), d.floats(1), d.rng.randint(0, 1)
    if d.rng.random() < 0.2:
        d.add(f"Reduce{how}", [x.name], keepdims=keep, exact=how in ("Max", "Min"))
    else:
        _axes(d, f"Reduce{how}", 13 if how == "Sum" else 18, x, _some_axes(d, len(x.shape)), keepdims=keep)


def _softmax(d: Drawing) -> None:
    x = d.floats(1)
    op = d.rng.choice(("Softmax", "LogSoftmax", "Hardmax"))
    x = d.floats(1, exact=True) if op == "Hardmax" else x
    d.add(op, [x.name], **({"axis": d.axis(len(x.shape))} if len(x.shape) < 2 or d.rng.random() < 0.8 else {}))


def _positions(d: Drawing) -> None:
    x = d.floats(1, exact=True)
    attributes = {"axis": d.axis(len(x.shape)), "keepdims": d.rng.randint(0, 1)}
    d.add(d.rng.choice(("ArgMax", "ArgMin")), [x.name], exact=True, **attributes)


def _top_k(d: Drawing) -> None:
    x = d.floats(1, exact=True)
    axis = d.axis(len(x.shape))
    k = d.rng.randint(1, max(1, x.shape[axis]))
    if d.opset < 10:
        d.add("TopK", [x.name], 2, exact=True, axis=axis, k=k)
    else:
        more = {"largest": d.rng.randint(0, 1)} if d.opset >= 11 else {}
        d.add("TopK", [x.name, d.constant([k])], 2, exact=True, axis=axis, **more)


def _reshape(d: Drawing) -> None:
    x = d.floats()
    choices = [[-1], [0] * len(x.shape), [*x.shape, 1], [1, -1], [*reversed(x.shape)], [0, -1]]
    d.add("Reshape", [x.name, d.constant(d.rng.choice(choices))], exact=True)


def _turn(d: Drawing) -> None:
    x = d.floats(1)
    kind, rank = d.rng.randrange(4), len(x.shape)
    if kind == 0:
        d.add("Transpose", [x.name], exact=True, perm=d.rng.sample(range(rank), rank))
    elif kind == 1:
        d.add("Flatten", [x.name], exact=True, axis=d.rng.randint(0 if d.opset < 11 else -rank, rank))
    elif kind == 2 and (ones := [i for i, extent in enumerate(x.shape) if extent == 1]):
        _axes(d, "Squeeze", 13, x, d.rng.sample(ones, d.rng.randint(1, len(ones))), exact=True)
    else:
        _axes(d, "Unsqueeze", 13, x, d.rng.sample(range(rank + 2), d.rng.randint(1, 2)), exact=True)


def _slice(d: Drawing) -> None:
    x = d.floats(1)
    axes = _some_axes(d, len(x.shape))
    starts, ends = ([d.rng.choice((-9, -3, -1, 0, 1, 2, 5, 2**31)) for _ in axes] for _ in range(2))
    if d.opset < 10:
        d.add("Slice", [x.name], exact=True, starts=starts, ends=ends, axes=axes)
    else:
        steps = [d.rng.choice((1, 1, 2, 3, -1, -2)) for _ in axes]
        d.add("Slice", [x.name, *map(d.constant, (starts, ends, axes, steps))], exact=True)


def _join(d: Drawing) -> None:
    x = d.floats(1)
    axis = d.axis(len(x.shape))
    other = list(x.shape)
    other[axis] = d.rng.choice((0, 1, 2, 3))
    d.add("Concat", [x.name, d.weight(*other), x.name][: d.rng.randint(1, 3)], exact=True, axis=axis)


def _split(d: Drawing) -> None:
    x = d.floats(1)
    axis = d.axis(len(x.shape))
    first = d.rng.randint(0, x.shape[axis])
    sizes = [first, x.shape[axis] - first]
    if d.opset < 13:
        d.add("Split", [x.name], 2, exact=True, axis=axis, split=sizes)
    else:
        d.add("Split", [x.name, d.constant(sizes)], 2, exact=True, axis=axis)


def _pad(d: Drawing) -> None:
    x = d.floats(1)
    mode = d.rng.choice(("constant", "reflect", "edge"))
    least = -1 if mode == "constant" else 0
    pads = [d.rng.randint(least, min(2, max(extent - 1, 0))) for extent in (*x.shape, *x.shape)]
    if d.opset < 11:
        d.add("Pad", [x.name], exact=True, mode=mode, pads=pads, value=0.5)
    else:
        d.add("Pad", [x.name, d.constant(pads), d.constant(0.5, np.float32)], exact=True, mode=mode)


def _repeat(d: Drawing) -> None:
    x = d.floats(0, 4)
    if d.rng.random() < 0.5:
        d.add("Tile", [x.name, d.constant([d.rng.randint(0, 3) for _ in x.shape])], exact=True)
    elif d.opset >= 8:
        spread = [d.rng.choice((1, 2, 3)), *(extent if extent != 1 else d.rng.choice((1, 4)) for extent in x.shape)]
        d.add("Expand", [x.name, d.constant(spread)], exact=True)


def _gather(d: Drawing) -> None:
    x = d.floats(1, 4)
    axis = d.axis(len(x.shape))
    extent = max(x.shape[axis], 1)
    least = -extent if d.opset >= 11 else 0
    kind = d.rng.choice(("Gather", "GatherElements", "GatherND", "Scatter", "ScatterND", "OneHot", "Compress"))

    def places(*shape: int) -> np.ndarray:
        return d.numbers.integers(least, extent, shape)

    if kind == "Gather":
        d.add(kind, [x.name, d.constant(places(*d.shape(0, 2)))], exact=True, axis=axis)
    elif kind == "GatherElements" and d.opset >= 11:
        d.add(kind, [x.name, d.constant(places(*x.shape))], exact=True, axis=axis)
    elif kind == "GatherND" and d.opset >= 11:
        depth = d.rng.randint(1, len(x.shape))
        at = [[d.rng.randint(-max(e, 1), max(e, 1) - 1) for e in x.shape[:depth]] for _ in range(3)]
        d.add(kind, [x.name, d.constant(at)], exact=True)
    elif kind == "Scatter" and d.opset >= 11 and x.shape[axis]:
        rows = [d.rng.randint(1, max(1, e)) for e in x.shape]
        rows[axis] = 1  # no place twice
        d.add("ScatterElements", [x.name, d.constant(places(*rows)), d.weight(*rows)], exact=True, axis=axis)
    elif kind == "ScatterND" and d.opset >= 11 and x.shape[0]:
        d.add(kind, [x.name, d.constant([[d.rng.randrange(x.shape[0])]]), d.weight(1, *x.shape[1:])], exact=True)
    elif kind == "OneHot" and d.opset >= 11:
        at = d.constant(d.numbers.integers(-4, 5, d.shape(0, 2)))
        d.add(kind, [at, d.constant(4), d.constant([0.5, 2.0], np.float32)], exact=True, axis=-1)
    elif kind == "Compress" and d.opset >= 11:
        d.add(kind, [x.name, d.constant([True, False, True][: x.shape[axis]], np.bool_)], exact=True, axis=axis)


def _scan(d: Drawing) -> None:
    x = d.floats(1)
    kind = d.rng.choice(("CumSum", "Trilu", "LpNormalization", "Einsum", "EyeLike"))
    if kind == "CumSum" and d.opset >= 11:
        flags = {"exclusive": d.rng.randint(0, 1), "reverse": d.rng.randint(0, 1)}
        d.add(kind, [x.name, d.constant(d.axis(len(x.shape)))], **flags)
    elif kind == "Trilu" and d.opset >= 14 and len(x.shape) > 1:
        d.add(kind, [x.name, d.constant(d.rng.randint(-3, 3))], exact=True, upper=d.rng.randint(0, 1))
    elif kind == "LpNormalization":
        d.add(kind, [x.name], axis=d.rng.randrange(len(x.shape)), p=d.rng.choice((1, 2)))
    elif kind == "Einsum" and d.opset >= 12 and len(x.shape) == 2:
        a, b = x.shape
        equation, shape = d.rng.choice(
            (("ij,jk->ik", (b, 3)), ("ij,ij->i", (a, b)), ("ij,ij", (a, b)), ("ij,k->kji", (2,)))
        )
        d.add(kind, [x.name, d.weight(*shape)], equation=equation)
    elif kind == "EyeLike" and d.opset >= 9 and len(x.shape) == 2:
        d.add(kind, [x.name], exact=True, k=d.rng.randint(-3, 3))


def _window(d: Drawing) -> None:
    axes = d.rng.choice((1, 2, 2, 3))
    channels = d.rng.choice((1, 2, 4, 6))
    x = d.input((d.rng.choice((1, 2, 3)), channels, *(d.rng.randint(3, 9) for _ in range(axes))))
    kernel = [d.rng.randint(1, 3) for _ in range(axes)]
    attributes: dict[str, Any] = {"strides": [d.rng.choice((1, 1, 2, 3)) for _ in range(axes)]}
    op = d.rng.choice(("Conv", "Conv", "ConvTranspose", "MaxPool", "AveragePool", "LpPool"))
    if d.rng.random() < 0.3:
        attributes["auto_pad"] = d.rng.choice(("SAME_UPPER", "SAME_LOWER", "VALID"))
    else:
        attributes["pads"] = [d.rng.randint(0, taps - 1) for taps in (*kernel, *kernel)]
    if op in ("Conv", "ConvTranspose"):
        attributes["dilations"] = [d.rng.choice((1, 1, 2)) for _ in range(axes)]
        if "auto_pad" in attributes and op == "ConvTranspose":
            del attributes["auto_pad"]  # ONNX changed what it means there
        groups = d.rng.choice([g for g in (1, 2, 3, channels) if channels % g == 0])
        outs = groups * d.rng.choice((1, 2, 3))
        shape = (outs, channels // groups) if op == "Conv" else (channels, outs // groups)
        bias = [d.weight(outs)] if d.rng.random() < 0.5 else []
        d.add(op, [x.name, d.weight(*shape, *kernel), *bias], group=groups, **attributes)
        return
    if op == "AveragePool":
        attributes["count_include_pad"] = d.rng.randint(0, 1)
    if op in ("MaxPool", "AveragePool") and d.opset >= 10 and "pads" in attributes:
        attributes["ceil_mode"] = d.rng.randint(0, 1)
    d.add(op, [x.name], kernel_shape=kernel, **attributes)


def _product(d: Drawing) -> None:
    x = d.floats(1, 4)
    kind = d.rng.randrange(3)
    if kind == 0 and len(x.shape) == 2:
        a, b = d.rng.randint(0, 1), d.rng.randint(0, 1)
        inner, outs = x.shape[0 if a else 1], d.rng.randint(1, 5)
        w = d.weight(*((outs, inner) if b else (inner, outs)))
        attributes = {
            "transA": a,
            "transB": b,
            "alpha": d.rng.choice((1.0, 0.5)),
            "beta": d.rng.choice((1.0, 2.0, 0.0)),
        }
        d.add("Gemm", [x.name, w, d.weight(*d.rng.choice(((outs,), (1, outs), (1,))))], **attributes)
    elif d.rng.random() < 0.3:
        d.add("MatMul", [x.name, d.weight(x.shape[-1])])
    else:
        d.add(
            "MatMul",
            [x.name, d.weight(*(x.shape[:-2] if d.rng.random() < 0.4 else ()), x.shape[-1], d.rng.randint(1, 5))],
        )


def _norm(d: Drawing) -> None:
    channels = d.rng.choice((1, 2, 4))
    x = d.input((d.rng.choice((1, 2)), channels, *(d.rng.randint(1, 5) for _ in range(d.rng.randint(1, 3)))))
    kind = d.rng.choice(
        ("BatchNormalization", "InstanceNormalization", "LayerNormalization", "GlobalAveragePool", "LRN")
    )
    positive = d.constant(d.numbers.random(channels) + 0.5, np.float32)
    if kind == "BatchNormalization":
        d.add(kind, [x.name, *(d.weight(channels) for _ in range(3)), positive], epsilon=d.rng.choice((1e-5, 1e-2)))
    elif kind == "InstanceNormalization":
        d.add(kind, [x.name, d.weight(channels), d.weight(channels)])
    elif kind == "LayerNormalization" and d.opset >= 17:
        axis = d.axis(len(x.shape))
        d.add(kind, [x.name, d.weight(*x.shape[axis:]), d.weight(*x.shape[axis:])], axis=axis)
    elif kind == "LRN":
        d.add(kind, [x.name], size=d.rng.choice((1, 3, 5)))
    elif kind == "GlobalAveragePool":
        d.add(d.rng.choice((kind, "GlobalMaxPool", "GlobalLpPool")), [x.name])


def _recurrent(d: Drawing) -> None:
    op, gates = d.rng.choice((("RNN", 1), ("GRU", 3), ("LSTM", 4)))
    steps, batch, features, hidden = (d.rng.randint(1, 4) for _ in range(4))
    direction = d.rng.choice(("forward", "reverse", "bidirectional"))
    ways = 2 if direction == "bidirectional" else 1
    x = d.input((steps, batch, features))
    inputs = [x.name, d.weight(ways, gates * hidden, features), d.weight(ways, gates * hidden, hidden)]
    if d.rng.random() < 0.6:
        inputs.append(d.weight(ways, 2 * gates * hidden))
        if d.rng.random() < 0.5:
            inputs.append(d.constant([d.rng.randint(1, steps) for _ in range(batch)], np.int32))
    more = {"linear_before_reset": d.rng.randint(0, 1)} if op == "GRU" else {}
    d.add(op, inputs, 2, hidden_size=hidden, direction=direction, **more)


def _resize(d: Drawing) -> None:
    x = d.input((1, d.rng.randint(1, 3), d.rng.randint(1, 6), d.rng.randint(1, 6)))
    scales = [1.0, 1.0, *(d.rng.choice((0.5, 1.0, 2.0, 3.0, 1.5)) for _ in range(2))]
    if d.opset < 10:
        mode = d.rng.choice(("nearest", "linear"))
        whole = [max(1.0, float(int(scale))) for scale in scales]
        d.add("Upsample", [x.name, d.constant(whole, np.float32)] if d.opset == 9 else [x.name], mode=mode,
              **({} if d.opset == 9 else {"scales": whole}))  # fmt: skip
    elif d.opset >= 11:
        mode = d.rng.choice(("nearest", "linear", "cubic"))
        places = ["half_pixel", "align_corners", "asymmetric", "pytorch_half_pixel"]
        if any((scale * extent) % 1 for scale, extent in zip(scales, x.shape)):
            places.remove("align_corners")  # ONNX Runtime goes by the rounded extents, unlike ONNX's own reference
        at = d.rng.choice(places)
        near = {"nearest_mode": d.rng.choice(("round_prefer_floor", "floor", "ceil"))} if mode == "nearest" else {}
        how = {"mode": mode, "coordinate_transformation_mode": at, **near}
        d.add("Resize", [x.name, "", d.constant(scales, np.float32)], **how)


def _depth(d: Drawing) -> None:
    x = d.input((1, d.rng.choice((4, 8)), 2 * d.rng.randint(1, 3), 2))
    if d.rng.random() < 0.5 and d.opset >= 11:
        d.add("DepthToSpace", [x.name], exact=True, blocksize=2, mode=d.rng.choice(("DCR", "CRD")))
    else:
        d.add("SpaceToDepth", [x.name], exact=True, blocksize=2)


def _cast(d: Drawing) -> None:
    x = d.floats(exact=True)
    d.add("Cast", [x.name], exact=True, to=d.rng.choice((INT32, INT64, BOOL, 10, 11)))


def _branch(d: Drawing, x: Tensor, name: str) -> onnx.GraphProto:
    """One or two functions of a tensor around it, perhaps with a weight of its own, and perhaps undefined."""
    nodes, held, last = [], [], x.name
    for i in range(d.rng.randint(1, 2)):
        op = d.rng.choice(("Identity", "Neg", "Tanh", "Sigmoid", "Relu", "Exp", "Sqrt", "Log", "Mul"))
        reads = [last]
        if op == "Mul":
            reads.append(f"{name}w{i}")
            held.append(onnx.numpy_helper.from_array(d.numbers.standard_normal(x.shape).astype(np.float32), reads[1]))
        nodes.append(helper.make_node(op, reads, [f"{name}{i}"]))
        last = f"{name}{i}"
    nodes.append(helper.make_node("Tanh", [last], [name]))
    return helper.make_graph(nodes, name, [], [helper.make_tensor_value_info(name, FLOAT, x.shape)], held)


def _choice(d: Drawing) -> None:
    """A condition of data, and branches that give one shape."""
    told, x = d.floats(exact=True), d.floats()
    if 0 in told.shape:
        return
    before = len(d.nodes)
    d.add("ReduceMax", [told.name], exact=True, keepdims=0)
    d.add("Greater", [d.tensors[-1].name, d.constant(0.3, np.float32)], exact=True)
    if len(d.nodes) == before + 2:
        then, other = (_branch(d, x, d.fresh(name)) for name in ("then", "else"))
        d.add("If", [d.tensors[-1].name], then_branch=then, else_branch=other)


FAMILIES: tuple[Callable[[Drawing], None], ...] = (
    *(_unary, _unary, _binary, _binary, _integers, _where, _clip, _reduce, _reduce, _softmax, _positions, _top_k),
    *(_reshape, _turn, _slice, _join, _split, _pad, _repeat, _gather, _gather, _scan, _window, _window, _product),
    *(_norm, _recurrent, _resize, _depth, _cast, _choice),
)
