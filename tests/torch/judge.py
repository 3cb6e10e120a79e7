"""What foreplan makes of an exported file, beside the module that it was exported from."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import numpy_helper

import foreplan as fp
from foreplan.base.errors import ForeplanError
from tests.torch import exports
from tests.torch.exports import Example, export
from tests.torch.report import LIMIT

# The usual form is run by two engines: what the second one compiles takes longer than all else.
TARGETS = {"dynamo": ("numpy", "cpu")}
OPTIMIZED = ("dynamo", "torchscript")  # the forms whose exporters merge tensors that are equal
FOLDED = "pkg.onnxscript.optimizer.folded_from"
KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
Arrays = dict[str, np.ndarray]


@dataclass
class Verdict:
    """What was found of one module in one form.

    Attributes:
        exporter: why there is no file; empty: there is one.
        refused: why there is no graph; empty: there is one.
        mode: of the module whose outputs the file gives: "eval", "train" or "both"; "neither" where it is wrong.
        forward: target → error of the outputs, or a message.
        exporter_forward: the same of ONNX Runtime, where it is wrong: whether the file is so already; None: it refuses.
        batch_norm: whether the file has batch normalisations, which a training step computes by the batch.
        gradient: target → largest error of a gradient that is within the limit, or a message.
        gradients_off: parameter → error, of those beyond the limit.
        right: parameters trained by both, as far as the file holds them: an exporter cuts off what is never read.
        missed: trained by PyTorch; a constant here.
        wrong: trained here; a buffer or a constant of the module.
        frozen: parameters with `requires_grad=False`, trained here; the file does not say it.
        folded: parameters of which the file holds no element: the exporter computed with them.
        partly_folded: parameters that the file holds beside a tensor that the exporter computed from them, so that the
            gradient is another one.
        derived: trained here, computed by the exporter from parameters.
        derived_missed: computed by the exporter from parameters; a constant here.
        split: parameters of which the exporter made two, each trained by itself: of a tied one, a transposed copy.
        fresh_lost: of `right` and `derived`, how many fewer tensors are trained in the file of a module whose contents
            are PyTorch's first ones: the exporter merges equal tensors, and leaves out zeros that are added.
        kinds: what the file says of its tensors of floats → how many. PARAMETER, BUFFER or CONSTANT_TENSOR; "folded"
            where it names what a tensor was computed from; "unsaid".
        says: of the tensors that are missed or wrong here: name → what the file says, where it says something.
    """

    exporter: str = ""
    refused: str = ""
    mode: str = ""
    forward: dict[str, float | str] = field(default_factory=dict)
    exporter_forward: float | None = None
    batch_norm: bool = False
    gradient: dict[str, float | str] = field(default_factory=dict)
    gradients_off: dict[str, float] = field(default_factory=dict)
    right: int = 0
    missed: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    frozen: list[str] = field(default_factory=list)
    folded: list[str] = field(default_factory=list)
    partly_folded: list[str] = field(default_factory=list)
    derived: list[str] = field(default_factory=list)
    derived_missed: list[str] = field(default_factory=list)
    split: list[str] = field(default_factory=list)
    fresh_lost: int = 0
    kinds: dict[str, int] = field(default_factory=dict)
    says: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Without what is empty."""
        return {key: value for key, value in asdict(self).items() if value or key == "right"}


class Elements:
    """The module's parameters as one vector, and which of its elements a tensor consists of."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.parameters = dict(module.named_parameters())
        parts = [parameter.detach().numpy().ravel() for parameter in self.parameters.values()]
        ends = np.cumsum([0, *(len(part) for part in parts)])
        self.places = {name: slice(a, b) for name, a, b in zip(self.parameters, ends[:-1], ends[1:])}
        numbers = np.concatenate(parts)
        self.count, self.order = len(numbers), np.argsort(numbers)
        self.sorted = numbers[self.order]

    def find(self, array: np.ndarray) -> np.ndarray | None:
        """The place of each element, -1 for a zero; None where a number is of no parameter, or all are zeros."""
        if array.dtype != np.float32 or not array.size or not array.any():
            return None
        at = np.searchsorted(self.sorted, array.ravel()).clip(max=self.count - 1)
        found = np.where(array.ravel() == 0, -1, self.order[at])
        known = (self.sorted[at] == array.ravel()) | (found < 0)
        return found if known.all() else None

    def owners(self, found: np.ndarray) -> list[str]:
        """The parameters of these elements."""
        return [name for name, place in self.places.items() if ((found >= place.start) & (found < place.stop)).any()]


def floats(path: Path) -> Arrays:
    """The tensors of floats that a file holds, by name."""
    graph = onnx.load(path).graph
    held = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        for attribute in node.attribute:
            if node.op_type == "Constant" and attribute.name == "value":
                held[node.output[0]] = attribute.t
    arrays = {name: numpy_helper.to_array(tensor) for name, tensor in held.items()}
    return {name: array for name, array in arrays.items() if array.dtype.kind == "f"}


def judge(example: Example, form: str, folder: Path) -> Verdict:
    """Export, import, run and compare."""
    path, verdict, targets = folder / "model.onnx", Verdict(), TARGETS.get(form, ("numpy",))
    verdict.exporter = export(example, form, path)
    if verdict.exporter:
        return verdict
    said = _read(path, verdict)
    references = {mode: _reference(example.copy(mode == "train"), example)[0] for mode in ("eval", "train")}
    feeds = _feeds(example, path)
    try:
        graph = fp.from_onnx(path)
    except ForeplanError as error:
        verdict.refused = _line(error)
        return verdict
    for target in targets:
        _guarded(verdict.forward, target, lambda target=target: _forward(verdict, graph, target, feeds, references))
    _judge_roles(verdict, graph, example, form, folder)
    disputed = {*verdict.missed, *verdict.wrong, *verdict.derived_missed}
    verdict.says = {name: text for name, text in said.items() if name in disputed}
    if verdict.mode == "neither":
        verdict.exporter_forward = _by_onnxruntime(path, feeds, references)
    fresh = folder / "fresh.onnx"
    if form in OPTIMIZED and not export(exports.example(example.name, fresh=True), form, fresh):
        verdict.fresh_lost = len(graph.parameters) - len(fp.from_onnx(fresh).parameters)
    _, wanted, cotangents = _reference(_as_trained(verdict, example), example)
    for target in targets:
        run = lambda target=target: _gradients(verdict, graph, target, example, feeds, wanted, cotangents)  # noqa: E731
        _guarded(verdict.gradient, target, run)
    _tell_folded_apart(verdict, example, form, folder)
    return verdict


def _read(path: Path, verdict: Verdict) -> dict[str, str]:
    """Into the verdict what the file says itself; returns what it says of a tensor, by name."""
    graph = onnx.load(path, load_external_data=False).graph
    verdict.batch_norm = any(node.op_type == "BatchNormalization" for node in graph.node)
    said = {
        info.name: prop.value if prop.key == KIND else f"folded from {prop.value}"
        for info in graph.value_info
        for prop in info.metadata_props
        if prop.key in (KIND, FOLDED)
    }
    for tensor in graph.initializer:
        if tensor.data_type == tensor.FLOAT:
            kind = said.get(tensor.name, "unsaid").partition(" ")[0]
            verdict.kinds[kind] = verdict.kinds.get(kind, 0) + 1
    return said


def _as_trained(verdict: Verdict, example: Example) -> torch.nn.Module:
    """The module as a training step of the file computes it: a normalisation that the exporter folded into the weights
    before it stays as in inference, and all others take the statistics of the batch.
    """
    module = example.copy(verdict.batch_norm or verdict.mode == "train")
    for name, part in module.named_modules():
        if f"{name}.weight" in verdict.folded and hasattr(part, "running_var"):
            part.eval()
    return module


def _reference(module: torch.nn.Module, example: Example) -> tuple[list[np.ndarray], Arrays, list[np.ndarray]]:
    """PyTorch's outputs, its gradients of the sum of outputs times fixed random numbers, and these numbers."""
    result = module(*example.inputs)
    outputs = list(result) if isinstance(result, tuple) else [result]
    rng = np.random.default_rng(0)
    cotangents = [rng.standard_normal(tuple(output.shape), np.float32) for output in outputs]
    total = sum((output * torch.from_numpy(c)).sum() for output, c in zip(outputs, cotangents))
    total.backward()
    gradients = {name: p.grad.numpy() for name, p in module.named_parameters() if p.grad is not None}
    return [output.detach().numpy() for output in outputs], gradients, cotangents


def _feeds(example: Example, path: Path) -> Arrays:
    graph = onnx.load(path, load_external_data=False).graph
    names = [value.name for value in graph.input]
    assert len(names) == len(example.inputs), f"{example.name}: the file has the inputs {names}"
    return {name: tensor.numpy() for name, tensor in zip(names, example.inputs)}


def error_of(found: np.ndarray, wanted: np.ndarray, least: float = 1e-30) -> float:
    """The largest difference, relative to the largest element, or to `least` where all are smaller."""
    if found.shape != wanted.shape:
        return float("inf")
    difference = np.abs(found - wanted).max(initial=0)
    return float(difference / max(np.abs(wanted).max(initial=0), least)) if np.isfinite(difference) else float("inf")


def _nearest(found: list[np.ndarray], references: dict[str, list[np.ndarray]]) -> tuple[float, str]:
    """The error beside the nearer of the modes, and its name."""
    errors = {}
    for mode, wanted in references.items():
        errors[mode] = max(map(error_of, found, wanted)) if len(found) == len(wanted) else float("inf")
    near = [mode for mode, error in errors.items() if error < LIMIT]
    return min(errors.values()), "both" if len(near) == 2 else near[0] if near else "neither"


def _by_onnxruntime(path: Path, feeds: Arrays, references: dict[str, list[np.ndarray]]) -> float | None:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        return _nearest(session.run(None, feeds), references)[0]
    except Exception:  # a file that another engine does not run is judged all the same
        return None


def _forward(
    verdict: Verdict, graph: fp.Graph, target: str, feeds: Arrays, references: dict[str, list[np.ndarray]]
) -> float:
    result = fp.compile(graph, target=target).bind().step(feeds)
    error, mode = _nearest([result.outputs[name] for name in graph.outputs], references)
    verdict.mode = verdict.mode or mode
    return error


def _loss(graph: fp.Graph) -> Callable[..., Any]:
    """The sum of a model's outputs times inputs of the same shapes, for one, two or three outputs."""
    specs = [fp.spec(value.shape) for value in graph.outputs.values()]
    first, second, third = (*specs, specs[0], specs[0])[:3]

    def one(y, cotangent0=first):
        return (y * cotangent0).sum()

    def two(y, z, cotangent0=first, cotangent1=second):
        return (y * cotangent0).sum() + (z * cotangent1).sum()

    def three(x, y, z, cotangent0=first, cotangent1=second, cotangent2=third):
        return (x * cotangent0).sum() + (y * cotangent1).sum() + (z * cotangent2).sum()

    return (one, two, three)[len(specs) - 1]


def _gradients(
    verdict: Verdict,
    graph: fp.Graph,
    target: str,
    example: Example,
    feeds: Arrays,
    wanted: Arrays,
    cotangents: list[np.ndarray],
) -> float:
    """The largest error of a parameter's gradient, added up over the tensors that hold the parameter's elements."""
    session = fp.compile(graph, loss=_loss(graph), optimizer=None, target=target).bind()
    result = session.step(feeds | {f"cotangent{i}": c for i, c in enumerate(cotangents)})
    elements = Elements(example.module)
    total, trained = np.zeros(elements.count, np.float64), np.zeros(elements.count, bool)
    for name, gradient in result.gradients.items():
        places = elements.find(session.parameters[name])
        if places is not None:
            held = places >= 0
            np.add.at(total, places[held], gradient.ravel()[held])
            trained[places[held]] = True
    least = 1e-2 * max((np.abs(each).max(initial=0) for each in wanted.values()), default=1.0)
    errors = {
        name: error_of(total[elements.places[name]], gradient.ravel(), least)
        for name, gradient in wanted.items()
        if trained[elements.places[name]].any() and name not in verdict.missed
    }
    verdict.gradients_off |= {name: error for name, error in errors.items() if not error < LIMIT}
    return max((error for error in errors.values() if error < LIMIT), default=0.0)


def _judge_roles(verdict: Verdict, graph: fp.Graph, example: Example, form: str, folder: Path) -> None:
    """Which tensors are trained, by the elements that they hold."""
    elements = Elements(example.module)
    trained = _contents(graph)
    here = {name: elements.find(array) for name, array in trained.items()}
    file = floats(folder / "model.onnx")
    in_file = {name: elements.find(array) for name, array in file.items()}
    is_trained, is_held = _covered(elements, here.values()), _covered(elements, in_file.values())
    used = _reference(example.copy(True), example)[1]
    for name, place in elements.places.items():
        if not elements.parameters[name].requires_grad:
            verdict.frozen += [name] if is_trained[place].any() else []
        elif name not in used:
            continue
        elif not is_held[place].any():
            verdict.folded.append(name)
        elif is_trained[place][is_held[place]].all():
            verdict.right += 1
        else:
            verdict.missed.append(name)
    held = np.concatenate([np.unique(found[found >= 0]) for found in here.values() if found is not None] or [[]])
    places, counts = np.unique(held, return_counts=True)
    verdict.split = elements.owners(places[counts > 1])
    strange = [name for name, found in here.items() if found is None]
    if not strange and not verdict.folded:
        return
    moved = _moved(example, form, folder) - set(dict(example.module.named_buffers()))
    verdict.derived = [name for name in strange if name in moved]
    verdict.wrong = [name for name in strange if name not in moved]
    verdict.derived_missed = [name for name in sorted(moved) if in_file[name] is None and name not in trained]


def _contents(graph: fp.Graph) -> Arrays:
    """The first content of each trained value."""
    rng = np.random.default_rng(0)
    found = {}
    for value in graph.parameters:
        array = np.empty(value.shape, value.dtype.numpy)
        assert value.init is not None
        value.init.fill(array, rng)
        found[value.name] = array
    return found


def _covered(elements: Elements, found: Iterable[np.ndarray | None]) -> np.ndarray:
    covered = np.zeros(elements.count, bool)
    for places in found:
        if places is not None:
            covered[places[places >= 0]] = True
    return covered


def _moved(example: Example, form: str, folder: Path, only: str = "") -> set[str]:
    """The tensors of the file that are others when the parameters are, or one of them is."""
    if message := export(example.perturbed(only), form, folder / "moved.onnx"):
        raise AssertionError(f"{example.name} is exported once and not twice: {message}")
    file, other = floats(folder / "model.onnx"), floats(folder / "moved.onnx")
    return {name for name, array in file.items() if name in other and not np.array_equal(array, other[name])}


def _tell_folded_apart(verdict: Verdict, example: Example, form: str, folder: Path) -> None:
    """A parameter whose gradient is another because the exporter computed a further tensor from it."""
    computed = {*verdict.derived, *verdict.derived_missed}
    for name in list(verdict.gradients_off) if computed else ():
        if _moved(example, form, folder, name) & computed:
            del verdict.gradients_off[name]
            verdict.partly_folded.append(name)


def _guarded(into: dict[str, float | str], target: str, run: Callable[[], float]) -> None:
    try:
        into[target] = run()
    except Exception as error:  # also what should never escape: it belongs into the table
        into[target] = _line(error)


def _line(error: Exception) -> str:
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message}"[:400]
