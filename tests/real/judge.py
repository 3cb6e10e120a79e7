"""What ONNX Runtime gives for a real model, and how far another program may be from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from tests.oracle.peers import onnx, onnxruntime
from tests.real.catalogue import Model

DRAWS = 2
ULPS = 2.0**-20  # relative: eight units in the last place, which functions such as exp and tanh may be off by
# Approximations of these are off by a share of 1, and not of their result; so are means and parts of those.
_BOUNDED = ("Sigmoid", "Softmax")
_KEEP = ("Identity", "Reshape", "Squeeze", "Unsqueeze", "Transpose", "Slice", "Gather", "ReduceMean", "Concat")


@dataclass(frozen=True)
class Judged:
    """What a model gives.

    Attributes:
        outputs: by name.
        tolerances: largest difference of an element, by name.
    """

    outputs: dict[str, np.ndarray]
    tolerances: dict[str, float]

    def differences(self, found: dict[str, np.ndarray]) -> dict[str, str]:
        """Outputs that are wrong, with how they are."""
        wrong = {}
        for name, wanted in self.outputs.items():
            if (found[name].shape, found[name].dtype) != (wanted.shape, wanted.dtype):
                wrong[name] = f"{found[name].dtype}{found[name].shape}, not {wanted.dtype}{wanted.shape}"
            elif not (off := _distance(found[name], wanted)) <= self.tolerances[name]:
                wrong[name] = f"off by {off:.3g}, and may be by {self.tolerances[name]:.3g}"
        return wrong


@lru_cache(maxsize=1)
def judged(model: Model) -> Judged:
    """What the file of the list gives."""
    found = judge(onnx.load(str(model.path)), model.feeds())
    for name, array in found.outputs.items():
        extent = float(np.ptp(array)) or float(np.abs(array).max()) if array.dtype.kind == "f" else np.inf
        assert found.tolerances[name] < extent / 100, f"rounding moves {name} so far that it tells nothing"
    return found


def judge(proto: Any, feeds: dict[str, np.ndarray]) -> Judged:
    """What ONNX Runtime gives for a model as it is: without its rewritings.

    A sum of k products in float32 is the exact one of factors that are changed by about sqrt(k) units of rounding
    (Higham and Mary, "A new approach to probabilistic rounding error analysis", SIAM J. Sci. Comput. 41(5), 2019).
    So the weights and inputs are changed by a unit in the last place, up or down by chance. How far this moves an
    output, times sqrt(k) of the longest sum, is how far rounding moves it: of each of two programs.
    """
    wanted = _run(proto, feeds)
    moved = dict.fromkeys(wanted, 0.0)
    rng = np.random.default_rng(0)
    for _ in range(DRAWS):
        other = onnx.ModelProto()
        other.CopyFrom(proto)
        for tensor in _tensors(other.graph):
            tensor.CopyFrom(onnx.numpy_helper.from_array(_shaken(onnx.numpy_helper.to_array(tensor), rng), tensor.name))
        for name, found in _run(other, {name: _shaken(array, rng) for name, array in feeds.items()}).items():
            moved[name] = max(moved[name], _distance(found, wanted[name]))
    longest = max(_sums(proto.graph), default=1)
    bounded = _bounded(proto.graph)
    tolerances = {}
    for name, array in wanted.items():
        largest = float(np.abs(array[np.isfinite(array)]).max(initial=0.0)) if array.dtype.kind == "f" else 0.0
        tolerances[name] = 2 * longest**0.5 * moved[name] + ULPS * max(largest, name in bounded)
    return Judged(wanted, tolerances)


def _run(proto: Any, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The outputs, by name."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]
    found = session.run(None, {name: array for name, array in feeds.items() if name in names})
    return dict(zip([each.name for each in session.get_outputs()], found))


def _distance(a: np.ndarray, b: np.ndarray) -> float:
    """The largest difference of two elements; nan where one is finite and the other is not."""
    if b.dtype.kind != "f":
        return float(np.count_nonzero(a != b))
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    return float(np.abs(np.where(same, 0, a.astype(np.float64) - b)).max(initial=0.0))


def _shaken(array: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The number above or below each, but for those that are exact: alone, as exponents and bounds, or all whole."""
    if array.dtype.kind != "f" or array.size < 2 or (array == np.round(array)).all():
        return array
    beyond = np.where(rng.random(array.shape) < 0.5, np.inf, -np.inf).astype(array.dtype)
    return np.nextafter(array, beyond)


def _bounded(graph: Any, around: frozenset[str] = frozenset()) -> set[str]:
    """What lies between 0 and 1; in a branch, of what is around it too."""
    found = set(around)
    for node in graph.node:
        if node.op_type in _BOUNDED or (node.op_type in _KEEP and node.input and node.input[0] in found):
            found |= set(node.output)
        for branch in (each.g for each in node.attribute if each.type == onnx.AttributeProto.GRAPH):
            within = _bounded(branch, frozenset(found))
            found |= {name for name, result in zip(node.output, branch.output) if result.name in within}
    return found


def _tensors(graph: Any) -> Iterator[Any]:
    """All that are held, in branches too."""
    yield from graph.initializer
    for node in graph.node:
        for each in node.attribute:
            if each.type == onnx.AttributeProto.GRAPH:
                yield from _tensors(each.g)
            elif node.op_type == "Constant" and each.name == "value":
                yield each.t


def _sums(graph: Any) -> Iterator[int]:
    """How many products the sums of convolutions, matrix products and recurrent layers have."""
    shapes = {tensor.name: tuple(tensor.dims) for tensor in _tensors(graph)}
    for tensor in (node for node in graph.node if node.op_type == "Constant"):
        shapes[tensor.output[0]] = next((tuple(each.t.dims) for each in tensor.attribute if each.name == "value"), ())
    for node in graph.node:
        shape = next((shapes[name] for name in node.input if len(shapes.get(name, ())) > 1), ())
        if shape:
            yield int(np.prod(shape[1:])) if node.op_type.startswith("Conv") else max(shape[-2:])
