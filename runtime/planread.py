"""Reading a plan file. It is untrusted: everything is checked here, except the schedules, which `verify` proves."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from foreplan.base.errors import ForeplanError, PlanError
from foreplan.base.files import confined
from foreplan.base.untrusted import contents
from foreplan.graph import Array, Initializer, Kind, Stored, TensorType
from foreplan.graph.blocks import Blocks
from foreplan.graph.flat import Flat, Member
from foreplan.graph.registry import parse_op
from foreplan.graph.shard import Shard, Sharded
from foreplan.graph.text import parse_init
from foreplan.graph.types import as_dtype, tensor_type
from foreplan.lower import Call, DeviceProfile, Operand, Program, Slot
from foreplan.lower.program import ARENA, HOST
from foreplan.lower.targets import engine_info
from foreplan.lower.valid import with_valid
from foreplan.options import Options
from foreplan.planner import Action, Category, Overwrite, Part, Plan, Region, Role, Value
from foreplan.planner.memory.order_bound import order_bound
from foreplan.planner.records import each, integer, plan_of, string
from foreplan.runtime.plancheck import check_program
from foreplan.runtime.planfile import FORMAT, digest_of, plan_text, weights_folder_of
from foreplan.runtime.update import Update
from foreplan.version import VERSION

_KINDS = {
    "input": Kind.INPUT,
    "ahead": Kind.INPUT,
    "output": Kind.ACTIVATION,
    "gradient": Kind.GRADIENT,
    "loss": Kind.ACTIVATION,
}


def read_plan(
    path: str, trust_code: bool = False, folder: str | Path | None = None
) -> tuple[Program, Plan, Update | None, Options]:
    """Read a plan file and check all of it, except the schedules, which `verify` proves.

    Args:
        trust_code: whether machine code that the file has may run.
        folder: where the files with weights are; None: in the plan's own folder or below.

    Raises:
        PlanError: the file is missing, damaged, edited, of another version, or contradicts itself; or it names weights
            that are elsewhere.
    """
    try:
        text = contents(path, "plan").decode()
    except OSError as error:
        raise PlanError(f"the plan {path!r} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise PlanError(f"{path!r} is not a plan file") from None
    program, plan, update, options = _checked(text, path)
    program = replace(_with_weights(program, path, folder), trusted=trust_code)
    if update is not None:
        kept = {slot.name: slot.init for slot in program.stored}
        stored = tuple(replace(slot, init=kept[slot.name]) for slot in update.program.stored)
        update = replace(update, program=replace(update.program, stored=stored, trusted=trust_code))
    return program, plan, update, options


def _with_weights(program: Program, path: str, folder: str | Path | None) -> Program:
    """The program with its weights in a folder that the user names, or in the plan's own."""
    base = os.path.dirname(os.path.realpath(path))
    named_from = base if folder is None else weights_folder_of(program)

    def there(name: str, init: Initializer) -> Initializer:
        if isinstance(init, Flat):
            members = (replace(each, init=there(each.name, each.init)) for each in init.members)
            return replace(init, members=tuple(members))
        if not isinstance(init, Stored):
            return init
        try:
            file = confined(base if folder is None else folder, os.path.relpath(init.path, named_from))
        except ValueError as error:
            raise PlanError(
                f"{path!r}: the weights of {name!r} are not in a place that a plan may name: {error}. If the "
                "model is there and you trust it, give its folder (weights_folder=…, --weights-folder)"
            ) from None
        return replace(init, path=file)

    def placed(slot: Slot) -> Slot:
        return slot if slot.init is None else replace(slot, init=there(slot.name, slot.init))

    return replace(program, inputs=tuple(map(placed, program.inputs)), stored=tuple(map(placed, program.stored)))


def _checked(text: str, path: str) -> tuple[Program, Plan, Update | None, Options]:
    try:
        return _parse(text, os.path.dirname(os.path.realpath(path)))
    except PlanError as error:
        raise PlanError(f"{path!r}: {error}; plan the model again") from None
    except ForeplanError as error:
        raise PlanError(f"{path!r} is damaged: {error}; plan the model again") from None
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RecursionError, OverflowError) as error:
        raise PlanError(f"{path!r} is damaged ({type(error).__name__}: {error}); plan the model again") from None


def _parse(text: str, folder: str) -> tuple[Program, Plan, Update | None, Options]:
    try:
        data = json.loads(text)
    except ValueError:
        raise PlanError("the file is no complete plan: it was truncated or edited") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise PlanError(f"the file is not a plan of the format {FORMAT}")
    if digest_of(text.split("\n", 2)[2].removesuffix("\n}\n")) != data["sha256"]:
        raise PlanError("the file was edited or damaged after foreplan wrote it")
    header = data["header"]
    if header["foreplan"] != VERSION:
        raise PlanError(f"it was written by foreplan {header['foreplan']!r}, and this is {VERSION}")
    about = Program((), (), (), target=string(header["target"]), model=string(header["model"]))
    about = replace(about, profile=_profile(header["device"]))
    weights = os.path.join(folder, string(header.get("weights", "")))
    program, plan = _half(data, about, weights, {})
    update = None
    if "update" in data:
        kept = {slot.name: slot for slot in program.stored}
        update = Update(integer(data["micro_batches"]), *_half(data["update"], about, weights, kept))
    elif any(slot.kind is Kind.ACCUMULATOR for slot in program.stored):
        raise PlanError("the file has the first half of a step, but not the second")
    options = _options(header["options"], program, update)
    if plan_text(program, plan, update, options, folder) != text:
        raise PlanError("the file holds something that foreplan does not write, or writes otherwise")
    return program, plan, update, options


def _options(record: Mapping[str, Any], program: Program, update: Update | None) -> Options:
    """The options of the step, which must fit its content."""
    derived = {"accumulate": 1 if update is None else update.micro_batches}
    if not isinstance(record, dict) or set(record) & set(derived):
        raise PlanError("its options are not as foreplan writes them")
    options = Options.from_json(record | derived)
    if engine_info(str(options.target)) is not engine_info(program.target):
        raise PlanError(f"it was compiled for {options.target}, but its step is for {program.target}")
    if (len(program.regions) > HOST) != bool(options.offload or options.to_host):
        raise PlanError("what it was compiled with and its regions do not agree on copies to host memory")
    if program.ahead and not options.prefetch:
        raise PlanError("it was compiled without second slots for inputs, but has some")
    return options


def _half(data: Mapping[str, Any], about: Program, folder: str, kept: Mapping[str, Slot]) -> tuple[Program, Plan]:
    """A program and its plan.

    Args:
        about: model and target.
        kept: slots of the other half, which hold the first contents of stored values.
    """
    program, plan = _program(data, about, folder, kept), plan_of(data)
    check_program(program, plan)
    return with_valid(program), replace(plan, order_lower_bound_bytes=order_bound(program))


def _program(data: Mapping[str, Any], about: Program, folder: str, kept: Mapping[str, Slot]) -> Program:
    slots: dict[str, list[Slot]] = {role: [] for role in ("input", "stored", "ahead", "output", "gradient", "loss")}
    for record in data["slots"]:
        slots[record["role"]].append(_slot(record, folder, kept))
    if len(slots["loss"]) > 1:
        raise PlanError("it has several losses")
    values = each(data["values"], _value)
    calls = each(data["actions"], lambda record: _call(record, values))
    return replace(
        about,
        values=values,
        actions=tuple(_action(record, call, values) for record, call in zip(data["actions"], calls)),
        regions=each(data["regions"], lambda r: Region(string(r[0]), bool(r[1]))),
        calls=calls,
        inputs=tuple(slots["input"]),
        stored=tuple(slots["stored"]),
        ahead=tuple(slots["ahead"]),
        outputs=tuple(slots["output"]),
        loss=slots["loss"][0] if slots["loss"] else None,
        gradients=tuple(slots["gradient"]),
        notes=each(data["plan"]["notes"], string),
        base=_base(data["plan"].get("base")),
        code=each(data.get("code", []), _code),
    )


def _base(record: Sequence[Any] | None) -> tuple[int, int] | None:
    if record is None:
        return None
    flops, nanoseconds = map(integer, record)
    return flops, nanoseconds


def _code(record: Sequence[Any]) -> tuple[str, bytes]:
    from foreplan.runtime.cuda.libraries.nvrtc import figures

    code = base64.b64decode(string(record[1]), validate=True)
    if not figures(code):
        raise ValueError("machine code without a kernel")
    return string(record[0]), code


def _profile(record: Mapping[str, Any] | None) -> DeviceProfile | None:
    if record is None:
        return None
    return DeviceProfile(
        name=string(record["name"]),
        flops_per_second=integer(record["flops_per_second"]),
        bytes_per_second=integer(record["bytes_per_second"]),
        bus_bytes_per_second=integer(record["bus_bytes_per_second"]),
        needs=each(record["needs"], lambda pair: (string(pair[0]), string(pair[1]))),
        memory_bytes=None if record["memory_bytes"] is None else integer(record["memory_bytes"]),
        narrow=string(record["narrow"]),
        link=string(record["link"]),
        per_node=None if record["per_node"] is None else integer(record["per_node"]),
    )


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{value!r} is neither true nor false")
    return value


def _value(record: Sequence[Any]) -> Value:
    name, nbytes, alignment, region, category, role = record[:6]
    home = integer(record[6]) if len(record) > 6 else -1
    kept, copy_of = (_flag(record[7]), integer(record[8])) if len(record) > 7 else (False, -1)
    is_one = string(name), integer(nbytes), integer(alignment), integer(region), Category(category), Role[role.upper()]
    return Value(*is_one, home, kept, copy_of)


def _operand(record: Sequence[Any]) -> Operand:
    type = tensor_type(string(record[2]))
    if len(record) == 4 and isinstance(record[3], str):
        return Operand(integer(record[0]), integer(record[1]), type, type.strides, blocks=_blocks(record[3], type))
    strides = each(record[3], integer) if len(record) > 3 else type.strides
    if len(strides) != type.rank:
        raise ValueError(f"{len(strides)} strides for {type}")
    holds = as_dtype(string(record[4])) if len(record) > 4 else None
    return Operand(integer(record[0]), integer(record[1]), type, strides, holds)


def _blocks(text: str, type: TensorType) -> Blocks:
    found = Blocks.parsed(text)
    if found.elements != type.size:
        raise ValueError(f"{text} has another number of elements than {type}")
    return found


def _action(record: Mapping[str, Any], call: Call, values: Sequence[Value]) -> Action:
    """An action; most of its fields follow from its call."""
    reads = tuple(dict.fromkeys([*(operand.value for operand in call.inputs), *each(record.get("waits", []), integer)]))
    writes = tuple(operand.value for operand in call.outputs)
    homes = [values[value].home for value in writes]
    pairs = each(record.get("overwrites", []), lambda o: (_index(o[0], writes), _index(o[1], reads)))
    parts = each(record.get("parts", []), lambda o: Part(_index(o[0], writes), _index(o[1], reads), integer(o[2])))
    try:
        cost = call.op.cost([operand.type for operand in call.inputs], [operand.type for operand in call.outputs])
    except NotImplementedError:
        raise PlanError(f"node {call.node!r}: no kernel runs {call.op.name}, which is decomposed") from None
    return Action(
        name=call.node,
        reads=reads,
        writes=writes,
        overwrites=tuple(Overwrite(w, r, call.op.completes or homes[w] == reads[r]) for w, r in pairs),
        workspace=integer(record["workspace"]),
        workspace_region=ARENA,
        flops=cost.flops,
        nbytes=cost.nbytes,
        nanoseconds=integer(record["nanoseconds"]),
        effect=any(home >= 0 for home in homes),
        parts=parts,
    )


def _index(value: Any, of: Sequence[Any]) -> int:
    if not 0 <= integer(value) < len(of):
        raise PlanError(f"a record names the number {value} of {len(of)}")
    return int(value)


def _call(record: Mapping[str, Any], values: Sequence[Value]) -> Call:
    """A call whose op takes its inputs and gives its outputs."""
    call = Call(
        op=parse_op(string(record["op"])),
        kernel=string(record["kernel"]),
        inputs=each(record["in"], _operand),
        outputs=each(record["out"], _operand),
        node=string(record["name"]),
        source=string(record.get("source", "")),
        payload=base64.b64decode(string(record.get("payload", "")), validate=True),
    )
    for operand in (*call.inputs, *call.outputs):
        _index(operand.value, values)
    inputs, outputs = ([operand.type for operand in side] for side in (call.inputs, call.outputs))
    try:
        given = call.op.result_types(inputs)
    except ForeplanError as error:
        raise PlanError(f"node {call.node!r}: {error}") from None
    if tuple(outputs) != given:
        raise PlanError(f"node {call.node!r}: {call.op} of {inputs} does not give {outputs}")
    return call


def _slot(record: Mapping[str, Any], folder: str, kept: Mapping[str, Slot]) -> Slot:
    operand, name, role = _operand(record["at"]), string(record["name"]), record["role"]
    kind = Kind(record["kind"]) if role == "stored" else _KINDS[role]
    init = _init(record["init"], operand.type, name, folder) if "init" in record else None
    if role == "stored" and name in kept:
        init = kept[name].init
    return Slot(name, operand, kind, init)


def _init(record: Any, type: TensorType, name: str, folder: str) -> Initializer:
    if isinstance(record, str):
        return parse_init(record, type, f"the content of {name!r}")
    if "members" in record:
        members = tuple(_member(each, folder) for each in record["members"])
        return Flat(members, integer(record["ranks"]), integer(record["stride"]))
    if "shard" in record:
        shard, whole = Shard(*(integer(each) for each in record["shard"])), tensor_type(string(record["type"]))
        return Sharded(shard, whole, _init(record["init"], whole, name, folder))
    if "base64" in record:
        data = base64.b64decode(record["base64"], validate=True)
        return Array(np.frombuffer(data, type.dtype.numpy).reshape(type.shape))
    held = tensor_type(string(record["type"]))
    if type not in (held, held.with_dtype(held.dtype.wide)) or integer(record["offset"]) < 0:
        raise ValueError(f"the content of {name!r} is {held} at {record['offset']}, and not {type}")
    path = Path(os.path.abspath(os.path.join(folder, string(record["file"]))))
    return Stored(path, record["offset"], held, integer(record["bytes"]), bytes.fromhex(string(record["before"])))


def _member(record: Sequence[Any], folder: str) -> Member:
    """A tensor of a row."""
    name, start, text, init = record
    type = tensor_type(string(text))
    return Member(string(name), integer(start), type, _init(init, type, name, folder))
