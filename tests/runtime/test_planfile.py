"""Plan files: the same bytes each time, everything back as it was, and nothing that was tampered with runs."""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import foreplan as fp
from foreplan.runtime.planfile import plan_text
from tests.runtime.test_session import batch, classifier, compiled

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
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed, "PATH": ""}, capture_output=True, check=True
        ).stdout
        for seed in ("0", "1", "77")
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
    refused(tmp_path, text.replace("foreplan.plan.2", "foreplan.plan.9"), "not a plan of the format")
    with pytest.raises(fp.PlanError, match="cannot be read"):
        fp.load_plan(tmp_path / "missing.plan")


def change(key: str, edit: Callable[[Any], None]) -> Callable[[dict[str, Any]], None]:
    return lambda data: edit(data[key])


def first_with(records: list[dict[str, Any]], word: str) -> dict[str, Any]:
    return next(record for record in records if word in record["op"])


HARMFUL = {
    "another op of the same types": (
        change("actions", lambda a: first_with(a, "matmul").update(op="matmul(x=1)")),
        "no attribute",
    ),
    "less workspace": (change("actions", lambda a: first_with(a, "conv").update(workspace=[0, 2])), "workspace"),
    "an operand outside its value": (
        change("actions", lambda a: first_with(a, "conv")["in"][0].__setitem__(1, 4096)),
        "reads bytes",
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
    "a smaller arena": (change("header", lambda h: h["heights"].__setitem__(2, 64)), "."),
    "a value smaller than it is": (change("values", lambda v: v[-1].__setitem__(1, 1)), "."),
    "a stored value without content": (
        change("slots", lambda s: next(x for x in s if x["role"] == "stored").pop("init")),
        "first content",
    ),
    "an input that is not there at first": (change("slots", lambda s: s[0]["at"].__setitem__(0, -1)), "no value"),
    "a result that is gone at the end": (
        change("slots", lambda s: s[-1].update(at=s[0]["at"])),
        "not there when the step begins or ends",
    ),
    "no number": (change("values", lambda v: v[0].__setitem__(1, "many")), "not a whole number"),
    "a list gone": (lambda data: data.pop("ends"), "damaged"),
}


@pytest.mark.parametrize("name", HARMFUL)
def test_resealed_changes_are_refused(tmp_path: Path, text: str, name: str) -> None:
    edit, match = HARMFUL[name]
    data = json.loads(text)
    edit(data)
    lines = ['{"format": "foreplan.plan.2",', '"sha256": "",']
    lines.append(",\n".join(f'"{key}": {json.dumps(data[key])}' for key in data if key not in ("format", "sha256")))
    refused(tmp_path, reseal("\n".join(lines) + "\n}\n"), match)


def test_random_damage_never_gives_anything_but_a_plan_error(tmp_path: Path, text: str) -> None:
    def damage(rng: random.Random, body: list[str]) -> None:
        for _ in range(rng.randint(1, 4)):
            body[rng.randrange(len(body) - 3)] = rng.choice(NOISE)

    assert refusals(tmp_path, text, 150, damage) > 100
