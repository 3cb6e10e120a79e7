"""Ops of com.microsoft that have a body in standard ONNX: drawn, beside ONNX Runtime's own kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import foreplan as fp
from foreplan.base.errors import UnsupportedError
from foreplan.frontend import from_onnx
from tests.frontend.onnx.models import info
from tests.oracle.peers import onnxruntime
from tests.profile import pick

Draw = np.random.Generator
DOMAIN = "com.microsoft"


class Drawn:
    """A model of one op, whose quantised operands are rounded from float inputs, and whose result is made a float.

    Attributes:
        step: by which a rounded result may differ.
    """

    def __init__(self, draw: Draw) -> None:
        self.draw, self.kind = draw, [np.uint8, np.int8][draw.integers(2)]
        self.nodes: list[onnx.NodeProto] = []
        self.held: dict[str, np.ndarray] = {}
        self.inputs: dict[str, np.ndarray] = {}
        self.step = 1e-5

    def floats(self, *shape: int) -> str:
        name = f"x{len(self.inputs)}"
        self.inputs[name] = self.draw.normal(size=shape).astype(np.float32)
        return name

    def constant(self, array: Any, dtype: Any = np.float32) -> str:
        name = f"c{len(self.held)}"
        self.held[name] = np.asarray(array, dtype)
        return name

    def scale(self) -> list[str]:
        """A scale and a zero point, which may be left out."""
        number = float(self.draw.uniform(0.01, 0.05))
        zero = self.draw.integers(100, 150) if self.kind is np.uint8 else self.draw.integers(-20, 20)
        return [self.constant(number), self.constant(zero, self.kind)]

    def rounded(self, *shape: int) -> list[str]:
        scale, x = self.scale(), self.floats(*shape)
        self.nodes.append(helper.make_node("QuantizeLinear", [x, *scale], [f"{x}q"]))
        return [f"{x}q", *scale]

    def op(self, name: str, inputs: list[str], result: list[str] | None = None, **attributes: Any) -> None:
        """The node; `result` has the scale and the zero point of what it gives."""
        self.nodes.append(
            helper.make_node(name, inputs, ["y" if result is None else "z"], "it", domain=DOMAIN, **attributes)
        )
        if result is not None:
            self.nodes.append(helper.make_node("DequantizeLinear", ["z", *result], ["y"]))
            self.step = float(self.held[result[0]]) * 1.001

    def model(self) -> onnx.ModelProto:
        graph = helper.make_graph(
            self.nodes,
            "small",
            [info(name, x.shape) for name, x in self.inputs.items()],
            [info("y", None)],
            [numpy_helper.from_array(array, name) for name, array in self.held.items()],
        )
        imports = [helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, 1)]
        return helper.make_model(graph, opset_imports=imports, ir_version=8)


def binary(d: Drawn) -> None:
    a, b, y = d.rounded(2, 3, 4), d.rounded(*((2, 3, 4), (4,), (3, 1))[d.draw.integers(3)]), d.scale()
    d.op(str(d.draw.choice(["QLinearAdd", "QLinearMul"])), [*a, *b, *y], y)


def unary(d: Drawn) -> None:
    name, y = str(d.draw.choice(["QLinearSigmoid", "QLinearLeakyRelu"])), d.scale()
    d.op(name, [*d.rounded(5, 7), *y], y, **({"alpha": 0.2} if name == "QLinearLeakyRelu" else {}))


def softmax(d: Drawn) -> None:
    y = [d.constant(1 / 256), d.constant(0 if d.kind is np.uint8 else -128, d.kind)]
    d.op("QLinearSoftmax", [*d.rounded(3, 4, 5), *y], y, axis=-1, opset=13)


def pool(d: Drawn) -> None:
    y = d.scale()
    d.op("QLinearAveragePool", [*d.rounded(2, 3, 7, 6), *y], y, kernel_shape=[3, 2], strides=[2, 1], pads=[1, 0, 1, 0])


def global_pool(d: Drawn) -> None:
    y = d.scale()
    d.op("QLinearGlobalAveragePool", [*d.rounded(2, 3, 7, 6), *y], y, channels_last=0)


def concat(d: Drawn) -> None:
    y = d.scale()
    d.op(
        "QLinearConcat", [*y, *(name for _ in range(int(d.draw.integers(1, 4))) for name in d.rounded(2, 3))], y, axis=1
    )


def where(d: Drawn) -> None:
    y = d.scale()
    chosen = d.constant(d.draw.integers(0, 2, (2, 3)), np.bool_)
    d.op("QLinearWhere", [chosen, *d.rounded(2, 3), *d.rounded(2, 3), *y], y)


def gemm(d: Drawn) -> None:
    """With integers of seven bits, since sums of 16 bits overflow on some processors."""
    left, right, many = (int(n) for n in d.draw.integers(0, 2, 3))
    a = d.rounded(*((9, 4) if left else (4, 9)))
    scales = d.draw.uniform(0.01, 0.02, (5,) if many else ())
    weight = d.constant(d.draw.integers(-60, 60, (5, 9) if right else (9, 5)), np.int8)
    b = [weight, d.constant(scales), d.constant(np.zeros_like(scales), np.int8)]
    bias = d.constant(d.draw.integers(-500, 500, 5), np.int32)
    y = d.scale() if d.draw.integers(2) else None
    d.op("QGemm", [*a, *b, bias, *(y or ())], y, transA=left, transB=right)


def dynamic_product(d: Drawn) -> None:
    many = bool(d.draw.integers(2))
    scale = d.constant(d.draw.uniform(0.01, 0.02, (5,) if many else ()))
    weight = d.constant(d.draw.integers(-60, 60, (9, 5)), np.int8)
    bias = d.constant(d.draw.normal(size=5)) if d.draw.integers(2) else ""
    d.op("DynamicQuantizeMatMul", [d.floats(2, 4, 9), weight, scale, "", bias])


def product(d: Drawn) -> None:
    a = d.rounded(2, 4, 9)
    weight, scale = d.constant(d.draw.integers(-60, 60, (9, 5)), np.int8), d.constant(0.013)
    zero = d.constant(3, np.int8) if d.draw.integers(2) else ""
    bias = d.constant(d.draw.normal(size=5)) if d.draw.integers(2) else ""
    d.op("MatMulIntegerToFloat", [a[0], weight, a[1], scale, a[2], zero, bias])


def blocks(d: Drawn) -> None:
    rows, terms, size = 5, int(d.draw.integers(17, 70)), int(d.draw.choice([16, 32]))
    bits, count = int(d.draw.choice([4, 8])), -(-terms // size)
    weight = d.constant(d.draw.integers(0, 256, (rows, count, size * bits // 8)), np.uint8)
    scale = d.constant(d.draw.uniform(0.01, 0.02, rows * count))
    zeros = d.constant(d.draw.integers(0, 256, rows * (-(-count * bits // 8))), np.uint8) if d.draw.integers(2) else ""
    bias = d.constant(d.draw.normal(size=rows)) if d.draw.integers(2) else ""
    sizes = {"K": terms, "N": rows, "bits": bits, "block_size": size}
    d.op("MatMulNBits", [d.floats(2, 3, terms), weight, scale, zeros, "", bias], **sizes)
    d.step = 1e-4


def attention(d: Drawn) -> None:
    d.kind = np.uint8  # as ONNX Runtime takes it
    a, many = d.rounded(2, 4, 6), bool(d.draw.integers(2))
    scale = d.draw.uniform(0.01, 0.02, (24,) if many else ())
    weight, w_scale = d.constant(d.draw.integers(-60, 60, (6, 24)), np.int8), d.constant(scale)
    zero, bias = d.constant(np.zeros_like(scale), np.int8), d.constant(d.draw.normal(size=24))
    d.op(
        "QAttention",
        [a[0], weight, bias, a[1], w_scale, "", a[2], zero],
        num_heads=2,
        unidirectional=int(d.draw.integers(2)),
    )
    d.step = 1e-4


def rounding(d: Drawn) -> None:
    y = d.scale()
    d.op("QuantizeLinear", [d.floats(3, 4), *y], y)


def fused(d: Drawn) -> None:
    activation, params = [("Relu", []), ("LeakyRelu", [0.3]), ("Clip", [-0.2, 0.4]), ("Tanh", []), ("", [])][
        d.draw.integers(5)
    ]
    told = ({"activation": activation} if activation else {}) | ({"activation_params": params} if params else {})
    weight, bias = d.constant(d.draw.normal(size=(4, 3, 3, 3)) / 5), d.constant(d.draw.normal(size=4))
    added = [d.floats(2, 4, 6, 5)] if d.draw.integers(2) else []
    d.op("FusedConv", [d.floats(2, 3, 6, 5), weight, bias, *added], pads=[1, 1, 1, 1], **told)


DRAWS: list[Callable[[Drawn], None]] = [
    *(binary, unary, softmax, pool, global_pool, concat, where, gemm, dynamic_product, product, blocks, attention),
    *(rounding, fused),
]


@pytest.mark.parametrize("draw", DRAWS)
def test_gives_what_onnx_runtime_gives(draw: Callable[[Drawn], None]) -> None:
    """A number between two steps may be rounded to either; nearly all are equal."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    apart = []
    for seed in range(pick(2, 3, 6)):
        drawn = Drawn(np.random.default_rng(seed))
        draw(drawn)
        proto = drawn.model()
        session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
        (expected,) = session.run(None, drawn.inputs)
        found = fp.compile(from_onnx(proto), target="numpy").bind().step(drawn.inputs).outputs["y"]
        assert found.shape == expected.shape
        apart.append(np.abs(found - expected).reshape(-1) / drawn.step)
    every = np.concatenate(apart)
    assert every.max() <= 1 and np.mean(every > 0.5) < 0.02


def test_channels_last_and_unknown_activations_are_refused() -> None:
    drawn = Drawn(np.random.default_rng(0))
    y = drawn.scale()
    drawn.op("QLinearGlobalAveragePool", [*drawn.rounded(2, 5, 5, 3), *y], y, channels_last=1)
    with pytest.raises(UnsupportedError, match=r"node 'it' \(QLinearGlobalAveragePool\).*channels_last"):
        from_onnx(drawn.model())
    drawn = Drawn(np.random.default_rng(0))
    drawn.op("FusedConv", [drawn.floats(1, 1, 3, 3), drawn.constant(np.ones((1, 1, 1, 1)))], activation="Odd")
    with pytest.raises(UnsupportedError, match="it fuses the activation 'Odd'"):
        from_onnx(drawn.model())


def test_scales_are_not_trained() -> None:
    drawn = Drawn(np.random.default_rng(1))
    drawn.nodes.append(helper.make_node("MatMul", [drawn.floats(2, 3), drawn.constant(np.ones((3, 4)))], ["a"]))
    scale, y = drawn.scale(), drawn.scale()
    drawn.nodes.append(helper.make_node("QuantizeLinear", ["a", *scale], ["q"]))
    drawn.op("QLinearAdd", ["q", *scale, "q", *scale, *y], y)
    assert [value.name for value in from_onnx(drawn.model()).parameters] == ["c0"]
