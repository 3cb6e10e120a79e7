"""Outputs beside what the file declares of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from foreplan.base.errors import ShapeError, UnsupportedError
from foreplan.frontend.onnx.shapes import fixed_extents
from foreplan.frontend.onnx.tensors import dtype_of
from foreplan.graph import DType
from foreplan.graph.types import Shape

if TYPE_CHECKING:
    import onnx


def compared(info: onnx.ValueInfoProto, found: DType, shape: Shape, label: str) -> list[str]:
    """Compare an output with its declaration, as ONNX Runtime does: for another shape, the computed one counts.

    Args:
        info: the declaration.
        found: the computed element type.
        shape: the computed shape, with the batch that the file declares.
        label: of the model, for errors.

    Returns:
        a note for people, where the shapes differ.

    Raises:
        ShapeError: it is declared with another element type.
        UnsupportedError: it is declared as no tensor.
    """
    where, declared = f"{label}: output {info.name!r}", info.type.tensor_type
    kind = info.type.WhichOneof("value") or "tensor_type"
    if kind != "tensor_type":
        raise UnsupportedError(
            f"{where} is declared as {kind.removesuffix('_type')}; foreplan gives tensors of numbers only, so take "
            "them out with SequenceAt or ConcatFromSequence"
        )
    if declared.elem_type and (dtype := dtype_of(declared.elem_type, where)) != found.name:
        raise ShapeError(
            f"{where} is declared as {dtype} and computed as {found}: the file contradicts itself; export "
            "the model again, or correct the type of the output"
        )
    extents = fixed_extents(info)
    if extents is None or (len(extents) == len(shape) and all(a in (None, b) for a, b in zip(extents, shape))):
        return []
    texts = [dim.dim_param or ("?" if n is None else str(n)) for dim, n in zip(declared.shape.dim, extents)]
    shapes = f"declared with the shape [{', '.join(texts)}] and computed as {list(shape)}"
    return [f"{where} is {shapes}; the computed shape counts"]
