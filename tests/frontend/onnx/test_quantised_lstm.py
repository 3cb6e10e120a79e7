"""com.microsoft.DynamicQuantizeLSTM beside ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import foreplan as fp
from foreplan.base.errors import UnsupportedError
from foreplan.frontend import from_onnx
from tests.frontend.onnx.models import info, kinds
from tests.oracle.peers import onnxruntime
from tests.profile import pick

STEP = 1 / 255  # of a rounded number in −1 to 1, as states are


def quantised(weight: np.ndarray, columns: bool, signed: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Integers of seven bits, scales and zero points: with eight, sums of 16 bits overflow on some processors."""
    axes, ways = ((1,) if columns else (1, 2)), len(weight)
    if signed:
        scale, zero = np.abs(weight).max(axes) / 63, np.zeros(weight.shape[:1] + weight.shape[2:][: len(axes) % 2])
    else:
        scale = (weight.max(axes) - weight.min(axes)) / 127
        zero = np.round(-weight.min(axes) / scale)
    kind = np.int8 if signed else np.uint8
    whole = np.round(weight / scale.reshape(ways, 1, -1)) + zero.reshape(ways, 1, -1)
    return (
        np.clip(whole, -64 if signed else 0, 63 if signed else 127).astype(kind),
        scale.astype(np.float32),
        zero.astype(kind),
    )


def layer(seed: int, **attributes: Any) -> tuple[onnx.ModelProto, onnx.ModelProto, np.ndarray]:
    """A drawn layer behind a product, the same of real numbers, and its input."""
    draw = np.random.default_rng(seed)
    steps, items, wide, hidden = (int(draw.integers(1, n)) for n in (6, 5, 300 if seed % 4 == 3 else 9, 7))
    direction = str(draw.choice(["forward", "reverse", "bidirectional"]))
    ways, signed = 1 + (direction == "bidirectional"), bool(draw.integers(2))
    columns = signed and bool(draw.integers(2))  # ONNX Runtime takes one zero point only
    held = {"before": draw.normal(size=(wide, wide)) / np.sqrt(wide), "b": draw.normal(size=(ways, 8 * hidden)) * 0.3}
    real = {"w": draw.normal(size=(ways, wide, 4 * hidden)), "r": draw.normal(size=(ways, hidden, 4 * hidden))}
    given = ["x", "w", "r", "b", *[""] * 4, "w_scale", "w_zero", "r_scale", "r_zero"]
    if draw.integers(2):
        held |= {name: draw.normal(size=(ways, items, hidden)) * 0.5 for name in ("h", "c")}
        given[5:7] = "h", "c"
    if draw.integers(2):
        held["p"], given[7] = draw.normal(size=(ways, 3 * hidden)) * 0.3, "p"
    if items == 1 and draw.integers(2):
        given[4] = "lengths"
    tensors = [numpy_helper.from_array(array.astype(np.float32), name) for name, array in held.items()]
    tensors.append(numpy_helper.from_array(np.array([max(1, steps - 1)], np.int32), "lengths"))
    float_tensors = list(tensors)
    for name, weight in real.items():
        parts = quantised(weight / np.sqrt(weight.shape[1]), columns, signed)
        tensors += [numpy_helper.from_array(part, name + end) for part, end in zip(parts, ("", "_scale", "_zero"))]
        whole, scale, zero = (
            part.astype(np.float32).reshape(ways, 1, -1) if i else part for i, part in enumerate(parts)
        )
        number = ((whole.astype(np.float32) - zero) * scale).transpose(0, 2, 1)
        float_tensors.append(numpy_helper.from_array(np.ascontiguousarray(number), name))
    models = []
    for op, domain, reads, initializers in (
        ("DynamicQuantizeLSTM", "com.microsoft", given, tensors),
        ("LSTM", "", given[:8], float_tensors),
    ):
        nodes = [
            helper.make_node("MatMul", ["input", "before"], ["x"], "product"),
            helper.make_node(
                op,
                reads,
                ["y", "h_last", "c_last"],
                "layer",
                domain=domain,
                hidden_size=hidden,
                direction=direction,
                **attributes,
            ),
        ]
        outputs = [onnx.ValueInfoProto(name=name) for name in ("y", "h_last", "c_last")]
        for output in outputs:
            output.type.tensor_type.elem_type = TensorProto.FLOAT
        used = {name for node in nodes for name in node.input}
        graph = helper.make_graph(
            nodes,
            "g",
            [info("input", (steps, items, wide))],
            outputs,
            [each for each in initializers if each.name in used],
        )
        imports = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
        models.append(helper.make_model(graph, opset_imports=imports, ir_version=8))
    return models[0], models[1], draw.normal(size=(steps, items, wide)).astype(np.float32) * 2


def by_one_thread(proto: onnx.ModelProto, x: np.ndarray) -> list[np.ndarray]:
    """With more threads ONNX Runtime rounds parts of the batch apart."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return list(session.run(None, {"input": x}))


@pytest.mark.parametrize("target", ["numpy", "cpu"])
def test_drawn_layers_give_what_onnxruntime_does(target: str) -> None:
    """But for a number between two integers, which may be rounded to either: it changes what follows by one step."""
    apart, rounding = [], []
    for seed in range(pick(2, 4, 10)):
        attributes = {"clip": 0.7, "input_forget": 1} if seed % 5 == 4 else {}
        proto, real, x = layer(seed, **attributes)
        expected, exact = by_one_thread(proto, x), by_one_thread(real, x)
        outputs = fp.compile(from_onnx(proto), target=target).bind().step({"input": x}).outputs
        for name, wanted, unrounded in zip(("y", "h_last", "c_last"), expected, exact):
            apart.append(np.abs(outputs[name] - wanted).max())
            rounding.append(np.abs(wanted - unrounded).max())
    assert max(apart) < 4 * STEP and np.median(apart) < 1e-6 < np.median(rounding) / 100


def test_gradients_pass_the_rounding_straight_through() -> None:
    """They are near those of the layer of real numbers; what is rounded is not trained, and no scale is."""
    alike = []
    for seed in range(pick(1, 2, 4)):
        changes = []
        for proto in layer(seed)[:2]:
            graph, x = from_onnx(proto), layer(seed)[2]
            assert not {name for name, kind in kinds(graph).items() if kind.value == "parameter"} & {
                "w_scale",
                "r_scale",
            }
            session = fp.compile(graph, fp.losses.mse, fp.optim.SGD(1.0), target="numpy", train=["before"]).bind()
            before = session.parameters["before"].copy()
            session.step({"input": x, "target": np.ones(graph.outputs["y"].shape, np.float32)})
            changes.append(session.parameters["before"] - before)
        one, other = (change.reshape(-1) for change in changes)
        alike.append(one @ other / np.sqrt((one @ one) * (other @ other)))
    assert min(alike) > 0.99


def test_items_of_several_lengths_are_refused() -> None:
    draw = next(seed for seed in range(50) if layer(seed)[0].graph.input[0].type.tensor_type.shape.dim[1].dim_value > 1)
    proto, _, x = layer(draw)
    proto.graph.node[1].input[4] = "many"
    proto.graph.initializer.append(numpy_helper.from_array(np.arange(1, x.shape[1] + 1, dtype=np.int32), "many"))
    with pytest.raises(UnsupportedError, match=r"node 'layer' \(DynamicQuantizeLSTM\).*several lengths"):
        from_onnx(proto)
