"""Checkpoints: everything that lasts from step to step, in one safetensors file that other tools read too."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import partial
from typing import Any

import numpy as np

from foreplan.base.errors import SessionError
from foreplan.base.files import open_atomically
from foreplan.graph import Kind
from foreplan.graph.origin import ModuleOrigin
from foreplan.lower.program import Program, Slot
from foreplan.runtime.engine import Place
from foreplan.runtime.matching import AS_THEY_ARE, NO_MODULE, Loaded, Names, SessionValue, match
from foreplan.runtime.tensor_files import TYPES, TensorFile, open_tensors
from foreplan.runtime.world import ALONE, World
from foreplan.runtime.world.digests import Digests
from foreplan.runtime.world.first_rank import first_alone
from foreplan.runtime.world.stages import of_all_stages, of_other_stages, stages_of

FORMAT = "foreplan.checkpoint.1"
# One key of the file's metadata holds all of foreplan's: the safetensors library writes keys in any order.
KEY = "foreplan"
_RESERVED = "__metadata__"


def save_checkpoint(
    path: str,
    program: Program,
    places: Mapping[str, Place],
    averages: Mapping[str, Place] | None = None,
    world: World = ALONE,
) -> None:
    """Write parameters, buffers and state: the same bytes for the same content. Constants belong to the model and are
    left out, and so are accumulators, which are zero between steps.

    Args:
        averages: where the averages of weights lie, to be written in the place of these, and no state; None: all as it
            is.
        world: see `write_tensors`.

    Raises:
        UsageError, SessionError: the file cannot be written; an older one at the same place is as it was.
    """
    kept = [slot for slot in _kept(program) if averages is None or slot.kind is not Kind.STATE]
    places = {**places, **(averages or {})}
    tensors = {_key(slot): (slot, places[slot.name]) for slot in kept}
    if program.is_stage:
        tensors = of_all_stages(stages_of(world, program), tensors)
    state = sorted(key for key, (slot, _) in tensors.items() if slot.kind is Kind.STATE)
    about = json.dumps({"format": FORMAT, "model": program.model, "state": state}, ensure_ascii=False)
    write_tensors(path, tensors, {KEY: about}, world)


def write_tensors(
    path: str, tensors: Mapping[str, tuple[Slot, Place]], metadata: Mapping[str, str], world: World = ALONE
) -> None:
    """Write stored values to a safetensors file, by the names given: the same bytes for the same content.

    Args:
        world: the ranks, all of which call this, and the first of which writes; the file is there when any returns.

    Raises:
        UsageError, SessionError: the file cannot be written; an older one at the same place is as it was.
    """
    # As the safetensors library lays files out: larger elements first, so that all are aligned, then by name.
    ordered = sorted(tensors, key=lambda name: (-tensors[name][0].operand.type.dtype.numpy.itemsize, name))
    header: dict[str, Any] = {_RESERVED: dict(metadata)}
    end = 0
    for name in ordered:
        type, begin = tensors[name][0].operand.type, end
        end += type.nbytes
        header[name] = {"dtype": TYPES[type.dtype.name], "shape": type.shape, "data_offsets": [begin, end]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    content = _content(ordered, tensors)  # which all ranks read
    with first_alone(world, "a file to be written", content) as writes:
        if writes:
            with open_atomically(path) as file:
                file.write(len(text).to_bytes(8, "little") + text)
                for part in content:
                    file.write(part)


def _content(names: Sequence[str], tensors: Mapping[str, tuple[Slot, Place]]) -> Iterator[memoryview]:
    """The bytes of each tensor."""
    for name in names:
        slot, place = tensors[name]
        if slot.operand.type.size:  # NumPy cannot view a value of no bytes as bytes
            array = place.read().astype(slot.operand.type.dtype.numpy, copy=False)
            yield np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def load_checkpoint(
    path: str,
    program: Program,
    places: Mapping[str, Place],
    state: bool = True,
    strict: bool = True,
    names: Names = AS_THEY_ARE,
    begun: Callable[[], None] = lambda: None,
    digests: Digests | None = None,
    origin: ModuleOrigin = NO_MODULE,
) -> tuple[Loaded, bool]:
    """Read a checkpoint into the stored values with little further memory: all that is wanted, or nothing if anything
    in the file is wrong.

    A file without state leaves the program's state as it is. A program without state (inference) ignores the file's.

    Args:
        state: False reads only parameters and buffers, whatever state the file has. Files that are read by other names,
            or not strictly, are read so as well.
        strict, names: see `foreplan.runtime.matching.match`.
        begun: called after all checks, before the first value is written.
        digests: note what is read, and know the ranks, all of which call this; None: there is one. A stage passes over
            what other stages keep.
        origin: of the model, whose other names a file may have.

    Returns:
        What was read, and whether the file had everything that the program keeps from step to step.

    Raises:
        SessionError: the file cannot be read, or does not hold what the program needs.
    """
    digests = digests or Digests(ALONE)
    world = digests.world
    others = of_other_stages(stages_of(world, program), map(_key, _kept(program))) if program.is_stage else set[str]()
    with open_tensors(path) as file:
        as_saved = strict and not names
        slots = {_key(slot): slot for slot in _slots(file, program, state and as_saved, others)}
        wanted = [
            SessionValue(key, slot.operand.type.dtype.name, slot.operand.type.shape) for key, slot in slots.items()
        ]
        passed = (_state_in(file) | {_key(slot) for slot in _kept(program)} | others) - slots.keys()
        entries = {name: entry for name, entry in file.entries.items() if name not in passed}
        found, loaded = match(path, program.model, entries, wanted, names, strict, origin)
        begun()
        for key, each in found.items():
            read = partial(each.entry.read, transposed=each.transposed)
            places[slots[key].name].fill(digests.noting(slots[key].name, read))
    return loaded, as_saved and len(found) == len(_kept(program))


def _kept(program: Program) -> list[Slot]:
    return [slot for slot in program.tensors if slot.kind.is_kept]


def _key(slot: Slot) -> str:
    """A value's name in a file. The file needs one name itself: values of this name (and any dots) get one more dot."""
    return f"{slot.name}." if slot.name.rstrip(".") == _RESERVED else slot.name


def _state_in(file: TensorFile) -> set[str]:
    """The names of the file's state; empty for a file that another tool wrote."""
    about: Any = json.loads(file.metadata.get(KEY, "{}"))
    names = about.get("state", []) if isinstance(about, dict) else []
    return {name for name in names if isinstance(name, str)} if isinstance(names, list) else set()


def _slots(file: TensorFile, program: Program, state: bool, others: Set[str]) -> list[Slot]:
    """The slots to load: the model's own, and the state if it is wanted and the file has it.

    Raises:
        SessionError: the file has the state of another optimizer.
    """
    kept, names = _kept(program), file.entries.keys()
    own, theirs = {_key(slot) for slot in kept if slot.kind is Kind.STATE}, _state_in(file)
    with_state = state and bool(own) and bool(names & (own | theirs))
    same_model = all(_key(slot) in names for slot in kept if slot.kind is not Kind.STATE)
    if with_state and same_model:  # what a file of another model lacks is told elsewhere
        missing = [key for slot in kept if (key := _key(slot)) in own - names]
        foreign = sorted((names & theirs) - {_key(slot) for slot in kept} - others)
        # A program without updates, such as one that returns gradients, may have a random state, but no other.
        if missing or (foreign and program.step_count is not None):
            difference = f"it has no {missing[0]!r}" if missing else f"its {foreign[0]!r} has no place here"
            raise SessionError(
                f"{file.path!r} has the state of another optimizer: {difference}. To start anew from its parameters, "
                "load it with state=False (--weights instead of --resume)"
            )
    return [slot for slot in kept if with_state or _key(slot) not in own]
