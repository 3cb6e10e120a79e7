"""Plan files: the same bytes each time, everything back as it was, and nothing that was tampered with runs."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import foreplan as fp
from foreplan.runtime.planfile import FORMAT, plan_text
from tests.profile import pick
from tests.runtime.test_session import batch, classifier, compiled, rows

NOISE = '0123456789"[]{},:x\n'  # characters that plan files are damaged with


def reseal(text: str) -> str:
    """A changed plan file with a digest that fits again, as somebody who means harm would write it."""
    body = text.split("\n", 2)[2].removesuffix("\n}\n")
    head = text.split("\n", 2)[0]
    return f'{head}\n"sha256": "{hashlib.sha256(body.encode()).hexdigest()}",\n{body}\n}}\n'


def test_a_plan_read_back_is_the_plan_and_runs_the_same(tmp_path: Path) -> None:
    step = compiled(classifier(dropout=0.2))
    step.save(tmp_path / "step.plan")
    again = fp.load_plan(tmp_path / "step.plan")
    assert again.plan == step.plan
    assert again.program.digest == step.program.digest
    assert again.program.calls == step.program.calls
    assert again.bind(seed=1).step(batch(0)).loss == step.bind(seed=1).step(batch(0)).loss
    again.save(tmp_path / "again.plan")
    assert (tmp_path / "again.plan").read_bytes() == (tmp_path / "step.plan").read_bytes()


@pytest.mark.parametrize("how", ["in place", "prefetch", "offload", "gradients", "in parts"])
def test_all_that_a_program_can_have_is_read_back(tmp_path: Path, how: str) -> None:
    step = {
        "in place": lambda: compiled(fp.trace(rows, fp.spec((8, 16)))),
        "prefetch": lambda: compiled(prefetch=True),
        "offload": lambda: compiled(classifier(batch=256), offload=True),
        "gradients": lambda: compiled(optimizer=None),
        "in parts": lambda: fp.compile(fp.models.build("conv_chain:size=32"), budget=0.9),
    }[how]()
    step.save(tmp_path / "step.plan")
    again = fp.load_plan(tmp_path / "step.plan")
    described = (
        "values",
        "actions",
        "regions",
        "inputs",
        "ahead",
        "outputs",
        "gradients",
        "loss",
        "calls",
        "notes",
        "base",
    )
    for name in described:
        assert getattr(again.program, name) == getattr(step.program, name), name
    assert (step.program.base is not None) == (how == "in parts")
    assert again.plan == step.plan and again.program.digest == step.program.digest
    again.save(tmp_path / "again.plan")
    assert (tmp_path / "again.plan").read_bytes() == (tmp_path / "step.plan").read_bytes()
    action = max(step.program.actions, key=lambda action: len(action.parts))
    assert len(action.parts) == (2 if how == "in place" else 0)


def test_the_bytes_do_not_depend_on_the_hash_seed() -> None:
    code = (
        "import foreplan as fp\n"
        "from foreplan.runtime.planfile import plan_text\n"
        "step = fp.compile(fp.models.build('resnet18:batch=1,size=32,classes=10'), fp.losses.cross_entropy,"
        " fp.optim.Nesterov(0.1))\n"
        "print(plan_text(step.program, step.plan))"
    )
    texts = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in pick(("0", "77"), ("0", "77"), ("0", "1", "77"))
    }
    assert len(texts) == 1


@pytest.fixture(scope="module")
def text() -> str:
    step = compiled()
    return plan_text(step.program, step.plan)


def refusals(tmp_path: Path, text: str, tries: int, damage: Callable[[random.Random, list[str]], None]) -> int:
    """How many of the plan files whose bodies were damaged, and sealed again, are refused, with an error for people."""
    rng, path = random.Random(0), tmp_path / "damaged.plan"
    head, digest, body = text.split("\n", 2)
    count = 0
    for _ in range(tries):
        damaged = list(body)
        damage(rng, damaged)
        path.write_text(reseal(f"{head}\n{digest}\n{''.join(damaged)}"))
        try:
            fp.load_plan(path).bind()
        except fp.ForeplanError:
            count += 1
    return count


def refused(tmp_path: Path, text: str, match: str) -> None:
    path = tmp_path / "changed.plan"
    path.write_text(text)
    with pytest.raises(fp.PlanError, match=match):
        fp.load_plan(path)


def test_edited_and_truncated_files_are_refused(tmp_path: Path, text: str) -> None:
    refused(tmp_path, text.replace('"conv/conv"', '"conv/conw"', 1), "edited or damaged")
    for keep in (0, 1, 100, len(text) // 2, len(text) - 3):
        refused(tmp_path, text[:keep], "truncated or edited|not a plan")
    refused(tmp_path, "{}", "not a plan of the format")
    refused(tmp_path, text.replace(FORMAT, "foreplan.plan.0"), "not a plan of the format")
    with pytest.raises(fp.PlanError, match="cannot be read"):
        fp.load_plan(tmp_path / "missing.plan")


def edited(text: str, edit: Callable[[dict[str, Any]], object]) -> str:
    """A plan file with other records, one a line as foreplan writes them, and a digest that fits."""
    data = json.loads(text)
    edit(data)
    return sealed(data)


def sealed(data: dict[str, Any]) -> str:
    """What a plan file holds, as text with a digest that fits."""
    lines: list[str] = []
    for key, part in data.items():
        if key == "update":
            lines += ['"update": {', *_sections(part), "},"]
        elif key not in ("format", "sha256"):
            lines += _sections({key: part})
            lines[-1] += ","
    lines[-1] = lines[-1].removesuffix(",")
    return reseal("\n".join([f'{{"format": "{data["format"]}",', "", *lines]) + "\n}\n")


def _sections(data: dict[str, Any]) -> list[str]:
    lines: list[str] = []
    for key, part in data.items():
        if isinstance(part, list):
            records = [_json(record) + "," for record in part]
            lines += [f'"{key}": [', *records[:-1], *(record.removesuffix(",") for record in records[-1:]), "],"]
        else:
            lines.append(f'"{key}": {_json(part)},')
    return [*lines[:-1], *(line.removesuffix(",") for line in lines[-1:])]


def _json(record: Any) -> str:
    return json.dumps(record, ensure_ascii=False, separators=(",", ":"))


def change(key: str, edit: Callable[[Any], None]) -> Callable[[dict[str, Any]], None]:
    return lambda data: edit(data[key])


def first_with(records: list[dict[str, Any]], word: str) -> dict[str, Any]:
    return next(record for record in records if word in record["op"])


def slot(data: dict[str, Any], role: str, number: int = 0) -> dict[str, Any]:
    """A slot's record."""
    found: dict[str, Any] = [record for record in data["slots"] if record["role"] == role][number]
    return found


def value_of(data: dict[str, Any], role: str) -> list[Any]:
    """The value's record of the first slot with this role."""
    found: list[Any] = data["values"][slot(data, role)["at"][0]]
    return found


def targets(data: dict[str, Any]) -> dict[str, Any]:
    """The slot of the integer input."""
    found: dict[str, Any] = next(record for record in data["slots"] if "int64" in record["at"][2])
    return found


def to_decompose(record: dict[str, Any]) -> None:
    """A gradient of batch normalisation becomes the op itself, of the same results."""
    record.update({"op": "batch_norm_train(epsilon=1e-05)", "in": record["in"][:3], "overwrites": []})


HARMFUL = {
    "an input of another type": (
        lambda data: targets(data)["at"].__setitem__(2, targets(data)["at"][2].replace("int64", "float32")),
        "for itself",
    ),
    "a parameter of another type": (
        lambda data: slot(data, "stored")["at"].__setitem__(2, slot(data, "stored")["at"][2].replace("float", "int")),
        "no content of int32|which holds int32",
    ),
    "two slots on one value": (
        lambda data: slot(data, "stored", 1).update(at=slot(data, "stored")["at"]),
        "for itself",
    ),
    "a parameter without a slot": (lambda data: data["slots"].remove(slot(data, "stored")), "it is no slot's"),
    "an input without a slot": (lambda data: data["slots"].remove(slot(data, "input")), "it is no slot's"),
    "a loss of several elements": (
        lambda data: slot(data, "loss").update(at=slot(data, "stored")["at"]),
        "must be a floating-point scalar",
    ),
    "two losses": (lambda data: data["slots"].append(slot(data, "loss")), "several losses"),
    "a valid range": (lambda data: targets(data).update(valid=[-9, 9]), "does not write"),
    "a bound that is the arena": (
        change("plan", lambda p: p.update(order_lower_bound_bytes=p["arena_bytes"])),
        "does not write",
    ),
    "a parameter taken for a constant": (lambda data: slot(data, "stored").update(kind="constant"), "changes, and no"),
    "a state taken for a parameter": (
        lambda data: next(x for x in data["slots"] if x.get("kind") == "state").update(kind="parameter"),
        "its region is 1, and must be 0",
    ),
    "a sum over micro-batches in a step without": (
        lambda data: next(x for x in data["slots"] if x.get("kind") == "state").update(kind="accumulator"),
        "its category is|first half",
    ),
    "two slots of one name": (
        lambda data: slot(data, "stored", 1).update(name=slot(data, "stored")["name"]),
        "two inputs and stored values are named",
    ),
    "two values of one name": (
        lambda data: data["values"][3].__setitem__(0, data["values"][2][0]),
        "values 2 and 3 have the same name",
    ),
    "a value in another region": (lambda data: value_of(data, "input").__setitem__(3, 0), "its region is 0"),
    "a value of another category": (
        lambda data: value_of(data, "input").__setitem__(4, "outputs"),
        "its category is outputs, and must be inputs",
    ),
    "a looser alignment": (change("values", lambda v: v[5].__setitem__(2, 1)), "its alignment is 1, and must be 64"),
    "an input that is kept": (lambda data: value_of(data, "input").__setitem__(5, "stored"), "its role"),
    "an output that is nobody's": (
        change("values", lambda v: next(x for x in v if x[5] == "transient").__setitem__(5, "output")),
        "its role is 2, and must be 0|end",
    ),
    "a workspace where none is needed": (
        lambda data: next(s for s in data["steps"] if not data["actions"][s[0]]["workspace"]).__setitem__(3, 64),
        "needs no workspace",
    ),
    "another version's": (change("header", lambda h: h.update(foreplan="9.0")), "written by foreplan '9.0'"),
    "a number as a truth": (change("regions", lambda r: r[0].__setitem__(1, 1)), "does not write"),
    "an unknown key": (lambda data: data.update(extra=1), "does not write"),
    "a number too many": (change("steps", lambda s: s[0].append(0)), "does not write"),
    "no machine": (change("header", lambda h: h.update(device=None)), "everything that it was made for"),
    "a gradient of nothing": (
        lambda data: data["slots"].append(slot(data, "loss") | {"role": "gradient"}),
        "no such parameter",
    ),
    "an op that is decomposed": (
        change("actions", lambda a: to_decompose(first_with(a, "norm_grad"))),
        "no kernel runs batch_norm_train",
    ),
    "another op of the same types": (
        change("actions", lambda a: first_with(a, "matmul").update(op="matmul(x=1)")),
        "no attribute",
    ),
    "less workspace": (change("actions", lambda a: first_with(a, "conv").update(workspace=0)), "workspace"),
    "an operand outside its value": (
        change("actions", lambda a: first_with(a, "conv")["in"][0].__setitem__(1, 4096)),
        "reads bytes",
    ),
    "an output whose elements share bytes": (
        lambda data: first_with(data["actions"], "matmul")["out"][0].append([0, 0]),
        "an output must be a whole value",
    ),
    "a stride that leaves the value": (
        change("actions", lambda a: first_with(a, "map")["in"][0].append([10**6] * 4)),
        "reads bytes|strides",
    ),
    "parts that no kernel finds": (
        change("actions", lambda a: first_with(a, "matmul").update(parts=[[0, 0, 0]])),
        "does not find input|cannot lie in",
    ),
    "an action's reads cut": (change("actions", lambda a: first_with(a, "conv")["in"].pop()), "."),
    "an offset moved": (change("steps", lambda s: s[3][2].__setitem__(0, s[3][2][0] + 64)), "."),
    "two steps swapped": (change("steps", lambda s: s.insert(2, s.pop(6))), "."),
    "a step dropped": (change("steps", lambda s: s.pop(4)), "."),
    "made for another machine": (
        change("header", lambda h: h["device"]["needs"].append(["instruction set", "AVX-9000"])),
        "made for instruction set AVX-9000, and this machine has none",
    ),
    "an unknown kernel": (change("actions", lambda a: a[0].update(kernel="fast")), "no kernel"),
    "a smaller arena": (change("plan", lambda p: p["heights"].__setitem__(2, 64)), "."),
    "a value smaller than it is": (change("values", lambda v: v[-1].__setitem__(1, 1)), "."),
    "a stored value without content": (
        change("slots", lambda s: next(x for x in s if x["role"] == "stored").pop("init")),
        "first content",
    ),
    "an input that is not there at first": (change("slots", lambda s: s[0]["at"].__setitem__(0, -1)), "no value"),
    "a result that is gone at the end": (
        lambda data: data["slots"].append(slot(data, "input") | {"role": "output"}),
        "is a result, and no action writes it",
    ),
    "a number beyond all": (change("values", lambda v: v[0].__setitem__(1, 1 << 62)), "not a whole number in range"),
    "a number below all": (change("values", lambda v: v[0].__setitem__(1, -(1 << 62))), "not a whole number in range"),
    "no number": (change("values", lambda v: v[0].__setitem__(1, "many")), "not a whole number"),
    "a list gone": (lambda data: data.pop("ends"), "damaged"),
}


@pytest.mark.parametrize("name", HARMFUL)
def test_resealed_changes_are_refused(tmp_path: Path, text: str, name: str) -> None:
    edit, match = HARMFUL[name]
    refused(tmp_path, edited(text, edit), match)


AHEAD = {
    "the input's own bytes": (
        lambda data: slot(data, "ahead").update(at=slot(data, "input")["at"]),
        "the second slot of 'x' has no bytes of its own",
    ),
    "a second slot of nothing": (
        lambda data: slot(data, "ahead").update(name="nothing"),
        "there is a second slot for 'nothing', but no such input without a default",
    ),
    "a second slot of another type": (
        lambda data: slot(data, "ahead").update(at=slot(data, "ahead", 1)["at"]),
        "there is a second slot for 'x', but no such input",
    ),
    "one second slot too few": (
        lambda data: data["slots"].remove(slot(data, "ahead", 1)),
        "other inputs have a second slot, but 'target' has none",
    ),
    "two second slots of one input": (
        lambda data: data["slots"].append(slot(data, "ahead")),
        "two second slots are named 'x'",
    ),
}


@pytest.mark.parametrize("name", AHEAD)
def test_second_slots_that_are_none_are_refused(tmp_path: Path, name: str) -> None:
    edit, match = AHEAD[name]
    step = compiled(prefetch=True)
    refused(tmp_path, edited(plan_text(step.program, step.plan), edit), match)


def test_records_written_again_are_the_file(text: str, halves: fp.Compiled) -> None:
    for each in (text, plan_text(halves.program, halves.plan, halves.update)):
        assert sealed(json.loads(each)) == each


@pytest.mark.parametrize("trusted", [False, True])
def test_code_is_trusted_in_both_halves_if_the_user_says_so(tmp_path: Path, halves: fp.Compiled, trusted: bool) -> None:
    halves.save(tmp_path / "step.plan")
    step = fp.load_plan(tmp_path / "step.plan", trust_code=trusted)
    assert step.update is not None
    assert step.program.trusted is trusted and step.update.program.trusted is trusted
    assert not fp.load_plan(tmp_path / "step.plan").program.trusted


def test_random_damage_never_gives_anything_but_a_plan_error(tmp_path: Path, text: str) -> None:
    def damage(rng: random.Random, body: list[str]) -> None:
        for _ in range(rng.randint(1, 4)):
            body[rng.randrange(len(body) - 3)] = rng.choice(NOISE)

    assert refusals(tmp_path, text, 150, damage) > 100
