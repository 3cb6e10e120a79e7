"""ONNX's own cases: models with their inputs and expected outputs, as the onnx package ships them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper
from onnx.backend.test.loader import load_model_tests

KINDS = ("node", "simple", "pytorch-converted", "pytorch-operator")  # "real" needs downloads


@dataclass(frozen=True)
class Case:
    """One model and what it is to give.

    Attributes:
        data_sets: (inputs, expected outputs), each in the graph's order; None for what is no tensor of numbers.
        rtol, atol: of its outputs.
    """

    name: str
    model: onnx.ModelProto
    data_sets: Sequence[tuple[list[np.ndarray | None], list[np.ndarray | None]]]
    rtol: float
    atol: float


@cache
def cases(kind: str) -> tuple[Case, ...]:
    """All of a kind, in the order of their names."""
    with np.errstate(all="ignore"):  # some expected outputs are computed here
        found = sorted(load_model_tests(kind=kind), key=lambda case: case.name)
    return tuple(_case(case) for case in found)


def _case(case: object) -> Case:
    name, rtol, atol = case.name, case.rtol, case.atol  # type: ignore[attr-defined]
    if case.model is not None:  # type: ignore[attr-defined]
        sets = [tuple(list(map(_array, side)) for side in both) for both in case.data_sets]  # type: ignore[attr-defined]
        return Case(name, case.model, sets, rtol, atol)  # type: ignore[attr-defined, arg-type]
    folder = Path(case.model_dir)  # type: ignore[attr-defined]
    model = onnx.load(folder / "model.onnx")
    stored = sorted(folder.glob("test_data_set_*"))
    read = [(_files(at, "input", model.graph.input), _files(at, "output", model.graph.output)) for at in stored]
    return Case(name, model, read, rtol, atol)


def _files(folder: Path, side: str, infos: Sequence[onnx.ValueInfoProto]) -> list[np.ndarray | None]:
    count = len(list(folder.glob(f"{side}_*.pb")))
    return [
        _array(onnx.load_tensor(folder / f"{side}_{i}.pb")) if info.type.HasField("tensor_type") else None
        for i, info in enumerate(infos[:count])
    ]


def _array(item: object) -> np.ndarray | None:
    """A tensor of numbers; None for sequences, maps, texts and nothing."""
    if isinstance(item, onnx.TensorProto):
        item = numpy_helper.to_array(item)
    array = None if item is None or isinstance(item, list | dict) else np.asarray(item)
    return None if array is None or array.dtype.kind in "OSU" else array


def forms(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> Iterator[onnx.ModelProto]:
    """The model as it is, then with more and more of its inputs known: shapes, axes and bounds must be."""
    yield model
    later = list(feeds)[1:]
    integers = {name for name in feeds if feeds[name].dtype.kind in "iub"}
    small = {name for name in later if feeds[name].size <= 8}
    tried: list[set[str]] = [set()]
    for names in (integers & set(later), (integers & set(later)) | small, integers, integers | small):
        if names not in tried:
            tried.append(names)
            yield _with_constants(model, feeds, names)


def _with_constants(model: onnx.ModelProto, feeds: dict[str, np.ndarray], names: set[str]) -> onnx.ModelProto:
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    changed.ir_version = max(4, model.ir_version)  # before, initializers had to be inputs
    left = [value for value in model.graph.input if value.name not in names]
    del changed.graph.input[:]
    changed.graph.input.extend(left)
    changed.graph.initializer.extend(numpy_helper.from_array(feeds[name], name) for name in sorted(names))
    return changed
