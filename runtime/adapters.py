"""Adapters in files as PEFT has them: a folder with `adapter_model.safetensors` and `adapter_config.json`.

The tensors are called `base_model.model.` and then as the session calls them. What else is trained, such as a new head,
is in the file too, as PEFT's `modules_to_save`.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from foreplan.base.errors import SessionError, UsageError
from foreplan.base.files import write_atomically
from foreplan.base.untrusted import contents
from foreplan.graph import Kind
from foreplan.graph.adapter import Adapter, adapters_in, is_of_adapter
from foreplan.lower.program import Program, Slot
from foreplan.runtime.adapter_config import Config
from foreplan.runtime.checkpoint import write_tensors
from foreplan.runtime.engine import Place
from foreplan.runtime.tensor_files import TensorFile, open_tensors
from foreplan.runtime.world import ALONE, World
from foreplan.runtime.world.digests import Digests
from foreplan.runtime.world.first_rank import first_alone
from foreplan.runtime.world.stages import of_all_stages, stages_of

PREFIX = "base_model.model."
_FLOATS = {"float16", "bfloat16", "float32", "float64"}  # each of which is read as another
TENSORS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def adapters_of(program: Program) -> tuple[Adapter, ...]:
    """The adapters among what a program stores.

    Raises:
        SessionError: there are none.
    """
    return _adapters_in(program.model, program.tensors)


def _adapters_in(model: str, slots: Sequence[Slot]) -> tuple[Adapter, ...]:
    found = adapters_in([(slot.name, slot.init) for slot in slots], {slot.name for slot in slots})
    if not found:
        raise SessionError(f"{model!r} has no adapters: foreplan.lora(graph, …), or --lora, gives a model some")
    return found


@dataclass(frozen=True)
class Trained:
    """What of a model goes into the files.

    Attributes:
        ranks: the adapters, with the rank of each.
        modules: those with other weights that are trained.
        names: of all that is written.
    """

    ranks: Mapping[Adapter, int]
    modules: frozenset[str]
    names: frozenset[str]


def prepare(folder: str, program: Program, world: World = ALONE) -> Trained:
    """Make the folder for a program's adapters, and say what goes into it.

    Args:
        world: the ranks, all of which call this at the same time; of stages, they tell each other what they have.

    Raises:
        UsageError, SessionError: there are no adapters, or of two kinds, or the folder cannot be made.
    """
    found = _trained(program, world)
    if len({each.magnitude is None for each in found.ranks}) > 1:
        raise SessionError(
            f"{program.model!r} has adapters with magnitudes (DoRA) and without, and PEFT's files hold either: "
            "save(path) writes both"
        )
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise UsageError(f"the folder {folder!r} cannot be made: {error.strerror}") from None
    return found


def save_adapters(folder: str, program: Program, places: Mapping[str, Place], world: World = ALONE) -> None:
    """Write adapters, and other values that are trained, into a folder, which is made if it is not there.

    Raises:
        UsageError, SessionError: there are no adapters, or of two kinds, or the folder cannot be written.
    """
    trained = prepare(folder, program, world)
    slots = [slot for slot in program.tensors if slot.name in trained.names]
    tensors = {PREFIX + slot.name: (slot, places[slot.name]) for slot in slots}
    if program.is_stage:
        tensors = of_all_stages(stages_of(world, program), tensors)
    write_tensors(os.path.join(folder, TENSORS), tensors, {"format": "pt"}, world)
    config = _config(trained)
    with first_alone(world, "the adapters' configuration to be written") as writes:
        if writes:
            write_atomically(os.path.join(folder, CONFIG), json.dumps(config, indent=2, sort_keys=True) + "\n")


def load_adapters(
    folder: str, program: Program, places: Mapping[str, Place], begun: Callable[[], None], digests: Digests
) -> None:
    """Read what `save_adapters` or PEFT wrote: all of it, or nothing if anything is wrong.

    Args:
        begun: called after all checks, before the first value is written.
        digests: note what is read.

    Raises:
        SessionError: a file cannot be read, or is of another model, rank or alpha.
    """
    adapters = adapters_of(program)
    config = _read_config(os.path.join(folder, CONFIG))
    for each in adapters:
        rank = _rank(program.tensors, each)
        if (said := config.rank(each.module)) not in (None, rank):
            raise SessionError(
                f"the adapters in {folder!r} have rank {said} in {each.module!r}, and this model {rank}: "
                "give foreplan.lora their rank"
            )
        scale = config.scale(each.module, rank)
        if not math.isclose(scale, each.scale, rel_tol=1e-6):
            raise SessionError(
                f"the adapters in {folder!r} add {scale:g} times their product, and this model's {each.scale:g} times: "
                "give foreplan.lora their rank and alpha"
            )
        if config.is_dora != (each.magnitude is not None):
            raise SessionError(
                f"the adapters in {folder!r} have use_dora = {config.is_dora}, and this model's "
                f"{each.module!r} has not: give foreplan.lora the same dora"
            )
    factors = {PREFIX + name for each in adapters for name in each.stored}
    own = (Kind.PARAMETER, Kind.FROZEN, Kind.BUFFER)
    path, slots = os.path.join(folder, TENSORS), {PREFIX + s.name: s for s in program.tensors if s.kind in own}
    with open_tensors(path) as file:
        _check_tensors(file, program.model, slots, factors)
        begun()
        for key, entry in file.entries.items():
            places[slots[key].name].fill(digests.noting(slots[key].name, entry.read))


def _check_tensors(file: TensorFile, model: str, slots: Mapping[str, Slot], needed: set[str]) -> None:
    """Check that a file has what is needed, and only what has a place.

    Raises:
        SessionError: it has not; names the first tensor.
    """
    other = f"{file.path!r} is of other adapters than {model!r} has"
    found = file.entries
    for wrong, why in ((needed - found.keys(), "it lacks"), (found.keys() - slots.keys(), "it has")):
        if wrong:
            raise SessionError(f"{other}: {why} {min(wrong)!r}")
    for key, entry in found.items():
        type = slots[key].operand.type
        converts = entry.dtype in _FLOATS and type.dtype.name in _FLOATS
        if entry.shape != type.shape or (entry.dtype != type.dtype.name and not converts):
            raise SessionError(f"{other}: its {key!r} is {entry}, and not {type}; give foreplan.lora their rank")


def merged(program: Program, state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The state of the model without adapters: each weight is what its adapter makes of it."""
    stored = [(slot.name, slot.init) for slot in program.tensors]
    found = dict(state)
    for each in adapters_in(stored, found):
        weight = found[each.weight]
        wide = np.float32 if weight.dtype.itemsize < 4 else weight.dtype
        a, b, *magnitude = (found.pop(name).astype(wide) for name in each.stored)
        found[each.weight] = each.adapted(weight.astype(wide), a, b, *magnitude).astype(weight.dtype)
    return found


def _exactly(module: str) -> str:
    """A key of PEFT's patterns, which are regular expressions for the ends of names, that means one module."""
    return "^" + module.replace(".", r"\.")


def _plain(number: float) -> int | float:
    return int(number) if number == int(number) else number


def _read_config(path: str) -> Config:
    """The configuration in a file, of which nothing is trusted.

    Raises:
        SessionError: it cannot be read, or is of other adapters than LoRA's.
    """
    try:
        if os.path.exists(path) and not os.path.isfile(path):
            raise SessionError(f"{path!r} is no regular file")
        found = json.loads(contents(path, "adapters"))
    except OSError as error:
        raise SessionError(f"{path!r} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise SessionError(f"{path!r} is not JSON") from None
    except UsageError as error:
        raise SessionError(str(error)) from None
    try:
        return Config.of(found)
    except ValueError as error:
        raise SessionError(f"{path!r} {error}") from None


def _rank(slots: Iterable[Slot], adapter: Adapter) -> int:
    (slot,) = [slot for slot in slots if slot.name == adapter.a]
    return slot.operand.type.shape[0]


def _trained(program: Program, world: World) -> Trained:
    """What a program trains: adapters, and modules with other weights, of which all that they store is written."""
    slots = _of_all_stages(program, world) if program.is_stage else program.tensors
    adapters = _adapters_in(program.model, slots)
    own = [slot for slot in slots if slot.kind in (Kind.PARAMETER, Kind.FROZEN, Kind.BUFFER)]
    own = [slot for slot in own if not is_of_adapter(slot.name)]
    modules = {slot.name.rpartition(".")[0] for slot in own if slot.kind is Kind.PARAMETER} - {""}
    names = {slot.name for slot in own if slot.kind is Kind.PARAMETER or slot.name.rpartition(".")[0] in modules}
    names |= {name for each in adapters for name in each.stored}
    return Trained({each: _rank(slots, each) for each in adapters}, frozenset(modules), frozenset(names))


def _of_all_stages(program: Program, world: World) -> Sequence[Slot]:
    """What all stages store, which may have an adapter between them. Of what it begins with, an adapter alone is told:
    the rest may be large.
    """
    own = [slot if is_of_adapter(slot.name) else replace(slot, init=None) for slot in program.tensors]
    return list({slot.name: slot for slots in stages_of(world, program).gather(own) for slot in slots}.values())


def _config(trained: Trained) -> dict[str, Any]:
    """The configuration, in PEFT's words."""
    adapters, ranks = list(trained.ranks), {each.module: rank for each, rank in trained.ranks.items()}
    alphas = {each.module: each.scale * ranks[each.module] for each in adapters}
    rank, alpha = (Counter(found.values()).most_common(1)[0][0] for found in (ranks, alphas))
    return {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": None,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": _plain(alpha),
        "lora_dropout": 0.0,
        "target_modules": sorted(ranks),
        "rank_pattern": {_exactly(name): r for name, r in ranks.items() if r != rank},
        "alpha_pattern": {_exactly(name): _plain(a) for name, a in alphas.items() if a != alpha},
        "fan_in_fan_out": all(each.transposed for each in adapters),
        "bias": "none",
        "init_lora_weights": True,
        "use_rslora": False,
        "use_dora": adapters[0].magnitude is not None,
        "modules_to_save": sorted(trained.modules) or None,
    }
