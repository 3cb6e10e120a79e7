"""An ONNX model that grows a node at a time; ONNX's shape inference must find the shape of every output."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

FLOAT, INT32, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT32, TensorProto.INT64, TensorProto.BOOL


@dataclass(frozen=True)
class Tensor:
    """One tensor of the model: its name, element type, shape, and whether every engine has the same bits of it."""

    name: str
    dtype: int
    shape: tuple[int, ...]
    exact: bool = True


class Drawing:
    """A model that grows a node at a time.

    Attributes:
        rng: what decides.
        opset: of the default domain.
        numbers: what draws the content of constants.
    """

    def __init__(self, rng: random.Random, opset: int) -> None:
        self.rng, self.opset = rng, opset
        self.tensors: list[Tensor] = []
        self.inputs: list[Tensor] = []
        self.constants: dict[str, np.ndarray] = {}
        self.nodes: list[onnx.NodeProto] = []
        self.numbers = np.random.default_rng(rng.getrandbits(32))

    def fresh(self, prefix: str) -> str:
        return f"{prefix}{len(self.nodes)}_{len(self.constants)}_{len(self.tensors)}"

    def shape(self, least: int = 0, most: int = 4) -> tuple[int, ...]:
        rank = self.rng.randint(least, most)
        return tuple(0 if self.rng.random() < 0.01 else self.rng.choice((1, 1, 2, 3, 4, 5, 7)) for _ in range(rank))

    def input(self, shape: Sequence[int], dtype: int = FLOAT) -> Tensor:
        made = Tensor(self.fresh("x"), dtype, tuple(shape))
        self.inputs.append(made)
        self.tensors.append(made)
        return made

    def constant(self, content: Any, dtype: type = np.int64) -> str:
        name = self.fresh("c")
        self.constants[name] = np.asarray(content, dtype)
        return name

    def weight(self, *shape: int) -> str:
        """Numbers as a constant, or now and then as a further input."""
        if self.rng.random() < 0.2:
            return self.input(shape).name
        return self.constant(self.numbers.standard_normal(shape), np.float32)

    def floats(self, least: int = 0, most: int = 5, exact: bool = False) -> Tensor:
        fit = [t for t in self.tensors if t.dtype == FLOAT and least <= len(t.shape) <= most and (t.exact or not exact)]
        return (
            self.rng.choice(fit[-3:])
            if fit and self.rng.random() < 0.8
            else self.input(self.shape(least, min(most, 4)))
        )

    def axis(self, rank: int) -> int:
        axis = self.rng.randrange(rank)
        return axis - rank if self.opset >= 11 and self.rng.random() < 0.3 else axis

    def add(self, op: str, inputs: Sequence[str], outputs: int = 1, exact: bool = False, **attributes: Any) -> None:
        """A node, if ONNX knows what it gives."""
        names = [self.fresh(f"t{i}_") for i in range(outputs)]
        node = helper.make_node(op, inputs, names, **attributes)
        types = self._infer(node)
        if any(name not in types for name in names):
            return
        self.nodes.append(node)
        known = {t.name: t for t in self.tensors}
        exact = exact and all(name not in known or known[name].exact for name in inputs)
        self.tensors += [Tensor(name, *types[name], exact) for name in names]

    def _infer(self, node: onnx.NodeProto) -> dict[str, tuple[int, tuple[int, ...]]]:
        known = {t.name: t for t in self.tensors}
        infos = [
            helper.make_tensor_value_info(name, known[name].dtype, known[name].shape)
            for name in dict.fromkeys(node.input)
            if name in known
        ]
        held = [numpy_helper.from_array(self.constants[name], name) for name in set(node.input) & set(self.constants)]
        outputs = [onnx.ValueInfoProto(name=name) for name in node.output]
        graph = helper.make_graph([node], "one", infos, outputs, held)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)])
        found = {}
        for value in onnx.shape_inference.infer_shapes(model, data_prop=True).graph.output:
            tensor = value.type.tensor_type
            if tensor.HasField("shape") and all(dim.HasField("dim_value") for dim in tensor.shape.dim):
                shape = tuple(dim.dim_value for dim in tensor.shape.dim)
                if np.prod(shape, dtype=object) <= 1 << 16 and min(shape, default=0) >= 0:
                    found[value.name] = tensor.elem_type, shape
        return found

    def model(self) -> onnx.ModelProto:
        """What was drawn; every tensor that nobody reads is an output."""
        read = {name for node in self.nodes for name in _reads(node)}
        made = [t for t in self.tensors if t not in self.inputs and t.name not in read]
        graph = helper.make_graph(
            self.nodes,
            "drawn",
            [helper.make_tensor_value_info(t.name, t.dtype, t.shape) for t in self.inputs if t.name in read],
            [helper.make_tensor_value_info(t.name, t.dtype, t.shape) for t in made],
            [numpy_helper.from_array(array, name) for name, array in self.constants.items() if name in read],
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=8)


def _reads(node: onnx.NodeProto) -> Iterator[str]:
    """Names that a node or its branches read, names within these among them."""
    yield from node.input
    for attribute in node.attribute:
        for inner in attribute.g.node:
            yield from _reads(inner)
