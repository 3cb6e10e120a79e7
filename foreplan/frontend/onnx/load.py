"""An ONNX file, path or ModelProto → a checked ModelProto without large weights, and the places of these."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from foreplan.base.errors import ModelError, UnsupportedError, UsageError
from foreplan.frontend.onnx.foreign import told_by_bytes, told_by_name
from foreplan.frontend.onnx.wire import skeleton

if TYPE_CHECKING:
    import onnx

OLDEST_OPSET, NEWEST_OPSET = 1, 28  # of the default domain; the translations know these


def domain_of(name: str) -> str:
    """The name of a domain of ops; the default one, "", may also be written "ai.onnx"."""
    return "" if name == "ai.onnx" else name


def opsets_of(entries: Iterable[onnx.OperatorSetIdProto]) -> dict[str, int]:
    """Domain → version."""
    return {domain_of(entry.domain): entry.version for entry in entries}


@dataclass(frozen=True)
class Model:
    """A parsed model.

    Attributes:
        proto: the model; the large tensors of a file are references to it.
        path: the file, or None for a ModelProto handed over.
        label: its name in messages, which is the file's.
        opsets: domain → version; the default domain is "".
    """

    proto: onnx.ModelProto
    path: Path | None
    label: str
    opsets: dict[str, int]


def load_model(model: str | os.PathLike[str] | onnx.ModelProto) -> Model:
    """Parse a model and check its outermost structure. Large weights stay in the file.

    Raises:
        ModelError: the file is missing, unreadable, empty, broken, or holds something else.
        UnsupportedError: foreplan does not know its opset.
    """
    import onnx

    if isinstance(model, onnx.ModelProto):
        path, label, proto = None, f"model {model.graph.name!r}" if model.graph.name else "model", model
    elif isinstance(model, str | os.PathLike):
        path = Path(model)
        label, proto = path.name, _parse(path)
    else:
        raise UsageError(f"from_onnx takes a path or an onnx.ModelProto, not {type(model).__name__}")
    where = str(path) if path is not None else label
    if not proto.HasField("graph"):
        raise ModelError(f"{where} is not an ONNX model: it has no graph{_hint(path)}")
    if not proto.graph.output:
        raise ModelError(f"{where}: the graph has no outputs, so there is nothing to compute")
    for text in _texts(proto):
        if not isinstance(text, str):
            raise ModelError(f"{where} is damaged: the name {text!r} is not UTF-8 text")
    opsets = opsets_of(proto.opset_import)
    opsets.setdefault("", OLDEST_OPSET)
    _check_opset(opsets[""], where, proto)
    return Model(proto, path, label, opsets)


def _texts(proto: onnx.ModelProto) -> Iterator[object]:
    """Every name that import reads; protobuf gives bytes for what is not text."""
    graphs = [proto.graph]
    nodes = [node for function in proto.functions for node in function.node]
    for function in proto.functions:
        yield from (function.name, function.domain, *function.input, *function.output)
    yield from (entry.domain for entry in proto.opset_import)
    while graphs:
        graph = graphs.pop()
        yield graph.name
        for value in (*graph.input, *graph.output, *graph.initializer):
            yield value.name
        for value in graph.input:
            yield from (dim.dim_param for dim in value.type.tensor_type.shape.dim)
        nodes += graph.node
        while nodes:
            node = nodes.pop()
            yield from (node.name, node.op_type, node.domain, *node.input, *node.output)
            for attribute in node.attribute:
                yield from (attribute.name, attribute.ref_attr_name)
                if attribute.HasField("g"):
                    graphs.append(attribute.g)


def _check_opset(version: int, where: str, proto: onnx.ModelProto) -> None:
    import onnx

    if OLDEST_OPSET <= version <= NEWEST_OPSET:
        return
    node = proto.graph.node[0] if proto.graph.node else onnx.NodeProto()
    age = "newer" if version > NEWEST_OPSET else "older"
    raise UnsupportedError(
        f"{where}: opset {version} is {age} than the opsets {OLDEST_OPSET} to {NEWEST_OPSET} that foreplan reads, so "
        f"the meaning of its nodes (the first is {node.name!r}, {node.op_type}) is not known; export the model for one "
        f"of those, or convert it with onnx.version_converter.convert_version(model, {NEWEST_OPSET})"
    )


def _parse(path: Path) -> onnx.ModelProto:
    import onnx
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    try:
        if other := told_by_bytes(path):
            raise ModelError(f"{path} is not an ONNX model but {other}")
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise ModelError(f"{path} is empty: it is not an ONNX model")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                if data[:20].startswith(b"version https://git-"):
                    raise ModelError(f"{path} is a Git LFS pointer, not the model; fetch it with `git lfs pull`")
                proto = onnx.ModelProto.FromString(skeleton(data))
    except FileNotFoundError:
        raise ModelError(f"{path}: there is no such file") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    except ModelError as error:
        if str(error).startswith(str(path)):
            raise
        raise ModelError(f"{path} is not an ONNX model or is damaged: {error}{_hint(path)}") from None
    except (DecodeError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not an ONNX model or is damaged: {error}{_hint(path)}") from None
    return proto


def _hint(path: Path | None) -> str:
    """What the file may be instead."""
    told = "" if path is None else told_by_name(path)
    return f" ({told})" if told else ""
