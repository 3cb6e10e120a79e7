"""What an imported graph remembers of its file, so that it can be written again with other weights."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from foreplan.base.errors import ModelError
from foreplan.base.files import real_place
from foreplan.frontend.onnx.load import Model, load_model
from foreplan.frontend.onnx.nested_tensors import Place
from foreplan.frontend.onnx.tensors import from_tensor
from foreplan.frontend.onnx.wire import INLINE_BYTES, SELF
from foreplan.graph import Array, Graph
from foreplan.graph.init import generator_for
from foreplan.graph.value import Kind

if TYPE_CHECKING:
    import onnx
    from google.protobuf.message import Message  # type: ignore[import-untyped]

HELD = "\0held"  # the `location` of bytes that the graph has
OTHERWISE = "write the graph itself (form='graph', or --graph)"
_Message = TypeVar("_Message", bound="Message")


@dataclass(frozen=True, eq=False)
class Origin:
    """A model as it was read.

    Attributes:
        label: its name in messages.
        path: the file, absolute; None for a ModelProto.
        proto: the serialized ModelProto. Its tensors are those of the module (see `restore`). Bytes of large tensors
            are left out: their `location` says that they are in this file, in one beside it, or in the graph (`HELD`).
        digest: of the file without the bytes of large tensors.
        external: whether the file has its weights in a file beside it.
        outputs: of the model, in order.
        places: stored values that graphs within nodes hold, by name.
        constants: the names of all tensors that the file holds: some are parts of expressions, and nothing is stored.
    """

    label: str
    path: Path | None
    proto: bytes
    digest: bytes
    external: bool
    outputs: tuple[str, ...]
    places: Mapping[str, Place]
    constants: tuple[str, ...] = ()

    @staticmethod
    def of(model: Model, told: onnx.GraphProto, graph: Graph, places: Mapping[str, Place]) -> Origin:
        """What to remember of a model, whose graph `told` was imported as `graph`."""
        held = {
            value.name for value in graph.stored if isinstance(value.init, Array) and value.type.nbytes > INLINE_BYTES
        }
        proto = without(model.proto, "graph")
        proto.graph.CopyFrom(without(told, "initializer"))
        for tensor in told.initializer:
            stays = tensor.name not in held or tensor.data_location == tensor.EXTERNAL
            proto.graph.initializer.append(tensor if stays else _emptied(tensor))
        path = None if model.path is None else real_place(model.path)
        external = any(is_outside(tensor) for tensor in told.initializer)
        digest = b"" if path is None else _digest(model.proto)
        outputs, written = tuple(graph.outputs), proto.SerializeToString()
        names = [tensor.name for tensor in told.initializer]
        names += [node.output[0] for node in told.node if node.op_type == "Constant" and node.output]
        return Origin(model.label, path, written, digest, external, outputs, places, tuple(names))

    def model(self) -> onnx.ModelProto:
        """The model without the bytes of large tensors."""
        import onnx

        return onnx.ModelProto.FromString(self.proto)

    def check_file(self, name: str) -> None:
        """Check that the file is there as it was, but for the bytes of large tensors.

        Args:
            name: of a tensor that is to be read from it, for the error.

        Raises:
            ModelError: the file is gone, or another one by now.
        """
        assert self.path is not None
        what = f"{self.label}: a session does not hold the tensor {name!r}, which is to be read from {self.path}"
        if not self.path.is_file():
            raise ModelError(f"{what}, and there is no such file: put it back, or {OTHERWISE}")
        if _digest(load_model(self.path).proto) != self.digest:
            raise ModelError(
                f"{what}, and this is another file than the one that was imported: import it again and load the "
                f"weights, or {OTHERWISE}"
            )

    def content(self, tensor: onnx.TensorProto) -> np.ndarray:
        """What the file, or one beside it, has for a tensor.

        Raises:
            ModelError: it cannot be read.
        """
        constant = from_tensor(tensor, tensor.name, self.path, f"{self.label}: tensor {tensor.name!r}", Kind.CONSTANT)
        array = np.empty(constant.shape, constant.type.dtype.numpy)
        constant.init.fill(array, generator_for(0, tensor.name))
        return array


def is_outside(tensor: onnx.TensorProto) -> bool:
    """Whether a tensor's bytes are in a file beside the model's."""
    return tensor.data_location == tensor.EXTERNAL and location_of(tensor) not in (SELF, HELD)


def location_of(tensor: onnx.TensorProto) -> str:
    """Where the bytes of a tensor are that are not in the message."""
    return next((entry.value for entry in tensor.external_data if entry.key == "location"), "")


def without(message: _Message, name: str) -> _Message:
    """A copy of a message without one of its fields, which may be large."""
    copy, fields = type(message)(), message.ListFields()
    if any(isinstance(value, bytes) and field.type == field.TYPE_STRING for field, value in fields):
        copy.CopyFrom(message)  # a text that is none can only be copied with all the rest
        copy.ClearField(name)
        return copy
    for field, value in fields:
        if field.name == name:
            continue
        if isinstance(value, str | bytes | int | float):
            setattr(copy, field.name, value)
        else:
            getattr(copy, field.name).MergeFrom(value)
    return copy


def _emptied(tensor: onnx.TensorProto) -> onnx.TensorProto:
    """A tensor whose bytes the graph has."""
    copy = without(tensor, "raw_data")
    for field in ("float_data", "int32_data", "double_data"):
        copy.ClearField(field)
    copy.external_data.add(key="location", value=HELD)
    copy.data_location = copy.EXTERNAL
    return copy


def _digest(proto: onnx.ModelProto) -> bytes:
    return hashlib.sha256(proto.SerializeToString()).digest()
