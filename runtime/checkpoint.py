"""Checkpoints: everything that lasts from step to step, in one safetensors file that other tools read too."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from foreplan.errors import SessionError
from foreplan.files import write_atomically
from foreplan.graph import Kind
from foreplan.lower.program import Program, Slot
from foreplan.runtime.engine import Place

FORMAT = "foreplan.checkpoint.1"
# One key of the file's metadata holds all of ours: the safetensors library writes several keys in any order.
KEY = "foreplan"


def save_checkpoint(path: str, program: Program, places: Mapping[str, Place]) -> None:
    """Write parameters, buffers and state, the same bytes for the same content; constants belong to the model and are
    left out, and so are accumulators, which are zero between steps.

    Raises:
        UsageError, SessionError: the file cannot be written; an older one at the same place is as it was.
    """
    from safetensors.numpy import save

    kept = _kept(program)
    state = [slot.name for slot in kept if slot.kind is Kind.STATE]
    about = json.dumps({"format": FORMAT, "model": program.model, "state": state}, ensure_ascii=False)
    write_atomically(path, save({slot.name: places[slot.name].read() for slot in kept}, {KEY: about}))


def load_checkpoint(path: str, program: Program, places: Mapping[str, Place], state: bool = True) -> bool:
    """Read a checkpoint into the stored values: all of it, or none if anything is wrong.

    A file that has no state at all leaves the program's as it is, and a program that keeps none (inference) passes
    over the file's.

    Args:
        state: False reads parameters and buffers alone, whatever state the file has.

    Returns:
        Whether everything was read that the program keeps from step to step.

    Raises:
        SessionError: the file cannot be read, or does not hold what the program needs.
    """
    from safetensors import SafetensorError, safe_open

    if os.path.isdir(path):
        raise SessionError(f"{path!r} is a directory, and no checkpoint")
    try:
        with safe_open(path, framework="numpy") as file:
            found = _check(path, program, set(file.keys()), _state_in(file.metadata() or {}), state)
            loaded = {slot.name: file.get_tensor(slot.name) for slot in found}
    except FileNotFoundError:
        raise SessionError(f"there is no checkpoint {path!r}") from None
    except (SafetensorError, OSError, ValueError, TypeError) as error:
        raise SessionError(f"{path!r} is not a checkpoint that can be read: {error}") from None
    for slot in found:
        array, want = loaded[slot.name], slot.operand.type
        if array.shape != want.shape or array.dtype != want.dtype.numpy:
            extents = ",".join(map(str, array.shape))
            raise SessionError(
                f"{path!r} is of another model: its {slot.name!r} is {array.dtype}[{extents}], and not {want}"
            )
    for slot in found:
        places[slot.name].write(loaded[slot.name])
    return len(found) == len(_kept(program))


def _kept(program: Program) -> list[Slot]:
    return [slot for slot in program.stored if slot.kind.is_kept]


def _state_in(metadata: Mapping[str, str]) -> set[str]:
    """Names of what the file calls state; empty for a file that another tool wrote."""
    about: Any = json.loads(metadata.get(KEY, "{}"))
    names = about.get("state", []) if isinstance(about, dict) else []
    return {name for name in names if isinstance(name, str)} if isinstance(names, list) else set()


def _check(path: str, program: Program, names: set[str], state_in_file: set[str], state: bool) -> list[Slot]:
    """The slots to load, after comparing names."""
    kept = _kept(program)
    own = {slot.name for slot in kept if slot.kind is Kind.STATE}
    with_state = state and bool(own) and bool(names & (own | state_in_file))
    wanted = [slot for slot in kept if with_state or slot.name not in own]
    missing = [slot.name for slot in wanted if slot.name not in names]
    foreign = sorted(names - {slot.name for slot in kept})
    for name in missing:
        if name not in own:
            raise SessionError(f"{path!r} is of another model: it has no {name!r}")
    for name in foreign:
        if name not in state_in_file:
            raise SessionError(f"{path!r} is of another model: its {name!r} has no place in {program.model!r}")
    # A program that takes no step, such as one that returns gradients, may have a random state and needs no more.
    if with_state and (missing or (foreign and program.step_count is not None)):
        difference = f"it has no {missing[0]!r}" if missing else f"its {foreign[0]!r} has no place here"
        raise SessionError(
            f"{path!r} has the state of another optimizer: {difference}. To start anew from its parameters, load it "
            "with state=False (--weights instead of --resume)"
        )
    return wanted
