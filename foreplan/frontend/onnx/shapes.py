"""Binding the inputs of an ONNX model to static shapes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from foreplan.base.arguments import mapping, shown, whole
from foreplan.base.errors import ShapeError, UnsupportedError, UsageError
from foreplan.frontend.onnx.load import Model
from foreplan.frontend.onnx.symbols import Extent, batch_axes, symbol_of, without_contradicted
from foreplan.frontend.onnx.tensors import dtype_of
from foreplan.graph import TensorType, as_dtype
from foreplan.graph.types import DType, Shape

if TYPE_CHECKING:
    import onnx


class Unbound(ShapeError):
    """Sizes of inputs that nothing binds.

    Attributes:
        label: of the model.
        declared: by input: its extents as the file has them; None where it has no shape.
        bound: by input: its extents as far as they are bound.
        dtypes: element types of the inputs.
    """

    def __init__(
        self,
        message: str,
        *,
        label: str,
        declared: Mapping[str, Sequence[Extent] | None],
        bound: Mapping[str, Sequence[int | None]],
        dtypes: Mapping[str, DType],
    ) -> None:
        super().__init__(message)
        self.label, self.declared, self.bound, self.dtypes = label, declared, bound, dtypes


@dataclass(frozen=True)
class Bound:
    """The user's inputs with static shapes.

    Attributes:
        types: by name, in order; without those that have values.
        values: inputs that have the same values in every step.
        exported: the types as exported, if the file fixes another batch than `batch`.
        old_batch: the batch that the file fixes.
        notes: what people should know of the file's symbols.
    """

    types: dict[str, TensorType]
    values: Mapping[str, np.ndarray] = field(default_factory=dict)
    exported: dict[str, TensorType] | None = None
    old_batch: int = 0
    notes: tuple[str, ...] = ()


def bind_shapes(
    model: Model,
    shapes: Mapping[str, Sequence[int]] | None,
    batch: int | None,
    values: Mapping[str, Any] | None = None,
) -> Bound:
    """Static shapes for every input, from the file, `shapes`, `batch`, and `values`, which have shapes of their own.

    Raises:
        Unbound: extents are open.
        ShapeError: an extent is bound to two numbers; names input and axis.
        UsageError: `shapes` or `values` names no input, an extent is not a positive number, or a value does not fit.
        UnsupportedError: an input is not a tensor of numbers.
    """
    infos = {info.name: info for info in user_inputs(model.proto.graph)}
    given = _checked(model, {} if shapes is None else shapes)
    dtypes = {name: _dtype(info, f"{model.label}: input {name!r}") for name, info in infos.items()}
    known = known_values(model, {} if values is None else values, dtypes)
    for name, array in known.items():
        if given.setdefault(name, array.shape) != array.shape:
            raise ShapeError(
                f"{model.label}: input {name!r} has the shape {list(given[name])} in shapes= and {list(array.shape)} "
                "in values=; give one of them"
            )
    declared = {
        name: _declared(info, given.get(name), f"{model.label}: input {name!r}") for name, info in infos.items()
    }
    notes = without_contradicted(declared, given, model.label)
    symbols: dict[str, tuple[int, str]] = {}
    partly: dict[str, tuple[int | None, ...]] = {}
    fixed_batches: dict[str, int] = {}
    axes = batch_axes(declared)
    for name, extents in declared.items():
        each = None if name in known or batch is None else (axes[name], batch)
        partly[name] = _bind(model, name, extents or (), given.get(name), each, symbols, fixed_batches)
    # A symbol bound by one input is bound in all.
    final = {
        name: tuple(_resolved(e, bound, symbols) for e, bound in zip(extents or (), partly[name]))
        for name, extents in declared.items()
    }
    if any(declared[name] is None or None in shape for name, shape in final.items()):
        message = f"{model.label}: sizes of its inputs are open"
        raise Unbound(message, label=model.label, declared=declared, bound=final, dtypes=dtypes)
    types = {
        name: _type(model, name, dtypes[name], tuple(extent for extent in shape if extent is not None))
        for name, shape in final.items()
        if name not in known
    }
    changed = {name: old for name, old in fixed_batches.items() if old != batch}
    if not changed:
        return Bound(types, known, notes=notes)
    if len(set(fixed_batches.values())) > 1:
        listed = ", ".join(f"{name!r} at {old}" for name, old in fixed_batches.items())
        raise ShapeError(
            f"{model.label}: batch={batch} is for the first axis of every input, but the file fixes {listed}; "
            "leave batch= out"
        )
    assert batch is not None
    old = next(iter(changed.values()))
    exported = {
        name: type.with_shape(tuple(old if i == axes[name] and n == batch else n for i, n in enumerate(type.shape)))
        for name, type in types.items()
    }
    return Bound(types, known, exported, old, notes)


def declared_type(info: onnx.ValueInfoProto) -> onnx.TypeProto:
    """The declared type; that of its element where it is optional, as every input is given."""
    type = info.type
    return type.optional_type.elem_type if type.HasField("optional_type") else type


def _dtype(info: onnx.ValueInfoProto, where: str) -> DType:
    declared = declared_type(info)
    if not declared.HasField("tensor_type"):
        kind = declared.WhichOneof("value") or "nothing"
        raise UnsupportedError(
            f"{where} is declared as {kind.removesuffix('_type')}; foreplan takes tensors of numbers only, so give its "
            "tensors as inputs of their own"
        )
    return as_dtype(dtype_of(declared.tensor_type.elem_type, where))


def known_values(model: Model, values: Mapping[str, Any], dtypes: Mapping[str, DType]) -> dict[str, np.ndarray]:
    """The values of inputs as arrays of the types that the file declares.

    Raises:
        UsageError: a name is no input's, or a value is no array of that type.
    """
    found = {}
    for name, value in mapping("values", values, "{'axes': [0, 1]}").items():
        if name not in dtypes:
            listed = ", ".join(dtypes) or "none"
            raise UsageError(f"{model.label} has no input {name!r} to give a value; its inputs are {listed}")
        try:
            given = np.asarray(value)
            with np.errstate(all="ignore"):
                array = given.astype(dtypes[name].numpy)
                rounds = dtypes[name].is_float and given.dtype.kind == "f"
                fits = rounds or given.dtype == array.dtype or bool((array == given).all())
        except (TypeError, ValueError):
            fits = False
        if not fits:
            raise UsageError(
                f"{model.label}: input {name!r} holds {dtypes[name]}, and its value is {shown(value)}: give an array "
                "of that type"
            )
        found[name] = array
    return found


def _type(model: Model, name: str, dtype: DType, shape: Shape) -> TensorType:
    try:
        return TensorType(dtype, shape)
    except ShapeError as error:
        raise ShapeError(f"{model.label}: input {name!r}: {error}") from None


def user_inputs(graph: onnx.GraphProto) -> list[onnx.ValueInfoProto]:
    """Inputs that are not initializers: before IR version 4, initializers had to be listed as inputs, too."""
    held = {tensor.name for tensor in graph.initializer}
    held |= {tensor.values.name for tensor in graph.sparse_initializer}
    return [info for info in graph.input if info.name not in held]


def fixed_extents(info: onnx.ValueInfoProto) -> tuple[int | None, ...] | None:
    """The extents that the file fixes, None for the others; None where it has no shape at all."""
    declared = declared_type(info).tensor_type
    if not declared.HasField("shape"):
        return None
    return tuple(dim.dim_value if dim.dim_value > 0 else None for dim in declared.shape.dim)


def _checked(model: Model, shapes: Mapping[str, Sequence[int]]) -> dict[str, Shape]:
    names = [info.name for info in user_inputs(model.proto.graph)]
    for name, shape in mapping("shapes", shapes, "{'x': (1, 3, 224, 224)}").items():
        if name not in names:
            raise UsageError(
                f"{model.label} has no input {name!r} to give a shape; its inputs are {', '.join(names) or 'none'}"
            )
        if not isinstance(shape, Iterable):
            raise UsageError(f"{model.label}: the shape for input {name!r} must be a tuple, and is {shown(shape)}")
    what = f"{model.label}: an extent for input"
    return {name: tuple(whole(f"{what} {name!r}", extent, 0) for extent in shape) for name, shape in shapes.items()}


def _declared(info: onnx.ValueInfoProto, given: Shape | None, where: str) -> list[Extent] | None:
    """The extents as the file has them; a negative number means none, as some exporters write it. None: no shape."""
    type = declared_type(info).tensor_type
    if not type.HasField("shape"):
        return None if given is None else [None] * len(given)
    extents: list[Extent] = []
    for dim in type.shape.dim:
        if dim.HasField("dim_value"):
            extents.append(dim.dim_value if dim.dim_value >= 0 else None)
        else:
            extents.append(symbol_of(dim.dim_param))
    if given is not None and len(given) != len(extents):
        raise ShapeError(f"{where} has {len(extents)} axes, and shapes= gives it {len(given)}: {given}")
    return extents


def _bind(
    model: Model,
    name: str,
    extents: Sequence[Extent],
    given: Shape | None,
    batch: tuple[int, int] | None,
    symbols: dict[str, tuple[int, str]],
    fixed_batches: dict[str, int],
) -> tuple[int | None, ...]:
    """One input's shape as far as it is known without the others; notes its symbols and its fixed batch.

    Args:
        model, name, extents: the input's, as the file has them.
        given: its shape, if the user gives one.
        batch: the axis that has the batch, and the batch, if the user gives one.
        symbols: symbol → its number, and where that was bound.
        fixed_batches: input → the batch that the file fixes.
    """
    bound: list[int | None] = []
    for axis, extent in enumerate(extents):
        where = f"{model.label}: axis {axis} of input {name!r}"
        wanted = given[axis] if given is not None else None
        if batch is not None and axis == batch[0]:
            if wanted not in (None, batch[1]):
                raise ShapeError(f"{where} is {wanted} in shapes= and {batch[1]} in batch=; give one of them")
            wanted = batch[1]
            if isinstance(extent, int) and extent > 0:
                fixed_batches[name] = extent
                extent = None
        if isinstance(extent, int):
            if wanted is not None and wanted != extent and extent != 0:
                more = f"; for another batch give batch={wanted} (--batch {wanted})" if axis == 0 else ""
                raise ShapeError(f"{where} is {extent} in the file, and shapes= gives {wanted}{more}")
            bound.append(extent if wanted is None else wanted)
            continue
        if isinstance(extent, str) and wanted is not None:
            number, other = symbols.setdefault(extent, (wanted, where))
            if number != wanted:
                raise ShapeError(
                    f"{where} is {wanted}, but its size {extent!r} is {number} by {other}: what the file calls by one "
                    "name is one size, so give both the same; if the file is wrong, write another dim_param there"
                )
        bound.append(wanted)
    return tuple(bound)


def _resolved(extent: Extent, bound: int | None, symbols: Mapping[str, tuple[int, str]]) -> int | None:
    return symbols[extent][0] if bound is None and isinstance(extent, str) and extent in symbols else bound
