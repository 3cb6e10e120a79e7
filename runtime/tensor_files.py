"""Safetensors files, one or several, as named tensors that are read slice by slice."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from foreplan.base.errors import SessionError
from foreplan.graph.init import BLOCK

_INDEX = ".safetensors.index.json"
# Element types as the format names them. They are written here, since the library first copies all values when it
# writes, and ends the process if there is no memory for that.
TYPES = {
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
    "bool": "BOOL",
    "bfloat16": "BF16",
}
_NAMES = {theirs: own for own, theirs in TYPES.items()}
_CONVERT = (
    "python -c \"import sys, torch, safetensors.torch as s; d = torch.load(sys.argv[1], map_location='cpu'); "
    "s.save_file({k: v.clone() for k, v in d.get('state_dict', d).items()}, sys.argv[2])\""
)


def type_text(dtype: str, shape: Iterable[int]) -> str:
    """An element type and extents as graphs write them: `float32[3,4]`."""
    return f"{dtype}[{','.join(map(str, shape))}]"


@dataclass(frozen=True)
class Entry:
    """A tensor in a file; its bytes are read when they are asked for.

    Attributes:
        dtype: the element type by foreplan's name; the file's own where foreplan has none.
        shape: extents.
    """

    dtype: str
    shape: tuple[int, ...]
    _slice: Any = field(repr=False)

    def __str__(self) -> str:
        return type_text(self.dtype, self.shape)

    def holds(self, array: np.ndarray) -> bool:
        """Whether it is this array: type, shape and every element."""
        if (self.dtype, self.shape) != (array.dtype.name, array.shape):
            return False
        found = np.empty_like(array)
        self.read(found)
        return bool(np.array_equal(found, array, equal_nan=array.dtype.kind in "fc"))

    def read(self, out: np.ndarray, transposed: bool = False) -> None:
        """Read it into an array of its shape, or of the transposed one, a block at a time.

        Element types may differ; a number that the array's type has no room for is an error.

        Raises:
            FloatingPointError: such a number.
        """
        if not out.size:  # the library cannot read empty tensors
            return
        with np.errstate(over="raise"):
            if out.nbytes <= BLOCK or out.ndim == 0:
                found = self._slice[()]
                out[...] = found.T if transposed else found
                return
            rows = max(1, BLOCK * len(out) // out.nbytes)
            for start in range(0, len(out), rows):
                stop = min(start + rows, len(out))
                out[start:stop] = self._slice[:, start:stop].T if transposed else self._slice[start:stop]


@dataclass(frozen=True)
class TensorFile:
    """An open file of tensors, or several that an index file joins.

    Attributes:
        path: as the user gave it.
        entries: by name.
        metadata: texts by name.
    """

    path: str
    entries: Mapping[str, Entry]
    metadata: Mapping[str, str]


@contextmanager
def open_tensors(path: str) -> Iterator[TensorFile]:
    """Open a safetensors file, or an index of several, as transformers writes for large models.

    Within, errors of reading also say that the file cannot be read.

    Raises:
        SessionError: there is no such file, or it is of another format; says how to convert PyTorch's own.
    """
    from safetensors import safe_open

    if os.path.isdir(path):
        raise SessionError(f"{path!r} is a directory, not a checkpoint")
    with _readable(path), ExitStack() as stack:
        _refuse_pickle(path)
        entries: dict[str, Entry] = {}
        metadata: dict[str, str] = {}
        parts = _parts(path)
        for part, wanted in parts.items():
            if not os.path.exists(part):
                raise SessionError(f"there is no {part!r}, to which {path!r} leads")
            file = stack.enter_context(safe_open(part, framework="numpy"))
            metadata |= file.metadata() or {}
            held = set(file.keys())
            if wanted is not None and (lacking := sorted(wanted - held)):
                raise SessionError(f"{path!r} says that {part!r} has {lacking[0]!r}, and it has not")
            for name in file.keys() if wanted is None else wanted:
                found = file.get_slice(name)
                dtype = found.get_dtype()
                entries[name] = Entry(_NAMES.get(dtype, dtype), tuple(found.get_shape()), found)
        yield TensorFile(path, entries, metadata if len(parts) == 1 else {})


def _parts(path: str) -> dict[str, set[str] | None]:
    """The files that hold the tensors, each with the names wanted of it; None: all."""
    if not path.endswith(_INDEX):
        return {path: None}
    with open(path, encoding="utf-8") as file:
        index = json.load(file)
    places = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(places, dict) or not all(isinstance(part, str) for part in places.values()):
        raise ValueError("an index has a weight_map, from names to files")
    folder = os.path.dirname(path)
    parts: dict[str, set[str] | None] = {}
    for name, part in places.items():
        if os.path.basename(part) != part:
            raise SessionError(f"{path!r} leads to {part!r}; the files of an index lie beside it")
        wanted = parts.setdefault(os.path.join(folder, part), set())
        assert wanted is not None
        wanted.add(name)
    return parts


def _refuse_pickle(path: str) -> None:
    """Tell PyTorch's own files, zip archives and pickles: reading one may run any code that is in it."""
    with open(path, "rb") as file:
        start = file.read(9)
    pickled = start[:1] == b"\x80" and start[8:] != b"{"  # a safetensors file may have a header of 128 bytes
    if pickled or start[:4] == b"PK\x03\x04":
        paths = shlex.quote(path), shlex.quote(os.path.splitext(path)[0] + ".safetensors")
        raise SessionError(
            f"{path!r} is a file of PyTorch's own format, a pickle, which may run any code that is in it. Where you "
            f"trust it and have PyTorch, write its tensors as safetensors:\n    {_CONVERT} {paths[0]} {paths[1]}"
        )


@contextmanager
def _readable(path: str) -> Iterator[None]:
    """Turn errors within into errors that say: the file is no checkpoint, or cannot be read."""
    from safetensors import SafetensorError

    try:
        yield
    except FileNotFoundError:
        raise SessionError(f"there is no checkpoint {path!r}") from None
    except RecursionError:
        raise SessionError(f"{path!r} is not a checkpoint that can be read: its metadata are nested too deep") from None
    except FloatingPointError:
        raise SessionError(f"{path!r} has a number that the session's element type has no room for") from None
    except (SafetensorError, OSError, ValueError, TypeError) as error:
        raise SessionError(f"{path!r} is not a checkpoint that can be read: {error}") from None
    except BaseException as error:
        if type(error).__module__ != "pyo3_runtime":  # the library panics if memory is short
            raise
        raise SessionError(f"{path!r} cannot be read: {error}; is there enough memory?") from None
