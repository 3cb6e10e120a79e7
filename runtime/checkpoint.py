"""Checkpoints: everything that lasts from step to step, in one safetensors file that other tools read too."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from foreplan.errors import SessionError
from foreplan.files import open_atomically
from foreplan.graph import Kind
from foreplan.graph.init import BLOCK
from foreplan.lower.program import Program, Slot
from foreplan.runtime.engine import Place

FORMAT = "foreplan.checkpoint.1"
# One key of the file's metadata holds all of foreplan's: the safetensors library writes keys in any order.
KEY = "foreplan"
_RESERVED = "__metadata__"
# Element types as the format names them. They are written here, since the library first copies all values, and ends the
# process if there is no memory for that.
_TYPES = {
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
    "bool": "BOOL",
    "bfloat16": "BF16",
}


def save_checkpoint(path: str, program: Program, places: Mapping[str, Place]) -> None:
    """Write parameters, buffers and state: the same bytes for the same content. Constants belong to the model and are
    left out, and so are accumulators, which are zero between steps.

    Raises:
        UsageError, SessionError: the file cannot be written; an older one at the same place is as it was.
    """
    kept = _kept(program)
    state = [_key(slot) for slot in kept if slot.kind is Kind.STATE]
    about = json.dumps({"format": FORMAT, "model": program.model, "state": state}, ensure_ascii=False)
    # As the safetensors library lays files out: larger elements first, so that all are aligned, then by name.
    ordered = sorted(kept, key=lambda slot: (-slot.operand.type.dtype.numpy.itemsize, _key(slot)))
    header: dict[str, Any] = {_RESERVED: {KEY: about}}
    end = 0
    for slot in ordered:
        type, begin = slot.operand.type, end
        end += type.nbytes
        header[_key(slot)] = {"dtype": _TYPES[type.dtype.name], "shape": type.shape, "data_offsets": [begin, end]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open_atomically(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for slot in ordered:
            if slot.operand.type.size:  # NumPy cannot view a value of no bytes as bytes
                file.write(np.ascontiguousarray(places[slot.name].read()).data.cast("B"))


def load_checkpoint(
    path: str,
    program: Program,
    places: Mapping[str, Place],
    state: bool = True,
    begun: Callable[[], None] = lambda: None,
) -> bool:
    """Read a checkpoint into the stored values with little further memory: all of it, or nothing if anything in the
    file is wrong.

    A file without state leaves the program's state as it is. A program without state (inference) ignores the file's.

    Args:
        state: False reads only parameters and buffers, whatever state the file has.
        begun: called after all checks, before the first value is written.

    Returns:
        Whether the file had everything that the program keeps from step to step.

    Raises:
        SessionError: the file cannot be read, or does not hold what the program needs.
    """
    from safetensors import safe_open

    if os.path.isdir(path):
        raise SessionError(f"{path!r} is a directory, not a checkpoint")
    with _readable(path), safe_open(path, framework="numpy") as file:
        slots = _check(path, program, set(file.keys()), _state_in(file.metadata() or {}), state)
        found = {slot.name: file.get_slice(_key(slot)) for slot in slots}
        for slot in slots:
            _check_type(path, slot, found[slot.name])
        begun()
        for slot in slots:
            places[slot.name].fill(partial(_read, found[slot.name]))
    return len(slots) == len(_kept(program))


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
    except (SafetensorError, OSError, ValueError, TypeError) as error:
        raise SessionError(f"{path!r} is not a checkpoint that can be read: {error}") from None
    except BaseException as error:
        if type(error).__module__ != "pyo3_runtime":  # the library panics if memory is short
            raise
        raise SessionError(f"{path!r} cannot be read: {error}; is there enough memory?") from None


def _check_type(path: str, slot: Slot, found: Any) -> None:
    """Compare the shape and type of a tensor in a file with the slot's."""
    name, shape, want = found.get_dtype(), tuple(found.get_shape()), slot.operand.type
    if shape != want.shape or name != _TYPES[want.dtype.name]:
        own = next((own for own, theirs in _TYPES.items() if theirs == name), name)
        extents = ",".join(map(str, shape))
        raise SessionError(f"{path!r} is of another model: its {slot.name!r} is {own}[{extents}], and not {want}")


def _read(found: Any, out: np.ndarray) -> None:
    """Read a tensor into an array of its shape and type, a block at a time; the library cannot read empty tensors."""
    if not out.size:
        return
    if out.nbytes <= BLOCK or out.ndim == 0:
        out[...] = found[()]
        return
    rows = max(1, BLOCK * len(out) // out.nbytes)
    for start in range(0, len(out), rows):
        stop = min(start + rows, len(out))
        out[start:stop] = found[start:stop]


def _kept(program: Program) -> list[Slot]:
    return [slot for slot in program.stored if slot.kind.is_kept]


def _key(slot: Slot) -> str:
    """A value's name in a file. The file needs one name itself: values of this name (and any dots) get one more dot."""
    return f"{slot.name}." if slot.name.rstrip(".") == _RESERVED else slot.name


def _state_in(metadata: Mapping[str, str]) -> set[str]:
    """The names of the file's state; empty for a file that another tool wrote."""
    about: Any = json.loads(metadata.get(KEY, "{}"))
    names = about.get("state", []) if isinstance(about, dict) else []
    return {name for name in names if isinstance(name, str)} if isinstance(names, list) else set()


def _check(path: str, program: Program, names: set[str], state_in_file: set[str], state: bool) -> list[Slot]:
    """The slots to load, after comparing names."""
    kept = _kept(program)
    own = {_key(slot) for slot in kept if slot.kind is Kind.STATE}
    with_state = state and bool(own) and bool(names & (own | state_in_file))
    wanted = [slot for slot in kept if with_state or _key(slot) not in own]
    missing = [_key(slot) for slot in wanted if _key(slot) not in names]
    foreign = sorted(names - {_key(slot) for slot in kept})
    for name in missing:
        if name not in own:
            raise SessionError(f"{path!r} is of another model: it has no {name!r}")
    for name in foreign:
        if name not in state_in_file:
            raise SessionError(f"{path!r} is of another model: its {name!r} has no place in {program.model!r}")
    # A program without updates, such as one that returns gradients, may have a random state, but no other.
    if with_state and (missing or (foreign and program.step_count is not None)):
        difference = f"it has no {missing[0]!r}" if missing else f"its {foreign[0]!r} has no place here"
        raise SessionError(
            f"{path!r} has the state of another optimizer: {difference}. To start anew from its parameters, load it "
            "with state=False (--weights instead of --resume)"
        )
    return wanted
