"""Plan files: a program and its plan as text, one record a line, the same bytes every time; untrusted when read."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from foreplan import __version__
from foreplan.errors import ForeplanError, PlanError
from foreplan.files import write_atomically
from foreplan.graph import Array, Initializer, Kind, Stored, TensorType
from foreplan.graph.op import parse_op
from foreplan.graph.text import parse_init
from foreplan.graph.types import tensor_type
from foreplan.lower import Call, DeviceProfile, Operand, Program, Slot
from foreplan.planner import (
    Action,
    Category,
    Certificate,
    Overwrite,
    Part,
    Plan,
    Region,
    Role,
    Step,
    Value,
    bytes_by_category,
    check_problem,
)
from foreplan.runtime.plancheck import check_calls, slots_of
from foreplan.runtime.update import Update

FORMAT = "foreplan.plan.2"
Record = TypeVar("Record")


def save_plan(path: str, program: Program, plan: Plan, update: Update | None = None) -> None:
    """Write a program and its plan, and those of its update. Parameters are described, not stored; small constants are
    stored, and so is the machine code that a program has.

    Raises:
        UsageError, SessionError: the file cannot be written; an older one at the same place is as it was.
    """
    write_atomically(path, plan_text(program, plan, update, os.path.dirname(os.path.realpath(path))))


def plan_text(program: Program, plan: Plan, update: Update | None = None, folder: str = "") -> str:
    """The content of a plan file: JSON whose lists have one record a line.

    Args:
        program: what runs; the body, where there is an update.
        plan: its plan.
        update: the other half of a step that accumulates gradients.
        folder: where the file will be; the files with weights are named from there, so that all can move together.
    """
    lines = [*_half(program, plan, folder)]
    if update is not None:
        lines[-1] += ","
        lines += [f'"micro_batches": {update.micro_batches},', '"update": {']
        lines += [*_half(update.program, update.plan, folder), "}"]
    body = "\n".join(lines)
    digest = hashlib.sha256(body.encode()).hexdigest()
    return f'{{"format": "{FORMAT}",\n"sha256": "{digest}",\n{body}\n}}\n'


def _half(program: Program, plan: Plan, folder: str) -> Iterator[str]:
    header = {
        "model": program.model,
        "target": program.target,
        "device": None if program.profile is None else dataclasses.asdict(program.profile),
        "foreplan": __version__,
        "problem": plan.problem_digest,
        "budget": plan.budget,
        "arena_bytes": plan.arena_bytes,
        "lower_bound_bytes": plan.lower_bound_bytes,
        "order_lower_bound_bytes": plan.order_lower_bound_bytes,
        "categories": {str(k): v for k, v in bytes_by_category(plan, program, plan.certificate.peak_step).items()},
        "heights": list(plan.heights),
        "certificate": dataclasses.asdict(plan.certificate),
        "notes": list(program.notes),
    }
    yield f'"header": {_json(header)},'
    yield from _section("regions", ([r.name, r.on_device] for r in program.regions))
    yield from _section("values", (_value_record(value) for value in program.values))
    used = {step.action for step in plan.steps}  # what else the kernels of others are would never run
    calls = [call if i in used else replace(call, payload=b"") for i, call in enumerate(program.calls)]
    yield from _section("actions", (_action_record(a, c) for a, c in zip(program.actions, calls)))
    yield from _section("slots", (_slot_record(role, slot, folder) for role, slot in slots_of(program)))
    yield from _section("starts", (list(pair) for pair in plan.starts))
    yield from _section("steps", ([s.action, list(s.reads), list(s.writes), s.workspace] for s in plan.steps))
    if program.code:
        yield from _section("code", ([key, base64.b64encode(code).decode()] for key, code in program.code))
    yield from _section("ends", (list(pair) for pair in plan.ends), last=True)


def _json(record: Any) -> str:
    return json.dumps(record, ensure_ascii=False, separators=(",", ":"))


def _section(name: str, records: Iterator[Any], last: bool = False) -> Iterator[str]:
    lines = [_json(record) for record in records]
    yield f'"{name}": ['
    yield from (line + "," for line in lines[:-1])
    yield from lines[-1:]
    yield "]" if last else "],"


def _value_record(value: Value) -> list[Any]:
    fields = [value.name, value.nbytes, value.alignment, value.region, str(value.category), value.role.name.lower()]
    return fields if value.home < 0 else [*fields, value.home]


def _operand_record(operand: Operand) -> list[Any]:
    record = [operand.value, operand.offset, str(operand.type)]
    return record if operand.strides == operand.type.strides else [*record, list(operand.strides)]


def _action_record(action: Action, call: Call) -> dict[str, Any]:
    record: dict[str, Any] = {
        "name": action.name,
        "op": str(call.op),
        "kernel": call.kernel,
        "in": [_operand_record(operand) for operand in call.inputs],
        "out": [_operand_record(operand) for operand in call.outputs],
        "workspace": [action.workspace, action.workspace_region],
        "cost": [action.flops, action.nbytes, action.nanoseconds],
    }
    if action.overwrites:
        record["overwrites"] = [[pair.write, pair.read, pair.required] for pair in action.overwrites]
    if action.effect:
        record["effect"] = True
    if action.parts:
        record["parts"] = [[part.write, part.read, part.offset] for part in action.parts]
    if call.source:
        record["source"] = call.source
    if call.payload:
        record["payload"] = base64.b64encode(call.payload).decode()
    return record


def _slot_record(role: str, slot: Slot, folder: str) -> dict[str, Any]:
    record: dict[str, Any] = {
        "role": role,
        "name": slot.name,
        "kind": str(slot.kind),
        "at": _operand_record(slot.operand),
    }
    if slot.init is not None:
        record["init"] = _init_record(slot.init, folder)
    if slot.valid is not None:
        record["valid"] = list(slot.valid)
    return record


def _init_record(init: Initializer, folder: str) -> Any:
    if isinstance(init, Array):
        return {"base64": base64.b64encode(np.ascontiguousarray(init.array).tobytes()).decode()}
    if isinstance(init, Stored):
        file = os.path.relpath(init.path, folder or None)
        place = {"file": file, "bytes": init.file_nbytes, "offset": init.offset, "before": init.before.hex()}
        return place | {"type": str(init.type)}
    return str(init)


def read_plan(path: str) -> tuple[Program, Plan, Update | None]:
    """Read a plan file and check all of it but the schedules themselves, which `verify` proves.

    Raises:
        PlanError: the file is missing, damaged, edited, of another version, or contradicts itself.
    """
    try:
        text = Path(path).read_bytes().decode()
    except OSError as error:
        raise PlanError(f"the plan {path!r} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise PlanError(f"{path!r} is not a plan file") from None
    try:
        return _parse(text, os.path.dirname(os.path.realpath(path)))
    except PlanError as error:
        raise PlanError(f"{path!r}: {error}; plan the model again") from None
    except ForeplanError as error:
        raise PlanError(f"{path!r} is damaged: {error}; plan the model again") from None
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RecursionError, OverflowError) as error:
        raise PlanError(f"{path!r} is damaged ({type(error).__name__}: {error}); plan the model again") from None


def _parse(text: str, folder: str) -> tuple[Program, Plan, Update | None]:
    try:
        data = json.loads(text)
    except ValueError:
        raise PlanError("the file is no complete plan: it was truncated or edited") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise PlanError(f"the file is not a plan of the format {FORMAT}")
    body = text.split("\n", 2)[2].removesuffix("\n}\n")
    if hashlib.sha256(body.encode()).hexdigest() != data["sha256"]:
        raise PlanError("the file was edited or damaged after foreplan wrote it")
    update = None
    if "update" in data:
        update = Update(_int(data["micro_batches"]), *_read_half(data["update"], folder))
    return *_read_half(data, folder), update


def _read_half(data: Mapping[str, Any], folder: str) -> tuple[Program, Plan]:
    program, plan = _program(data, folder), _plan(data)
    check_calls(program, {step.action for step in plan.steps})
    check_problem(program)
    return program, plan


def _program(data: Mapping[str, Any], folder: str) -> Program:
    slots: dict[str, list[Slot]] = {role: [] for role in ("input", "stored", "ahead", "output", "gradient", "loss")}
    for record in data["slots"]:
        slots[record["role"]].append(_slot(record, folder))
    header = data["header"]
    return Program(
        values=_each(data["values"], _value),
        actions=_each(data["actions"], _action),
        regions=_each(data["regions"], lambda r: Region(_text(r[0]), bool(r[1]))),
        calls=_each(data["actions"], _call),
        target=_text(header["target"]),
        profile=_profile(header["device"]),
        model=_text(header["model"]),
        inputs=tuple(slots["input"]),
        stored=tuple(slots["stored"]),
        ahead=tuple(slots["ahead"]),
        outputs=tuple(slots["output"]),
        loss=slots["loss"][0] if slots["loss"] else None,
        gradients=tuple(slots["gradient"]),
        notes=_each(header["notes"], _text),
        code=_each(data.get("code", []), _code),
    )


def _code(record: Sequence[Any]) -> tuple[str, bytes]:
    from foreplan.gpu.nvrtc import figures

    code = base64.b64decode(_text(record[1]), validate=True)
    if not figures(code):
        raise ValueError("machine code without a kernel")
    return _text(record[0]), code


def _profile(record: Mapping[str, Any] | None) -> DeviceProfile | None:
    if record is None:
        return None
    return DeviceProfile(
        name=_text(record["name"]),
        flops_per_second=_int(record["flops_per_second"]),
        bytes_per_second=_int(record["bytes_per_second"]),
        bus_bytes_per_second=_int(record["bus_bytes_per_second"]),
        needs=_each(record["needs"], lambda pair: (_text(pair[0]), _text(pair[1]))),
    )


def _plan(data: Mapping[str, Any]) -> Plan:
    header = data["header"]
    certificate = header["certificate"]
    order_bound, budget = header["order_lower_bound_bytes"], header["budget"]
    return Plan(
        problem_digest=_text(header["problem"]),
        steps=_each(data["steps"], lambda s: Step(_int(s[0]), _each(s[1], _int), _each(s[2], _int), _int(s[3]))),
        starts=_each(data["starts"], lambda pair: (_int(pair[0]), _int(pair[1]))),
        ends=_each(data["ends"], lambda pair: (_int(pair[0]), _int(pair[1]))),
        heights=_each(header["heights"], _int),
        arena_bytes=_int(header["arena_bytes"]),
        lower_bound_bytes=_int(header["lower_bound_bytes"]),
        order_lower_bound_bytes=None if order_bound is None else _int(order_bound),
        certificate=Certificate(
            _int(certificate["peak_step"]),
            _text(certificate["placement"]),
            _text(certificate["order"]),
            _each(certificate["stages"], lambda stage: (_text(stage[0]), _int(stage[1]))),
        ),
        budget=None if budget is None else _int(budget),
    )


def _each(records: Any, read: Callable[[Any], Record]) -> tuple[Record, ...]:
    if not isinstance(records, list):
        raise ValueError("a list was expected")
    return tuple(read(record) for record in records)


def _int(value: Any) -> int:
    if type(value) is not int or abs(value) >= 1 << 62:
        raise ValueError(f"{value!r} is not a whole number in range")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a text")
    return value


def _value(record: Sequence[Any]) -> Value:
    name, nbytes, alignment, region, category, role = record[:6]
    home = _int(record[6]) if len(record) > 6 else -1
    return Value(_text(name), _int(nbytes), _int(alignment), _int(region), Category(category), Role[role.upper()], home)


def _operand(record: Sequence[Any]) -> Operand:
    type = tensor_type(_text(record[2]))
    strides = _each(record[3], _int) if len(record) > 3 else type.strides
    if len(strides) != type.rank:
        raise ValueError(f"{len(strides)} strides for {type}")
    return Operand(_int(record[0]), _int(record[1]), type, strides)


def _action(record: Mapping[str, Any]) -> Action:
    reads = tuple(dict.fromkeys(_int(operand[0]) for operand in record["in"]))
    return Action(
        name=_text(record["name"]),
        reads=reads,
        writes=tuple(_int(operand[0]) for operand in record["out"]),
        overwrites=_each(record.get("overwrites", []), lambda o: Overwrite(_int(o[0]), _int(o[1]), bool(o[2]))),
        workspace=_int(record["workspace"][0]),
        workspace_region=_int(record["workspace"][1]),
        flops=_int(record["cost"][0]),
        nbytes=_int(record["cost"][1]),
        nanoseconds=_int(record["cost"][2]),
        effect=bool(record.get("effect", False)),
        parts=_each(record.get("parts", []), lambda part: Part(*(_int(x) for x in part))),
    )


def _call(record: Mapping[str, Any]) -> Call:
    return Call(
        op=parse_op(_text(record["op"])),
        kernel=_text(record["kernel"]),
        inputs=_each(record["in"], _operand),
        outputs=_each(record["out"], _operand),
        node=_text(record["name"]),
        source=_text(record.get("source", "")),
        payload=base64.b64decode(record.get("payload", ""), validate=True),
    )


def _slot(record: Mapping[str, Any], folder: str) -> Slot:
    operand, name = _operand(record["at"]), _text(record["name"])
    valid = record.get("valid")
    return Slot(
        name=name,
        operand=operand,
        kind=Kind(record["kind"]),
        init=_init(record["init"], operand.type, name, folder) if "init" in record else None,
        valid=None if valid is None else (_int(valid[0]), _int(valid[1]), *(_int(other) for other in valid[2:])),
    )


def _init(record: Any, type: TensorType, name: str, folder: str) -> Initializer:
    if isinstance(record, str):
        return parse_init(record, type, f"the content of {name!r}")
    if "base64" in record:
        data = base64.b64decode(record["base64"], validate=True)
        return Array(np.frombuffer(data, type.dtype.numpy).reshape(type.shape))
    if tensor_type(_text(record["type"])) != type or _int(record["offset"]) < 0:
        raise ValueError(f"the content of {name!r} is {record['type']} at {record['offset']}, and not {type}")
    path = Path(os.path.abspath(os.path.join(folder, _text(record["file"]))))
    return Stored(path, record["offset"], type, _int(record["bytes"]), bytes.fromhex(_text(record["before"])))
