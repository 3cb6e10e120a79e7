"""ONNX files without their weights: the protobuf wire format is read only as far as needed to cut out large tensors.

A tensor's bytes are replaced by the reference that ONNX itself uses for bytes in another file; it points back into the
same file. The result is small, and later stages treat both cases alike.

Source: the protocol buffers encoding guide (tag = field << 3 | wire type) and the field numbers of onnx.proto.
"""

from __future__ import annotations

import math
import mmap

from foreplan.base.errors import ModelError

INLINE_BYTES = 1024  # float tensors up to here stay inside the model, as do integer ones up to INTEGER_BYTES
INTEGER_BYTES = 1 << 20
SELF = "\0"  # the `location` that means the .onnx file itself; no file can have this name

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
# (message, field) → the message in that field, for the fields in which tensors can be.
_NESTED = {
    ("model", 7): "graph",
    ("model", 25): "function",
    ("graph", 1): "node",
    ("graph", 5): "tensor",
    ("function", 7): "node",
    ("node", 5): "attribute",
    ("attribute", 5): "tensor",
    ("attribute", 6): "graph",
    ("attribute", 10): "tensor",
    ("attribute", 11): "graph",
}
_DIMS, _DATA_TYPE, _FLOAT_DATA, _RAW_DATA, _DOUBLE_DATA = 1, 2, 4, 9, 10
_EXTERNAL_DATA, _DATA_LOCATION = 13, 14
# TensorProto.data_type → bits an element, for the types that may be left in the file.
_ITEM_BITS = {1: 32, 2: 8, 3: 8, 4: 16, 5: 16, 10: 16, 11: 64, 12: 32, 13: 64, 16: 16}
_ITEM_BITS |= {17: 8, 18: 8, 19: 8, 20: 8, 21: 4, 22: 4, 23: 4, 24: 8, 25: 2, 26: 2}  # those that are only stored
_INTEGER_ITEM_BITS = {6: 32, 7: 64, 9: 8}
_DEEPEST = 100  # graphs within graphs, as protobuf itself limits them

Buffer = mmap.mmap | bytes


def skeleton(data: Buffer) -> bytes:
    """The serialized ModelProto with every large tensor's bytes replaced by (SELF, offset, length).

    Args:
        data: the file; only the parts that are not tensor contents are read.

    Raises:
        ModelError: the bytes are not a protobuf message, or break off.
    """
    return b"".join(_message(data, 0, len(data), "model", 0))


def _varint(data: Buffer, at: int, end: int) -> tuple[int, int]:
    """The number at `at` and where the next field begins."""
    value = shift = 0
    while at < end and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise ModelError("the file breaks off in the middle of a number, or is no protobuf message")


def _field(data: Buffer, at: int, end: int) -> tuple[int, int, int, int]:
    """(field number, wire type, where its content begins, where it ends) of the field at `at`."""
    tag, start = _varint(data, at, end)
    wire = tag & 7
    if wire == _VARINT:
        stop = _varint(data, start, end)[1]
    elif wire == _BYTES:
        length, start = _varint(data, start, end)
        stop = start + length
    elif wire in (_FIXED32, _FIXED64):
        stop = start + (4 if wire == _FIXED32 else 8)
    else:
        raise ModelError(f"the file is no protobuf message: wire type {wire} at byte {at}")
    if stop > end or tag >> 3 == 0:
        raise ModelError(f"the file breaks off or is no protobuf message: a field at byte {at} ends at byte {stop}")
    return tag >> 3, wire, start, stop


def _message(data: Buffer, at: int, end: int, kind: str, depth: int) -> list[bytes]:
    """The message in pieces, with what is nested in it rewritten."""
    if end - at <= INLINE_BYTES:
        return [data[at:end]]
    if depth > _DEEPEST:
        raise ModelError(f"the file nests graphs more than {_DEEPEST} deep")
    if kind == "tensor":
        return _tensor(data, at, end)
    pieces, copied = [], at
    while at < end:
        number, wire, start, stop = _field(data, at, end)
        inner = _NESTED.get((kind, number))
        if inner is not None and wire == _BYTES and stop - start > INLINE_BYTES:
            parts = _message(data, start, stop, inner, depth + 1)
            length = sum(map(len, parts))
            pieces += [data[copied:at], encode(number << 3 | _BYTES), encode(length), *parts]
            copied = stop
        at = stop
    pieces.append(data[copied:end])
    return pieces


def _tensor(data: Buffer, at: int, end: int) -> list[bytes]:
    """The tensor with its elements cut out, if they are one dense run of little-endian numbers."""
    pieces: list[bytes] = []
    runs: list[tuple[int, int, int]] = []
    dims: list[int] = []
    data_type = 0
    while at < end:
        number, wire, start, stop = _field(data, at, end)
        if number in (_RAW_DATA, _FLOAT_DATA, _DOUBLE_DATA) and wire == _BYTES:
            runs.append((number, start, stop))
        else:
            pieces.append(data[at:stop])
        if number == _DIMS:
            while start < stop:
                extent, start = _varint(data, start, stop)
                dims.append(extent)
        elif number == _DATA_TYPE and wire == _VARINT:
            data_type = _varint(data, start, stop)[0]
        at = stop
    if len(runs) != 1 or not _may_stay_in_file(data_type, runs[0], math.prod(dims)):
        return [
            *pieces,
            *(encode(n << 3 | _BYTES) + encode(stop - start) + data[start:stop] for n, start, stop in runs),
        ]
    _, start, stop = runs[0]
    for key, value in (("location", SELF), ("offset", str(start)), ("length", str(stop - start))):
        entry = _string(1, key) + _string(2, value)
        pieces += [encode(_EXTERNAL_DATA << 3 | _BYTES), encode(len(entry)), entry]
    return [*pieces, encode(_DATA_LOCATION << 3 | _VARINT), b"\1"]


def _may_stay_in_file(data_type: int, run: tuple[int, int, int], size: int) -> bool:
    number, start, stop = run
    bits = _ITEM_BITS.get(data_type)
    if bits is None:
        bits, inline = _INTEGER_ITEM_BITS.get(data_type, 0), INTEGER_BYTES
    else:
        inline = INLINE_BYTES
    if number != _RAW_DATA and {_FLOAT_DATA: 1, _DOUBLE_DATA: 11}[number] != data_type:
        return False
    return bits > 0 and stop - start > inline and stop - start == -(-size * bits // 8)


def encode(value: int) -> bytes:
    """A number as the format writes it: seven bits a byte, the lowest first."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _string(number: int, text: str) -> bytes:
    return encode(number << 3 | _BYTES) + encode(len(text)) + text.encode()
