"""Checkpoints: everything that lasts from step to step, in one safetensors file that other tools read too."""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np

from foreplan.errors import SessionError
from foreplan.files import write_atomically
from foreplan.graph import Kind
from foreplan.lower.program import Program, Slot

FORMAT = "foreplan.checkpoint.1"


def save_checkpoint(path: str, program: Program, arrays: Mapping[str, np.ndarray]) -> None:
    """Write parameters, buffers and state; constants belong to the model and are left out.

    Raises:
        UsageError, SessionError: the file cannot be written; an older one at the same place is as it was.
    """
    from safetensors.numpy import save

    kept = _kept(program)
    state = [slot.name for slot in kept if slot.kind is Kind.STATE]
    metadata = {"format": FORMAT, "model": program.model, "state": json.dumps(state)}
    write_atomically(path, save({slot.name: arrays[slot.name] for slot in kept}, metadata))


def load_checkpoint(path: str, program: Program, arrays: Mapping[str, np.ndarray]) -> None:
    """Read a checkpoint into the arrays: all of it, or none if anything is wrong.

    State that the program does not keep (an inference program loading a training checkpoint) is passed over; a file
    that has no state at all leaves the program's as it is.

    Raises:
        SessionError: the file cannot be read, or does not hold what the program needs.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            names, metadata = set(file.keys()), file.metadata() or {}
            found = _check(path, program, names, metadata)
            loaded = {slot.name: file.get_tensor(slot.name) for slot in found}
    except FileNotFoundError:
        raise SessionError(f"there is no checkpoint {path!r}") from None
    except (SafetensorError, OSError, ValueError) as error:
        raise SessionError(f"{path!r} is not a checkpoint that can be read: {error}") from None
    for slot in found:
        array, want = loaded[slot.name], slot.operand.type
        if array.shape != want.shape or array.dtype != want.dtype.numpy:
            raise SessionError(
                f"{path!r} is of another model: its {slot.name!r} is {array.dtype}{list(array.shape)}, and not {want}"
            )
    for slot in found:
        np.copyto(arrays[slot.name], loaded[slot.name])


def _kept(program: Program) -> list[Slot]:
    return [slot for slot in program.stored if slot.kind is not Kind.CONSTANT]


def _check(path: str, program: Program, names: set[str], metadata: Mapping[str, str]) -> list[Slot]:
    """The slots to load, after comparing names."""
    kept = _kept(program)
    state = {slot.name for slot in kept if slot.kind is Kind.STATE}
    without_state = not names & state
    wanted = [slot for slot in kept if not (without_state and slot.name in state)]
    if missing := [slot.name for slot in wanted if slot.name not in names]:
        raise SessionError(f"{path!r} is of another model: it has no {missing[0]!r}")
    foreign = names - {slot.name for slot in kept} - set(json.loads(metadata.get("state", "[]")))
    if foreign:
        raise SessionError(f"{path!r} is of another model: its {min(foreign)!r} has no place in {program.model!r}")
    return wanted
