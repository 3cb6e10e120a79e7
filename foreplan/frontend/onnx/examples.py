"""What is left to bind of a model, all at once, as a line to paste; its numbers are examples.

The examples are tried: the model is imported with them, which also finds the inputs whose values it needs.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from foreplan.base.errors import ForeplanError, ShapeError, ValueNeededError
from foreplan.base.units import listed
from foreplan.frontend.onnx.importer import Importer
from foreplan.frontend.onnx.load import Model
from foreplan.frontend.onnx.node import FEW
from foreplan.frontend.onnx.shapes import Unbound, bind_shapes
from foreplan.frontend.onnx.symbols import Extent, batch_axes
from foreplan.graph.types import DType, Shape

_MOST_WORK = 1 << 14  # nodes made by all imports that try examples, before the last one
# What a symbol's name tells of its size; the first that fits counts.
_BY_NAME = {
    r"batch|^(n|b|bs)$": 1,
    r"past": 16,
    r"seq|len|token|time|frame|step|word|^(t|s|l)$": 128,
    r"sample|audio|wave|signal": 16000,
    r"height|width|size|image|^(h|w)$": 224,
    r"chan|^c$": 3,
}
# One guess after the other: of an axis whose name tells nothing (None: by its place), and of an input without a shape.
_GUESSES = ((None, (1, 3, 224, 224)), (512, (1, 128)), (64, (1, 16, 64)), (16000, (128,)), (1024, ()), (576, (1, 576)))
_MOVES = ("Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze")
_COMPARES = ("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual")


@dataclass
class Binding:
    """What binds the inputs of a model.

    Attributes:
        shapes, batch, values: as `from_onnx` takes them.
        work: how many nodes were made to try it.
    """

    shapes: dict[str, Shape] = field(default_factory=dict)
    batch: int | None = None
    values: dict[str, Any] = field(default_factory=dict)
    work: int = 0

    @staticmethod
    def of(shapes: Mapping[str, Sequence[int]] | None, batch: int | None, values: Mapping[str, Any] | None) -> Binding:
        """What a user gives."""
        return Binding({name: tuple(shape) for name, shape in (shapes or {}).items()}, batch, dict(values or {}))

    def line(self, known: Mapping[str, Any]) -> str:
        """Arguments of `from_onnx`, and the flags of commands.

        Args:
            known: values that the user has given, who still has them.
        """
        values = {name: value for name, value in self.values.items() if name not in known}
        shapes = {name: shape for name, shape in self.shapes.items() if name not in self.values}
        told = [f"{key}={found!r}" for key, found in (("shapes", shapes), ("values", values)) if found]
        flags = [f"--shapes {shlex.quote(f'{name}:' + 'x'.join(map(str, s)))}" for name, s in shapes.items()]
        flags += [f"--values {shlex.quote(f'{name}={json.dumps(value)}')}" for name, value in values.items()]
        return f"{', '.join(told)} ({' '.join(flags)})"

    def tried(self, model: Model, error: ValueNeededError | None = None) -> bool:
        """Whether a model can be imported so, with values for the inputs that turn out to need some.

        Args:
            model: to import.
            error: what is known to be needed.
        """
        try:
            while error is None or self._give(model, error.inputs):
                bound, importer = bind_shapes(model, self.shapes, self.batch, self.values), Importer(model)
                try:
                    importer.run(bound.types, bound.values)
                    return True
                except ValueNeededError as found:
                    error = found
                finally:
                    self.work += importer.written + len(importer.b.nodes)
        except ForeplanError:
            pass
        return False

    def _give(self, model: Model, inputs: Sequence[str]) -> bool:
        """Give values to inputs, unless they are data, or enough was tried."""
        types = bind_shapes(model, self.shapes, self.batch, self.values).types
        if self.work > _MOST_WORK or not inputs or any(name not in types or types[name].size > FEW for name in inputs):
            return False
        self.values |= {name: _value(model, name, types[name].shape, types[name].dtype) for name in inputs}
        return True


def with_all_shapes(model: Model, error: Unbound, given: Binding) -> ShapeError:
    """The error for open sizes, which says how to bind all inputs at once."""
    best, works, work = None, False, 0
    for size, unranked in _GUESSES:
        shapes = {**given.shapes, **_shapes(error, size, unranked)}
        found = Binding(shapes, given.batch, dict(given.values), work)
        works = found.tried(model)
        best, work = found if works or best is None else best, found.work
        if works or work > _MOST_WORK:
            break
    assert best is not None
    open_inputs = [name for name, extents in error.declared.items() if extents is None or None in error.bound[name]]
    alike: dict[str, list[str]] = {}
    for name in open_inputs:
        alike.setdefault(f"{error.dtypes[name]}{_shown(error.declared[name])}", []).append(repr(name))
    told = ", ".join(f"{listed(names, 4)} {'is' if len(names) == 1 else 'are'} {type}" for type, names in alike.items())
    tail = "; the numbers are examples" + (", with which it can be imported" if works else "")
    axes = batch_axes(error.declared)
    open_batch = any(None in error.bound[name][axes[name] : axes[name] + 1] for name in open_inputs)
    batch = ". Batches alone may be bound with batch= (--batch)" if open_batch else ""
    line = Binding(_fewest(error, best.shapes, given.shapes), None, best.values).line(given.values)
    return ShapeError(f"{error.label}: sizes of inputs are open: {told}; bind them all with {line}{tail}{batch}")


def with_all_values(model: Model, error: ValueNeededError, given: Binding) -> ValueNeededError:
    """The error for inputs whose values are needed, which names all of them at once."""
    found = Binding(given.shapes, given.batch, dict(given.values))
    found.tried(model, error)
    names = tuple(name for name in found.values if name not in given.values)
    if len(names) <= len(error.inputs):
        return error
    line = Binding({}, None, found.values).line(given.values)
    return ValueNeededError(f"{error}; in all it needs {line}, where the numbers are examples", names)


def _shown(extents: Sequence[Extent] | None) -> str:
    if extents is None:
        return " without a shape, not even a number of axes"
    return f"[{', '.join('?' if extent is None else str(extent) for extent in extents)}]"


def _shapes(error: Unbound, size: int | None, unranked: Shape) -> dict[str, Shape]:
    """Shapes for the inputs that have open sizes."""
    symbols: dict[str, int] = {}
    for name, extents in error.declared.items():
        for extent, number in zip(extents or (), error.bound[name]):
            if isinstance(extent, str) and number is not None:
                symbols[extent] = number
    axes, found = batch_axes(error.declared), {}
    open_batch = any(extents and extents[0] is None for extents in error.declared.values())
    for name, extents in error.declared.items():
        if extents is None:
            found[name] = unranked
            continue
        if None not in error.bound[name]:
            continue
        shape = []
        # Of an input such as a state, whose first size is fixed, the only open one is the batch of the others.
        only = open_batch and error.bound[name][0] is not None and error.bound[name].count(None) == 1
        for axis, (extent, number) in enumerate(zip(extents, error.bound[name])):
            guess = 1 if only or axis == axes[name] else size or _by_place(axis, extents, error.dtypes[name])
            if number is None:
                number = _by_name(extent, symbols, guess, size is None) if isinstance(extent, str) else guess
            shape.append(number)
        found[name] = tuple(shape)
    return found


def _by_place(axis: int, extents: Sequence[Extent], dtype: DType) -> int:
    """A size for an axis that is not the batch: of images, of texts or of other rows."""
    if len(extents) < 4 or not dtype.is_float:
        return 128
    last = isinstance(extents[-1], int) and extents[-1] <= 4
    return 3 if axis == 1 and not last else 224


def _by_name(symbol: str, symbols: dict[str, int], guess: int, all_names: bool) -> int:
    """The number of a symbol, which it has everywhere; some exporters write sums and products of symbols.

    Args:
        symbol: the name.
        symbols: the numbers so far.
        guess: what it is if its name tells nothing.
        all_names: whether other names than those of batches count.
    """
    if symbol in symbols:
        return symbols[symbol]
    for sign, fold in (("+", sum), ("*", math.prod)):
        parts = [part.strip() for part in symbol.split(sign)]
        if len(parts) > 1 and all(re.fullmatch(r"\w+", part) for part in parts):
            numbers = [int(part) if part.isdigit() else _by_name(part, symbols, guess, all_names) for part in parts]
            symbols[symbol] = fold(numbers)
            return symbols[symbol]
    told = [number for pattern, number in _BY_NAME.items() if re.search(pattern, symbol.lower())]
    symbols[symbol] = told[0] if told and (all_names or told[0] == 1) else guess
    return symbols[symbol]


def _fewest(error: Unbound, shapes: Mapping[str, Shape], given: Mapping[str, Shape]) -> dict[str, Shape]:
    """The shapes that a user gives, and what is needed beside them: the others follow by symbols."""
    bound: set[str] = set()
    kept = {}
    for name, shape in shapes.items():
        extents, known = error.declared[name], error.bound[name]
        if (
            name in given
            or extents is None
            or any(number is None and (extent is None or extent not in bound) for extent, number in zip(extents, known))
        ):
            kept[name] = shape
            bound.update(extent for extent in extents or () if isinstance(extent, str))
    return kept


def _value(model: Model, name: str, shape: Shape, dtype: DType) -> Any:
    """What an input may hold: the number that the model compares it with, else ones."""
    from onnx import numpy_helper

    graph = model.proto.graph
    held = {tensor.name: tensor for tensor in graph.initializer}
    held |= {
        node.output[0]: attribute.t
        for node in graph.node
        for attribute in node.attribute
        if node.op_type == "Constant" and node.output and attribute.name == "value" and attribute.HasField("t")
    }
    same = {name}
    for node in graph.node:
        if node.op_type in _MOVES and node.input and node.input[0] in same:
            same.update(node.output)
        others = [held[other] for other in node.input if other in held and math.prod(held[other].dims) == 1]
        if node.op_type in _COMPARES and others and not same.isdisjoint(node.input):
            return np.full(shape, numpy_helper.to_array(others[0]).reshape(-1)[0], dtype.numpy).tolist()
    return np.ones(shape, dtype.numpy).tolist()
