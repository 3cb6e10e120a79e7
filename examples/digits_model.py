"""A small convolutional network for 8×8 digits, written as an ONNX file the way an exporter would."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


def write_digits_model(path: Path, seed: int = 0) -> None:
    """Two 3×3 convolutions with batch norm and ReLU, max-pool, and a linear layer to ten classes; He initialisation."""
    rng = np.random.default_rng(seed)
    weights: dict[str, np.ndarray] = {}
    nodes = []
    channels, current = 1, "image"
    for i, features in enumerate((16, 32), 1):
        fan_in = channels * 9
        weights[f"conv{i}.weight"] = rng.normal(0, np.sqrt(2 / fan_in), (features, channels, 3, 3))
        weights[f"bn{i}.weight"], weights[f"bn{i}.bias"] = np.ones(features), np.zeros(features)
        weights[f"bn{i}.mean"], weights[f"bn{i}.var"] = np.zeros(features), np.ones(features)
        nodes += [
            helper.make_node("Conv", [current, f"conv{i}.weight"], [f"conv{i}"], f"conv{i}", pads=[1, 1, 1, 1]),
            helper.make_node(
                "BatchNormalization",
                [f"conv{i}", *(f"bn{i}.{part}" for part in ("weight", "bias", "mean", "var"))],
                [f"bn{i}"],
                f"bn{i}",
            ),
            helper.make_node("Relu", [f"bn{i}"], [f"relu{i}"], f"relu{i}"),
        ]
        channels, current = features, f"relu{i}"
    weights["fc.weight"] = rng.normal(0, np.sqrt(1 / (channels * 16)), (10, channels * 16))
    weights["fc.bias"] = np.zeros(10)
    nodes += [
        helper.make_node("MaxPool", [current], ["pool"], "pool", kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Flatten", ["pool"], ["flat"], "flatten"),
        helper.make_node("Gemm", ["flat", "fc.weight", "fc.bias"], ["logits"], "fc", transB=1),
    ]
    graph = helper.make_graph(
        nodes,
        "digits",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 1, 8, 8])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 10])],
        [numpy_helper.from_array(array.astype(np.float32), name) for name, array in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    onnx.checker.check_model(model)
    onnx.save(model, path)
