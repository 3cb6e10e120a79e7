"""ONNX models as files: weights are written one at a time, in the model's file or, beyond 2 GiB, in one beside it."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from foreplan.base.errors import UsageError
from foreplan.base.files import check_writable, open_atomically
from foreplan.frontend.onnx.origin import without
from foreplan.frontend.onnx.tensors import dtype_of
from foreplan.frontend.onnx.wire import encode
from foreplan.graph import as_dtype

if TYPE_CHECKING:
    import onnx

MOST_BYTES = 2**31 - 2**20  # protobuf reads messages of less than 2 GiB
_ALIGNMENT = 4096  # of a tensor in a file of its own, which tools map into memory
_SMALL = 1024  # bytes that stay in the model's file
_GRAPH, _INITIALIZER, _RAW_DATA, _BYTES = 7, 5, 9, 2

Contents = Mapping[str, Callable[[], np.ndarray]]  # initializer → its content, made when it is written


def save_model(path: str, proto: onnx.ModelProto, contents: Contents, external: bool = False) -> list[Path]:
    """Write a model. Where it has 2 GiB or more, or `external` says so, large weights go to `<path>.data`.

    Args:
        path: of the file.
        proto: the model; initializers that `contents` names have none yet.
        contents: of these.
        external: whether large weights go to a file beside the model's, however many bytes there are.

    Returns:
        The files: the model's, and the one beside it if there is one.

    Raises:
        UsageError, SessionError: a file cannot be written; an older one at the same place is as it was.
    """
    named = [tensor for tensor in proto.graph.initializer if tensor.name in contents]
    external = external or proto.ByteSize() + sum(map(_nbytes, named)) >= MOST_BYTES
    check_writable(path)
    if not external:
        with open_atomically(path) as file:
            for piece in _pieces(proto, contents):
                file.write(piece)
        return [Path(path)]
    if os.path.exists(path) and not os.path.isfile(path):
        raise UsageError(f"the weights need a file beside {path!r}, which is no regular file: give another path")
    beside = Path(os.path.realpath(path)).name + ".data"
    large = [tensor for tensor in named if _nbytes(tensor) > _SMALL]
    _refer(large, beside)
    data = Path(os.path.realpath(path)).with_name(beside)
    apart = {tensor.name for tensor in large}
    # Both files are whole before either takes its place: weights may be read from those that are there.
    with open_atomically(data) as weights, open_atomically(path) as file:
        for tensor in large:
            offset = int(tensor.external_data[1].value)
            weights.write(bytes(offset - weights.tell()))
            for piece in _bytes_of(contents[tensor.name]()):
                weights.write(piece)
        for piece in _pieces(proto, {name: content for name, content in contents.items() if name not in apart}):
            file.write(piece)
    return [Path(path), data]


def serialized(proto: onnx.ModelProto, contents: Contents) -> bytes:
    """The bytes of the file of a model of less than 2 GiB."""
    return b"".join(_pieces(proto, contents))


def _nbytes(tensor: onnx.TensorProto) -> int:
    return math.prod(tensor.dims) * as_dtype(dtype_of(tensor.data_type, f"tensor {tensor.name!r}")).itemsize


def _refer(tensors: list[onnx.TensorProto], location: str) -> None:
    """Let tensors say where their bytes will be."""
    end = 0
    for tensor in tensors:
        offset, length = -(-end // _ALIGNMENT) * _ALIGNMENT, _nbytes(tensor)
        end = offset + length
        tensor.ClearField("external_data")
        for key, value in (("location", location), ("offset", str(offset)), ("length", str(length))):
            tensor.external_data.add(key=key, value=value)
        tensor.data_location = tensor.EXTERNAL


def _pieces(proto: onnx.ModelProto, contents: Contents) -> Iterator[bytes | memoryview]:
    """The serialized model, whose graph is written by hand: no tensor is copied into a message."""
    graph, rest = without(proto.graph, "initializer"), without(proto, "graph")
    heads = []
    for tensor in proto.graph.initializer:
        head, nbytes = tensor.SerializeToString(), _nbytes(tensor) if tensor.name in contents else 0
        tail = _tag(_RAW_DATA) + encode(nbytes) if tensor.name in contents else b""
        heads.append((_tag(_INITIALIZER) + encode(len(head) + len(tail) + nbytes) + head + tail, nbytes, tensor.name))
    body = graph.SerializeToString()
    yield rest.SerializeToString()
    yield _tag(_GRAPH) + encode(len(body) + sum(len(head) + nbytes for head, nbytes, _ in heads)) + body
    for head, _, name in heads:
        yield head
        if name in contents:
            yield from _bytes_of(contents[name]())


def _tag(field: int) -> bytes:
    return encode(field << 3 | _BYTES)


def _bytes_of(array: np.ndarray) -> Iterator[memoryview]:
    """The elements, little-endian, in C order."""
    if array.size:  # NumPy cannot view an array of no bytes as bytes
        yield np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
