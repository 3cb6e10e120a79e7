"""TensorProto → a typed constant. Its bytes stay in the file, unless they are few, or integers that may be a shape."""

from __future__ import annotations

import re
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from foreplan.base.errors import ModelError, ShapeError, UnsupportedError
from foreplan.base.files import confined, real_place
from foreplan.frontend.onnx.wire import INLINE_BYTES, INTEGER_BYTES, SELF
from foreplan.graph import Array, Fill, Initializer, Stored, TensorType, Value, as_dtype
from foreplan.graph.types import Shape
from foreplan.graph.value import Kind
from foreplan.ops.storage import BITS, packed_extent

if TYPE_CHECKING:
    import onnx

# A tensor's header is longer than this, so that no byte of another one's content is among them.
_HEADER_BYTES = 10
_NUMBER = re.compile("[0-9]{1,18}")  # of bytes
# TensorProto.DataType → the element types that foreplan computes with.
_DTYPES = {
    1: "float32",
    2: "uint8",
    3: "int8",
    4: "uint16",
    5: "int16",
    6: "int32",
    7: "int64",
    9: "bool",
    10: "float16",
    11: "float64",
    12: "uint32",
    13: "uint64",
    16: "bfloat16",
    17: "float8_e4m3fn",
    18: "float8_e4m3fnuz",
    19: "float8_e5m2",
    20: "float8_e5m2fnuz",
    21: "uint4",
    22: "int4",
    23: "float4_e2m1fn",
    24: "float8_e8m0fnu",
    25: "uint2",
    26: "int2",
}
FLOATS = {number for number, name in _DTYPES.items() if as_dtype(name).is_float}
WHOLE = {2, 3, 4, 5, 6}  # integers that a weight or a bias is quantised to, one in each element
ONNX_DTYPES = {name: number for number, name in _DTYPES.items()}


@dataclass(eq=False)
class Constant:
    """A tensor that does not depend on the model's inputs.

    Attributes:
        name: unique within the model.
        init: its content, perhaps still in a file.
        array: the content, if it is known at import (integers, and small tensors of floats).
        kind: what it becomes when it is stored: PARAMETER, FROZEN, BUFFER or CONSTANT.
        why: for people, why it is of this kind.
        trained: whether these are integers that stand for a weight, which a step may train in float32.
        packed: the bytes that `init` gives, where they hold several elements each; else None.
        value: its value in the graph, after its first reader; the value of the bytes where it is packed.
    """

    name: str
    type: TensorType
    init: Initializer
    array: np.ndarray | None = None
    kind: Kind = Kind.CONSTANT
    why: str = ""
    packed: TensorType | None = None
    trained: bool = False
    value: Value | None = field(default=None, repr=False)

    @property
    def shape(self) -> Shape:
        """Extent along each axis."""
        return self.type.shape

    def take(self, kind: Kind, why: str) -> None:
        """Take a role: integers may stand for a weight that a step trains, and are a frozen one until then."""
        self.why = why
        if kind is Kind.PARAMETER and self.type.dtype.category in ("int", "uint"):
            self.trained, self.kind = True, Kind.FROZEN

    @property
    def is_foldable(self) -> bool:
        """Whether its content is known now and never changes."""
        return self.array is not None and self.kind is Kind.CONSTANT and not self.trained


def known_bytes(type: TensorType) -> int:
    """The most bytes of a tensor of this type whose content is known at import."""
    return INLINE_BYTES if type.dtype.is_float or type.dtype.is_storage else INTEGER_BYTES


def from_array(name: str, array: np.ndarray, kind: Kind = Kind.CONSTANT) -> Constant:
    """A constant that is already in memory."""
    array = np.ascontiguousarray(array).reshape(np.shape(array))
    type = TensorType(as_dtype(array.dtype), array.shape)
    kind = kind if type.dtype.is_float else Kind.CONSTANT
    return Constant(name, type, Array(array), array if type.nbytes <= known_bytes(type) else None, kind)


def given_array(name: str, array: np.ndarray) -> Constant:
    """An input that has the same values in every step: known at import, however large it is."""
    constant = from_array(name, array)
    constant.array = array
    return constant


def filled(name: str, type: TensorType, number: float, kind: Kind = Kind.CONSTANT) -> Constant:
    """One number everywhere."""
    # It takes no memory of its own: a few bytes of a file may make thousands of these.
    one = np.full((), number, type.dtype.numpy)
    array = np.broadcast_to(one, type.shape) if type.nbytes <= known_bytes(type) else None
    return Constant(name, type, Fill(number), array, kind if type.dtype.is_float else Kind.CONSTANT)


def dtype_of(data_type: int, where: str) -> str:
    """The name of an ONNX element type.

    Raises:
        UnsupportedError: foreplan does not compute with it.
    """
    import onnx

    if data_type in _DTYPES:
        return _DTYPES[data_type]
    known = onnx.TensorProto.DataType.values()
    name = onnx.TensorProto.DataType.Name(data_type) if data_type in known else f"number {data_type}"
    remedy = "make numbers of texts before the model" if name == "STRING" else "convert them before the export"
    raise UnsupportedError(
        f"{where}: foreplan does not compute with elements of type {name}; {remedy}: it knows "
        f"{', '.join(_DTYPES.values())}"
    )


def from_tensor(tensor: onnx.TensorProto, name: str, path: Path | None, where: str, kind: Kind) -> Constant:
    """The constant that a TensorProto describes.

    Args:
        tensor: an initializer or an attribute; all reads of a tensor's content come here.
        name: of the constant.
        path: the model's file; external data lie beside it.
        where: begins every message.
        kind: what it becomes if it holds floats.

    Raises:
        ModelError: extents, bytes or file do not fit each other.
        UnsupportedError: its elements are strings or of a type without arithmetic.
    """
    dtype = as_dtype(dtype_of(tensor.data_type, where))
    if any(extent < 0 for extent in tensor.dims):
        raise ModelError(f"{where}: an extent of {list(tensor.dims)} is negative")
    try:
        type = TensorType(dtype, tuple(tensor.dims))
    except ShapeError as error:
        raise ShapeError(f"{where}: {error}") from None
    kind = kind if dtype.is_float else Kind.CONSTANT
    if dtype.name in BITS:
        return _packed(tensor, type, name, path, where)
    if tensor.data_location == tensor.EXTERNAL:
        stored = _external(tensor, type, path, where)
        if type.nbytes > known_bytes(type):
            return Constant(name, type, stored, None, kind)
        array = np.empty(type.shape, dtype.numpy)
        stored.fill(array, np.random.default_rng(0))
    else:
        array = _inline(tensor, type, where)
    constant = from_array(name, array, kind)
    if constant.type != type:
        raise ModelError(f"{where}: it should be {type}, but holds {constant.type}")
    return constant


def _packed(tensor: onnx.TensorProto, type: TensorType, name: str, path: Path | None, where: str) -> Constant:
    """A constant whose bytes hold several elements each; few of them are taken apart at once."""
    held = TensorType(as_dtype("uint8"), (packed_extent(type.dtype, type.size),))
    if tensor.data_location == tensor.EXTERNAL:
        stored: Initializer = _external(tensor, held, path, where)
    else:
        stored = Array(_inline(tensor, held, where))
    if type.nbytes > known_bytes(type):
        return Constant(name, type, stored, packed=held)
    packed = np.empty(held.shape, held.dtype.numpy)
    stored.fill(packed, np.random.default_rng(0))
    bits = BITS[type.dtype.name]
    codes = packed[:, None] >> np.arange(0, 8, bits, dtype=np.uint8) & np.uint8((1 << bits) - 1)
    return from_array(name, codes.reshape(-1)[: type.size].view(type.dtype.numpy).reshape(type.shape))


def _inline(tensor: onnx.TensorProto, type: TensorType, where: str) -> np.ndarray:
    """Its elements; those that are only stored as their codes, and several in a byte as the bytes."""
    import onnx.numpy_helper

    held = len(tensor.raw_data) or sum(
        len(data)
        for data in (tensor.float_data, tensor.int32_data, tensor.int64_data, tensor.double_data, tensor.uint64_data)
    )
    if held == 0 and type.size > 0:
        raise ModelError(f"{where}: it should hold {type} but holds nothing; the file was stripped of its weights")
    try:
        if as_dtype(_DTYPES[tensor.data_type]).is_storage:
            codes = np.frombuffer(tensor.raw_data, np.uint8) if tensor.raw_data else np.array(tensor.int32_data)
            return codes.astype(np.uint8).view(type.dtype.numpy).reshape(type.shape)
        return onnx.numpy_helper.to_array(tensor).astype(type.dtype.numpy, copy=False)
    except (ValueError, TypeError, OverflowError) as error:
        raise ModelError(f"{where}: its content is not {type}: {error}") from None


def _external(tensor: onnx.TensorProto, type: TensorType, path: Path | None, where: str) -> Stored:
    entries: dict[str, str] = {entry.key: entry.value for entry in tensor.external_data}
    if not all(isinstance(text, str) for entry in entries.items() for text in entry):
        raise ModelError(f"{where}: the place of its bytes is not UTF-8 text; the file is damaged")
    if path is None:
        raise ModelError(
            f"{where}: its bytes are in another file, {entries.get('location', '')!r}, and a ModelProto does not say "
            "in which folder; give from_onnx the path of the model instead"
        )
    within = entries.get("location") == SELF
    file = real_place(path) if within else _beside(path, entries.get("location", ""), where)
    size = file.stat().st_size
    offset, length = entries.get("offset", "0"), entries.get("length", str(type.nbytes))
    if not (_NUMBER.fullmatch(offset) and _NUMBER.fullmatch(length)):
        raise ModelError(
            f"{where}: offset {offset[:20]!r} and length {length[:20]!r} of its bytes must be whole numbers"
        )
    start, nbytes = int(offset), int(length)
    if nbytes != type.nbytes:
        raise ModelError(f"{where}: {type} has {type.nbytes} bytes, but {nbytes} are given in {file.name}")
    if start + nbytes > size:
        raise ModelError(f"{where}: bytes {start} to {start + nbytes} lie outside of {file}, which has {size}")
    return Stored(file, start, type, size, _bytes_before(file, start) if within else b"")


def _bytes_before(file: Path, offset: int) -> bytes:
    """The end of a tensor's name and the length of its bytes, as the file has them right before the bytes."""
    count = min(offset, _HEADER_BYTES)
    with open(file, "rb") as opened:
        opened.seek(offset - count)
        return opened.read(count)


def _beside(model: Path, location: str, where: str) -> Path:
    """The file of external data: in the model's folder or below, never elsewhere, even by links.

    Raises:
        ModelError: it lies elsewhere, is missing or is not a file.
    """
    try:
        file = confined(model.parent, location)
    except ValueError as error:
        raise ModelError(f"{where}: its bytes must be in a file beside the model, and {error}") from None
    try:
        mode = file.stat().st_mode
    except OSError as error:
        raise ModelError(f"{where}: the file with its bytes, {file}, cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(mode):
        raise ModelError(f"{where}: {file}, which should hold its bytes, is not a file")
    return file
