"""Real models: which there are, where their files lie, what is given to them, and what of them is trained."""

from __future__ import annotations

import tomllib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tests.oracle.peers import onnx

LIST = Path(__file__).with_name("models.toml")
FOLDER = Path(__file__).resolve().parents[2] / ".venv" / "real"


@dataclass(frozen=True)
class Model:
    """An entry of models.toml, whose comment says what each field means."""

    package: str
    file: str
    domain: str
    inputs: dict[str, Any] = field(hash=False)
    bind: tuple[str, ...] = ()
    trained: tuple[str, ...] | None = None
    frozen: tuple[str, ...] = ()
    either: tuple[str, ...] = ()
    copies: tuple[str, ...] = ()
    refused: str = ""
    slow: bool = False

    @property
    def name(self) -> str:
        """Of the package and of the file."""
        return f"{self.package}/{Path(self.file).stem}"

    @property
    def path(self) -> Path:
        """The file, once it is unpacked."""
        return folder(self.package) / self.file

    def proto(self) -> Any:
        """The file without data that lies beside it."""
        return onnx.load(str(self.path), load_external_data=False)

    def feeds(self) -> dict[str, np.ndarray]:
        """What a step is given; the same in each call."""
        rng = np.random.default_rng(zlib.crc32(self.name.encode()))
        types = {each.name: each.type.tensor_type.elem_type for each in self.proto().graph.input}
        return {name: _drawn(rng, told, types[name]) for name, told in self.inputs.items()}

    def weights(self) -> set[str]:
        """The names of the tensors of floats that a person would train."""
        return {
            name
            for name in (*_floats(self.proto().graph), *self.copies)
            if _matches(name, self.trained or ()) and not (self.is_frozen(name) or self.is_open(name))
        }

    def is_frozen(self, name: str) -> bool:
        """Whether a tensor is no weight, whatever its name and its place may say."""
        return _matches(name, self.frozen)

    def is_open(self, name: str) -> bool:
        """Whether nothing tells what a tensor is."""
        return _matches(name, self.either)


def folder(package: str) -> Path:
    """Where the files of a package lie, of the version that the list names."""
    return FOLDER / f"{package}-{packages()[package]}"


def _drawn(rng: np.random.Generator, told: Any, elem_type: int) -> np.ndarray:
    told = told if isinstance(told, dict) else {"shape": told}
    dtype, shape = onnx.helper.tensor_dtype_to_np_dtype(elem_type), told["shape"]
    if "value" in told:
        return np.full(shape, told["value"], dtype)
    if "below" in told:
        return rng.integers(0, told["below"], shape).astype(dtype)
    if "tone" in told:
        wave = np.sin(2 * np.pi * told["tone"] * np.arange(np.prod(shape))).reshape(shape)
        return (told["scale"] * (wave + 0.03 * rng.standard_normal(shape))).astype(dtype)
    return np.asarray(told.get("scale", 1.0) * rng.standard_normal(shape)).astype(dtype)


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _floats(graph: Any, within: str = "") -> Iterator[str]:
    """Tensors that the file holds, by their names in a graph: those of a branch begin with the name of its node."""
    floats = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.DOUBLE, onnx.TensorProto.BFLOAT16)
    yield from (within + tensor.name for tensor in graph.initializer if tensor.data_type in floats)
    for node in graph.node:
        for each in node.attribute:
            if each.type == onnx.AttributeProto.GRAPH:
                yield from _floats(each.g, f"{within}{node.name}/")
            elif node.op_type == "Constant" and each.t.data_type in floats:
                yield within + node.output[0]


@cache
def packages() -> dict[str, str]:
    """Name → version."""
    return {name: told["version"] for name, told in tomllib.loads(LIST.read_text())["packages"].items()}


@cache
def models() -> dict[str, Model]:
    """All of the list, by name."""
    entries = tomllib.loads(LIST.read_text())["models"]
    lists = ("bind", "trained", "frozen", "either", "copies")
    found = [Model(**{k: tuple(v) if k in lists else v for k, v in entry.items()}) for entry in entries]
    return {model.name: model for model in found}
