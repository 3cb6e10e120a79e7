"""Plan files: a program and its plan as text, one record a line, the same bytes every time."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from foreplan.base.files import write_atomically
from foreplan.graph import Array, Initializer, Stored
from foreplan.graph.flat import Flat
from foreplan.graph.shard import Sharded
from foreplan.lower import Call, Operand, Program, Slot
from foreplan.options import USUAL, Options
from foreplan.planner import Action, Plan, Value
from foreplan.planner.records import plan_records
from foreplan.runtime.plancheck import slots_of
from foreplan.runtime.update import Update
from foreplan.version import VERSION

FORMAT = "foreplan.plan.10"
DERIVED = ("accumulate",)  # options that follow from the rest of the file


def save_plan(path: str, program: Program, plan: Plan, update: Update | None = None, options: Options = USUAL) -> None:
    """Write a program and its plan, and those of its update. Parameters are described, not stored. Small constants and
    the program's machine code are stored.

    Raises:
        UsageError, SessionError: the file cannot be written; an older one at the same place is as it was.
    """
    write_atomically(path, plan_text(program, plan, update, options, os.path.dirname(os.path.realpath(path))))


def plan_text(
    program: Program, plan: Plan, update: Update | None = None, options: Options = USUAL, folder: str = ""
) -> str:
    """The content of a plan file: JSON whose lists have one record a line.

    Facts that follow from other records are left out, or checked against them when the file is read: see docs/trust.md.

    Args:
        program: what runs; the body, where there is an update.
        plan: its plan.
        update: the other half of a step that accumulates gradients.
        options: what the step was compiled with.
        folder: where the file will be; the weights' folder is named relative to it, so that both can move together.
    """
    header = {
        "foreplan": VERSION,
        "model": program.model,
        "target": program.target,
        "device": None if program.profile is None else dataclasses.asdict(program.profile),
        "options": {name: value for name, value in options.to_json().items() if name not in DERIVED},
    }
    root = weights_folder_of(program)
    if root is not None:
        header["weights"] = os.path.relpath(root, folder or None)
    lines = [f'"header": {_json(header)},']
    lines += _half(program, plan, (_slot_record(role, slot, root or "") for role, slot in slots_of(program)))
    if update is not None:
        lines[-1] += ","
        slots = (_slot_record(role, slot, None) for role, slot in slots_of(update.program))
        # The stored values are those of the body.
        lines += [
            f'"micro_batches": {update.micro_batches},',
            '"update": {',
            *_half(update.program, update.plan, slots),
        ]
        lines += ["}"]
    body = "\n".join(lines)
    return f'{{"format": "{FORMAT}",\n"sha256": "{digest_of(body)}",\n{body}\n}}\n'


def digest_of(body: str) -> str:
    """SHA-256 of all text after the digest in a plan file."""
    return hashlib.sha256(body.encode()).hexdigest()


def _half(program: Program, plan: Plan, slots: Iterable[Any]) -> Iterator[str]:
    records = plan_records(plan)
    base = {} if program.base is None else {"base": list(program.base)}
    yield f'"plan": {_json(records["plan"] | {"notes": list(program.notes)} | base)},'
    yield from _section("regions", ([r.name, r.on_device] for r in program.regions))
    yield from _section("values", (_value_record(value) for value in program.values))
    used = {step.action for step in plan.steps}  # payloads of unused kernels would never run
    calls = [call if i in used else replace(call, payload=b"") for i, call in enumerate(program.calls)]
    yield from _section("actions", (_action_record(a, c) for a, c in zip(program.actions, calls)))
    yield from _section("slots", slots)
    yield from _section("starts", records["starts"])
    yield from _section("steps", records["steps"])
    if program.code:
        yield from _section("code", ([key, base64.b64encode(code).decode()] for key, code in program.code))
    yield from _section("ends", records["ends"], last=True)


def _json(record: Any) -> str:
    return json.dumps(record, ensure_ascii=False, separators=(",", ":"))


def _section(name: str, records: Iterable[Any], last: bool = False) -> Iterator[str]:
    lines = [_json(record) for record in records]
    yield f'"{name}": ['
    yield from (line + "," for line in lines[:-1])
    yield from lines[-1:]
    yield "]" if last else "],"


def _value_record(value: Value) -> list[Any]:
    fields = [value.name, value.nbytes, value.alignment, value.region, str(value.category), value.role.name.lower()]
    named = [value.kept, value.copy_of] if value.kept or value.copy_of >= 0 else []
    return [*fields, value.home, *named] if named or value.home >= 0 else fields


def _operand_record(operand: Operand) -> list[Any]:
    record = [operand.value, operand.offset, str(operand.type)]
    if operand.blocks is not None:
        return [*record, str(operand.blocks)]
    if operand.holds is not None:
        return [*record, list(operand.strides), operand.holds.name]
    return record if operand.strides == operand.type.strides else [*record, list(operand.strides)]


def _action_record(action: Action, call: Call) -> dict[str, Any]:
    record: dict[str, Any] = {
        "name": action.name,
        "op": str(call.op),
        "kernel": call.kernel,
        "in": [_operand_record(operand) for operand in call.inputs],
        "out": [_operand_record(operand) for operand in call.outputs],
        "workspace": action.workspace,
        "nanoseconds": action.nanoseconds,
    }
    if action.overwrites:
        record["overwrites"] = [[pair.write, pair.read] for pair in action.overwrites]
    if waits := [v for v in action.reads if all(v != operand.value for operand in call.inputs)]:
        record["waits"] = waits
    if action.parts:
        record["parts"] = [[part.write, part.read, part.offset] for part in action.parts]
    if call.source:
        record["source"] = call.source
    if call.payload:
        record["payload"] = base64.b64encode(call.payload).decode()
    return record


def _slot_record(role: str, slot: Slot, folder: str | None) -> dict[str, Any]:
    """A slot. Files with weights are named relative to a folder; without one, stored slots have no content here."""
    record: dict[str, Any] = {"role": role, "name": slot.name, "at": _operand_record(slot.operand)}
    if role == "stored":
        record["kind"] = str(slot.kind)
    if slot.init is not None and (role != "stored" or folder is not None):
        record["init"] = _init_record(slot.init, folder)
    return record


def weights_folder_of(program: Program) -> str | None:
    """The folder that holds all files with weights, also in subfolders; None where there are none."""
    folders = {str(s.init.path.parent) for s in (*program.inputs, *program.tensors) if isinstance(s.init, Stored)}
    return os.path.commonpath(folders) if folders else None


def _init_record(init: Initializer, folder: str | None) -> Any:
    if isinstance(init, Array):
        return {"base64": base64.b64encode(np.ascontiguousarray(init.array).tobytes()).decode()}
    if isinstance(init, Stored):
        file = os.path.relpath(init.path, folder)
        place = {"file": file, "bytes": init.file_nbytes, "offset": init.offset, "before": init.before.hex()}
        return place | {"type": str(init.type)}
    if isinstance(init, Flat):
        members = [[each.name, each.start, str(each.type), _init_record(each.init, folder)] for each in init.members]
        return {"ranks": init.ranks, "stride": init.stride, "members": members}
    if isinstance(init, Sharded):
        shard, content = init.shard, _init_record(init.init, folder)
        return {"shard": [shard.ranks, shard.axis, shard.blocks], "type": str(init.type), "init": content}
    return str(init)
