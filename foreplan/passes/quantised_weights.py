"""Stored integers that weights are restored from → float32 weights, read through fake quantisation."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from foreplan.graph import Builder, Graph, Kind, Node, TensorType, Value
from foreplan.graph.init import Initializer
from foreplan.graph.types import FLOAT32
from foreplan.ops.evaluate import content, evaluate, is_known
from foreplan.ops.fake_quantised import fake_quantised, range_of
from foreplan.ops.map import convert
from foreplan.ops.marks import Quantised
from foreplan.passes.base import Pass
from foreplan.passes.rewrite import builder_for, rewrite_ops

_MOST_BYTES = 1 << 26  # of scales and zero points


@dataclass(frozen=True, eq=False)
class Scheme:
    """How a stored tensor is quantised.

    Attributes:
        scale, zero: which broadcast to it.
    """

    scale: np.ndarray
    zero: np.ndarray

    def restored(self, codes: np.ndarray) -> np.ndarray:
        """The numbers that integers stand for, in float32."""
        whole = codes.astype(np.float32) - self.zero.astype(np.float32)
        return np.asarray(whole * self.scale.astype(np.float32), np.float32)

    def codes(self, numbers: np.ndarray, type: TensorType) -> np.ndarray:
        """The integers of a type that stand for numbers, as `fake_quantised` rounds them."""
        low, high = range_of(type.dtype)
        whole = np.rint(numbers.astype(np.float32) / self.scale.astype(np.float32)) + self.zero.astype(np.float32)
        return np.clip(whole.astype(np.float64), low, high).astype(type.dtype.numpy).reshape(type.shape)


@dataclass(frozen=True, eq=False)
class Restored:
    """The first content of a float32 weight: what the file's integers stand for."""

    init: Initializer
    type: TensorType
    scheme: Scheme

    def fill(self, out: np.ndarray, rng: np.random.Generator) -> None:
        """Read the integers, and restore the numbers."""
        codes = np.empty(self.type.shape, self.type.dtype.numpy)
        self.init.fill(codes, rng)
        out[...] = self.scheme.restored(codes)

    def __str__(self) -> str:
        bits = zlib.crc32(self.scheme.zero.tobytes(), zlib.crc32(self.scheme.scale.tobytes()))
        return f"restored({self.init}, crc32=0x{bits:08x})"


def schemes(graph: Graph) -> dict[Value, Scheme]:
    """How the stored tensors of a graph are quantised that stand for weights; read in one way only."""
    found: dict[Value, Scheme] = {}
    makers = {made: node for node in graph.nodes for made in node.outputs}
    for node in graph.nodes_of(Quantised):
        _, codes, *beside = node.inputs
        arrays = _known(beside, makers)
        if codes.init is None or arrays is None:
            continue
        zero = arrays[1] if len(arrays) > 1 else np.zeros((), codes.dtype.numpy)
        scheme, other = Scheme(arrays[0], zero), found.get(codes)
        if other is None or all(map(np.array_equal, (scheme.scale, scheme.zero), (other.scale, other.zero))):
            found[codes] = scheme
        else:
            found.pop(codes)
    return found


@dataclass(frozen=True)
class QuantisedWeights(Pass, requires=("forward", "plain ops"), ensures=("forward", "floating-point weights")):
    """The graph with float32 weights in the place of integers that the file quantised weights to.

    What is computed stays what the integers give: a weight is rounded to them in each step (`fake_quantised`), and its
    gradient is that of the rounded number.

    Requires: a forward graph that is about to be differentiated. Ensures: parameters under the names of the integers,
    and a note.
    """

    def _run(self, graph: Graph) -> Graph:
        found = schemes(graph)
        if not found:
            return graph
        wide = {
            codes: replace(codes, type=codes.type.with_dtype(FLOAT32), kind=Kind.PARAMETER,
                           init=Restored(codes.init, codes.type, scheme))  # type: ignore[arg-type]
            for codes, scheme in found.items()
        }  # fmt: skip
        b = builder_for(graph)
        b.stored = [wide.get(value, value) for value in graph.stored]
        now: dict[Value, Value] = {}
        for node in _read(graph, found):
            inputs = tuple(now.get(value, value) for value in node.inputs)
            if node.of(Quantised) and node.inputs[1] in found:
                codes, scale, *zero = node.inputs[1], *inputs[2:]
                b.source, b.scope = node.source, node.name + "/"
                made = fake_quantised(b, wide[codes], scale, zero[0] if zero else None, codes.dtype)
                dtype = node.outputs[0].dtype
                now[node.outputs[0]] = made if made.dtype == dtype else convert(b, made, dtype)
            else:
                b.append(Node(node.op, inputs, node.outputs, node.name, node.source), inferred=True)
        types = " and ".join(sorted({codes.dtype.name for codes in found}))
        b.note(
            f"{len(found)} weights of {types} are trained in float32 and rounded in each step, straight through; a "
            "written model has them in integers again"
        )
        outputs = {name: now.get(value, value) for name, value in graph.outputs.items()}
        updates = {stored: now.get(value, value) for stored, value in graph.updates.items()}
        return b.finish(outputs, updates, graph.loss, graph.gradients)


quantised_weights = QuantisedWeights()


def without_weights(graph: Graph, names: Sequence[str]) -> Graph:
    """The graph whose integers of these names stay as they are: no weights stand for them."""

    def unmarked(b: Builder, node: Node[Quantised], inputs: tuple[Value, ...]) -> Sequence[Value] | None:
        return inputs[:1] if node.inputs[1].name in names else None

    return rewrite_ops(graph, unmarked, Quantised) if names else graph


def _read(graph: Graph, found: Mapping[Value, Scheme]) -> list[Node]:
    """The nodes that are read when weights take the place of integers."""
    read, kept = set(graph.results), []
    for node in reversed(graph.nodes):
        if read.isdisjoint(node.outputs):
            continue
        kept.append(node)
        marked = node.of(Quantised) and node.inputs[1] in found
        read.update(node.inputs[2:] if marked else node.inputs)
    return kept[::-1]


def _known(values: Sequence[Value], makers: Mapping[Value, Node]) -> list[np.ndarray] | None:
    """The contents of values that are computed from constants; None: they are not."""
    known: dict[Value, np.ndarray] = {}
    nodes: list[Node] = []
    left = list(values)
    while left:
        value = left.pop()
        if value in makers:
            if makers[value] not in nodes:
                nodes.append(makers[value])
                left += makers[value].inputs
        elif is_known(value):
            known[value] = content(value)
        else:
            return None
    if not evaluate(reversed(nodes), known, _MOST_BYTES):
        return None
    return [known[value] for value in values]
