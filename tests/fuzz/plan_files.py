"""Plan files that were edited, with digests made right: each is refused, or means what its records say.

A case is a saved plan's name and edits of its records; it is small, and as good for the next form of the file. What
loads runs between pages that nobody may touch, and with dead bytes poisoned. It must compute what the same steps
compute with every value in memory of its own, and on NumPy what `interpret` computes of its program. Where the program
is the one that was saved, it must give the very results that the saved plan gives.

A plan for several ranks is run by as many threads as it was saved for. All ranks of a job read one file; of stages one
reads the edited file, and the others those that were saved.
"""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

import foreplan as fp
from foreplan.errors import ForeplanError, SessionError
from foreplan.graph import Graph
from foreplan.lower.program import Program
from foreplan.planner import verify, without_reuse
from foreplan.planner.memory.order_bound import order_bound
from foreplan.runtime import planread
from foreplan.runtime.planfile import plan_text
from foreplan.runtime.session import Session
from tests.fuzz.interpreter import interpret
from tests.fuzz.memory import guarded
from tests.fuzz.target import Target
from tests.ranks.threads import Thread
from tests.ranks.threads import run as run_ranks
from tests.runtime.micro_batches import data_for
from tests.runtime.test_planfile import reseal, sealed

STEPS, MOST_BYTES, MOST_BATCHES = 2, 64 << 20, 4
Data = dict[str, Any]
Place = list[Any]  # keys and indices that lead to a node of the records


def perceptron() -> Graph:
    return fp.models.build("mlp:batch=4,width=8,layers=1,inputs=6,classes=3")


def images() -> Graph:
    def model(x: fp.frontend.Tensor) -> fp.frontend.Tensor:
        x = fp.nn.relu(fp.nn.conv(x, 4, 3, padding=1, name="conv"))
        x = fp.nn.flatten(fp.nn.max_pool(fp.nn.batch_norm(x, name="norm"), 2))
        return fp.nn.linear(fp.nn.dropout(x, 0.3), 3, name="head")

    return fp.trace(model, fp.spec((4, 1, 4, 4)), name="images")


def words() -> Graph:
    return fp.models.build("gpt2_small:batch=1,seq=4,layers=1,width=8,heads=2,vocabulary=11")


def sequence() -> Graph:
    def model(x: fp.frontend.Tensor) -> fp.frontend.Tensor:
        y, _ = fp.nn.lstm(x, 4, name="rnn")
        return fp.nn.linear(y[:, -1], 3, name="head")

    return fp.trace(model, fp.spec((2, 5, 3)), name="sequence")


def parts(target: str, count: int = 2) -> fp.Compiled:
    optimizer = fp.optim.AdamW(0.1, clip_norm=0.5)
    return fp.compile(images(), fp.losses.cross_entropy, optimizer, target=target, accumulate=count)


def spread(target: str, **options: Any) -> fp.Compiled:
    """A step of two ranks."""
    options = {"ranks": 2} | options
    return fp.compile(words(), fp.losses.cross_entropy, fp.optim.AdamW(0.1), target=target, **options)


SAVED: dict[str, Callable[[str], fp.Compiled]] = {
    "perceptron": lambda target: fp.compile(
        perceptron(), fp.losses.cross_entropy, fp.optim.Nesterov(0.1), target=target, prefetch=True
    ),
    "images": lambda target: fp.compile(images(), fp.losses.cross_entropy, fp.optim.Adam(0.1), target=target),
    "words": lambda target: fp.compile(words(), fp.losses.cross_entropy, target=target),
    "sequence": lambda target: fp.compile(sequence(), fp.losses.cross_entropy, fp.optim.SGD(0.1), target=target),
    "parts": parts,
    "forward": lambda target: fp.compile(images(), target=target),
    "ranks": lambda target: spread(target, accumulate=2),
    "shards": lambda target: spread(target, shard="parameters", checkpoint=["*"]),
    "groups": lambda target: spread(target, ranks=4, tensor=2, shard="state"),
    "first stage": lambda target: spread(target, stages=2, stage=0, accumulate=2),
    "last stage": lambda target: spread(target, stages=2, stage=1, accumulate=2),
}
STAGES = ("first stage", "last stage")
TARGETS = ("numpy", "cpu:threads=1")


@dataclass(frozen=True)
class Saved:
    """A plan that was saved.

    Attributes:
        step: compiled.
        data: the records of its file.
        text: its file.
    """

    step: fp.Compiled
    data: Data
    text: str


@lru_cache(maxsize=32)
def saved(name: str) -> Saved:
    """By a name such as `images on numpy`."""
    model, target = name.split(" on ")
    step = SAVED[model](target)
    text = plan_text(step.program, step.plan, step.update, step.options)
    return Saved(step, json.loads(text), text)


# Drawing.


def draw(rng: random.Random) -> bytes:
    """A name and edits, as JSON."""
    target = TARGETS[rng.random() < 0.25]
    name = f"{rng.choice(list(SAVED))} on {target}"
    edits = [_edit(rng, saved(name).data) for _ in range(rng.choice([1, 1, 1, 2, 3, 5]))]
    return json.dumps({"saved": name, "edits": edits, "repair": rng.random() < 0.7}).encode()


def _edit(rng: random.Random, data: Data) -> list[Any]:
    """[how, place, …]: see `_apply`."""
    place = _place(rng, data)
    if rng.random() < 0.25:
        ops = [each for each in _places(data) if each[-1:] == ["op"] or (each[:1] == ["slots"] and len(each) > 2)]
        place = rng.choice(ops)
    node, how = _at(data, place), rng.random()
    if how < 0.03:
        return ["damage", rng.random(), rng.choice('0123456789"[]{},:x-.e\\\u00e9')]
    if how < 0.06:
        return ["deep", place, rng.choice([10, 1000, 200_000])]
    if how < 0.15:
        return ["drop", place]
    if how < 0.22:
        return ["twice", place, rng.randrange(100)]
    if how < 0.52:
        return ["as", place, _like(rng, data, place)]
    if how < 0.66:
        return ["swap", place, _like(rng, data, place)]
    return ["set", place, _another(rng, node)]


def _place(rng: random.Random, data: Data) -> Place:
    """A way down from the top, each section as likely as the next."""
    node: Any = data
    place: Place = []
    while isinstance(node, dict | list) and node and (len(place) < 2 or rng.random() < 0.85):
        key = rng.choice(sorted(node)) if isinstance(node, dict) else rng.randrange(len(node))
        if not place and key in ("format", "sha256"):
            continue
        place.append(key)
        node = node[key]
    return place


def _like(rng: random.Random, data: Data, place: Place) -> Place:
    """The place of the same kind of thing in another record, if there is one."""
    wanted = tuple("#" if isinstance(key, int) else key for key in place)
    alike = [each for each in _places(data) if tuple("#" if isinstance(k, int) else k for k in each) == wanted]
    return rng.choice(alike) if alike else place


def _places(node: Any, place: Place | None = None) -> Iterator[Place]:
    place = place or []
    yield place
    for key in node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
        yield from _places(node[key], [*place, key])


_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")
_WORD = re.compile(r"[A-Za-z_]\w*")
_WORDS = ("float32", "float64", "int64", "bool", "int8", "True", "None", "input", "state", "constant", "accumulator")


def _another(rng: random.Random, node: Any) -> Any:
    """Something else in the place of a node, often of its own kind."""
    odd = [
        None,
        True,
        "",
        "x",
        [],
        {},
        0,
        -1,
        1.5,
        1 << 40,
        1 << 61,
        1 << 62,
        10**30,
        [0],
        {"a": 0},
        float("nan"),
        -(1 << 61),
    ]
    if rng.random() < 0.2 or node is None or isinstance(node, dict):
        return rng.choice(odd)
    if isinstance(node, bool):
        return not node
    if isinstance(node, int):
        return rng.choice([node + 1, node - 1, node + 64, node - 64, 2 * node, node // 2, -node, 0, 1, 2, float(node)])
    if isinstance(node, list):
        made = copy.copy(node)
        rng.shuffle(made)
        return rng.choice([made, node[1:], node[:-1], [*node, *node], [node], [*node, 0]])
    if isinstance(node, str):
        return _other_text(rng, node)
    return rng.choice(odd)


def _other_text(rng: random.Random, text: str) -> str:
    """Another number or word in a text, or a piece less."""
    numbers, names = list(_NUMBER.finditer(text)), list(_WORD.finditer(text))
    if numbers and rng.random() < 0.6:
        found = rng.choice(numbers)
        new = rng.choice(
            ["0", "1", "2", "3", "-1", "7", "100000", "1.5", "'1'", "(1,)", "1e999", "9" * 30, "None", "-3"]
        )
    elif names:
        found = rng.choice(names)
        new = rng.choice([*_WORDS, *(each[0] for each in names), "nan", "inf", "a0", "a1", "exp", "reduce"])
    else:
        return text + rng.choice(["x", ")", "(1,)", "\0", "\u2028"])
    return text[: found.start()] + new + text[found.end() :]


# Editing.


def edited(case: Data) -> str:
    """The plan file that a case means, with its digest, and where it can be had the problem's, made right."""
    data = copy.deepcopy(saved(case["saved"]).data)
    damages = []
    for edit in case["edits"]:
        if edit[0] == "damage":
            damages.append(edit)
            continue
        with suppress(KeyError, IndexError, TypeError):  # an edit before has taken what this one means
            _apply(data, *edit)
    for half in (data, data.get("update")):
        with suppress(Exception):  # a half that cannot be read has no digest
            _make_right(half, data, case["repair"])
    text = reseal(re.sub('"deep ([0-9]+)"', lambda found: "[" * int(found[1]) + "]" * int(found[1]), sealed(data)))
    for _, where, character in damages:
        head, digest, body = text.split("\n", 2)
        at = int(where * (len(body) - 4))
        text = reseal(f"{head}\n{digest}\n{body[:at]}{character}{body[at + 1 :]}")
    return text


def _apply(data: Data, how: str, place: Place, argument: Any = None) -> None:
    holder, key = _at(data, place[:-1]), place[-1]
    node = holder[key]
    if how == "drop":
        del holder[key]
    elif how == "twice" and isinstance(holder, list):
        holder.insert(argument % (len(holder) + 1), copy.deepcopy(node))
    elif how == "deep":
        holder[key] = f"deep {argument}"
    elif how == "as":
        holder[key] = copy.deepcopy(_at(data, argument))
    elif how == "swap":
        other, there = _at(data, argument[:-1]), argument[-1]
        holder[key], other[there] = other[there], node
    elif how == "set":
        holder[key] = argument


def _at(data: Any, place: Place) -> Any:
    for key in place:
        data = data[key]
    return data


_FIGURES = re.compile(
    r"(arena_bytes) is \S+, but the device's heights come to (\d+)|"
    r"(lower_bound_bytes) is \S+, but the highest live set is (\d+)|"
    r"(peak_step) is \S+, but the live set is highest at step (\d+)"
)


def _make_right(half: Data, data: Data, repair: bool) -> None:
    """The problem's digest; and, to get past the first check, figures that follow from the steps."""
    header = data["header"]
    about = Program((), (), (), target=header["target"], model=header["model"])
    kept = {} if half is data else {s.name: s for s in planread._program(data, about, "", {}).stored}
    program = planread._program(half, about, "", kept)
    half["plan"]["problem"] = program.digest
    for _ in range(4 if repair else 0):
        try:
            verify(replace(planread.plan_of(half), order_lower_bound_bytes=None), program)
            return
        except ForeplanError as error:
            found = _FIGURES.search(str(error))
            if found is None:
                return
            name, number = (each for each in found.groups() if each is not None)
            holder = half["plan"]["certificate"] if name == "peak_step" else half["plan"]
            holder[name] = int(number)


# Running.


def run(case: bytes, folder: Path) -> None:
    """Load the file, bind it and run steps; see above for what must come out."""
    told = json.loads(case)
    path = folder / "edited.plan"
    path.write_text(edited(told), encoding="utf-8", errors="surrogatepass")
    step = fp.load_plan(path)
    programs = [step.program, *([] if step.update is None else [step.update.program])]
    plans = [step.plan, *([] if step.update is None else [step.update.plan])]
    for program, plan in zip(programs, plans):
        assert plan.order_lower_bound_bytes == order_bound(program)
    if step.arena_bytes + step.host_bytes > MOST_BYTES or step.accumulate > MOST_BATCHES:
        return
    if saved(told["saved"]).step.program.ranks > 1:
        _run_ranks(step, told["saved"])
        return
    batches = [data_for(step, i, (step.accumulate,) if step.accumulate > 1 else ()) for i in range(STEPS)]
    found = _results(lambda: step.bind(seed=1), batches)
    assert found == _results(lambda: step.bind(seed=1, poison=True), batches), "poison changes the results"
    assert found == _results(lambda: apart(step), batches), "the steps give other results in memory of their own"
    told_apart = interpret(step, batches, seed=1)
    if step.program.target == "numpy":
        assert found == told_apart, "the program means something else"
    own = _own(told["saved"], step.accumulate)
    if _meaning(own) == _meaning(step):
        assert [slot.valid for slot in step.program.inputs] == [slot.valid for slot in own.program.inputs]
        assert found == _results(lambda: own.bind(seed=1), batches), "not the results of the plan that was saved"


def _run_ranks(step: fp.Compiled, name: str) -> None:
    """As `run`, on all ranks of a job."""
    found = _results_of_ranks(step, name, lambda each: each.bind(seed=1))
    for bind, what in ((lambda each: each.bind(seed=1, poison=True), "poison changes"), (apart, "other places change")):
        assert found == _results_of_ranks(step, name, bind), f"{what} the results"
    own = _own(name, step.accumulate)
    if _meaning(own) == _meaning(step):
        assert found == _results_of_ranks(own, name, lambda each: each.bind(seed=1)), "not those of the saved plan"


def _results_of_ranks(step: fp.Compiled, name: str, bind: Callable[[fp.Compiled], Session]) -> list[list[bytes]]:
    """What each rank comes to."""
    model, target = name.split(" on ")
    steps = [step] * saved(name).step.program.ranks
    if model in STAGES:
        steps = [step if stage == model else saved(f"{stage} on {target}").step for stage in STAGES]

    def job(world: Thread) -> list[bytes]:
        own = steps[world.rank]
        leading = (own.accumulate,) if own.accumulate > 1 else ()
        group = world.rank // max(1, own.program.tensor)
        return _results_of(lambda: bind(own), [data_for(own, 10 * group + i, leading) for i in range(STEPS)])

    with guarded():
        return run_ranks(len(steps), job)


@lru_cache(maxsize=32)
def _own(name: str, accumulate: int) -> fp.Compiled:
    """The step that was saved; of another number of micro-batches, compiled for that."""
    own = saved(name).step
    if own.accumulate in (1, accumulate) or accumulate == 1:
        return own
    return parts(own.program.target, accumulate)


def _meaning(step: fp.Compiled) -> list[Any]:
    """What a step computes, on which threads, of what it is given, and what it calls that: all else must change no
    result."""
    return [
        (
            program.target,
            [(call.op, call.kernel, call.inputs, call.outputs) for call in program.calls],
            [value.home for value in program.values],
            [
                [(slot.name, slot.kind, slot.operand, str(slot.init)) for slot in slots]
                for slots in (program.inputs, program.stored, program.outputs, program.gradients)
            ],
            program.loss and program.loss.operand,
        )
        for program in (step.program, *([] if step.update is None else [step.update.program]))
    ]


def apart(step: fp.Compiled) -> Session:
    update = step.update
    twin = None if update is None else replace(update, plan=without_reuse(update.plan, update.program))
    return Session(step.program, without_reuse(step.plan, step.program), update=twin, seed=1)


def _results(bind: Callable[[], Session], batches: list[dict[str, np.ndarray]]) -> list[bytes]:
    """The bytes of everything that steps return, and of what they leave."""
    with guarded():
        return _results_of(bind, batches)


def _results_of(bind: Callable[[], Session], batches: list[dict[str, np.ndarray]]) -> list[bytes]:
    """The same, in arenas that are guarded already."""
    session = bind()
    made: list[bytes] = []
    try:
        for batch in batches:
            result = session.step(batch)
            made.append(np.float64(np.nan if result.loss is None else result.loss).tobytes())
            made += [array.tobytes() for array in (*result.outputs.values(), *result.gradients.values())]
    except SessionError as error:
        raise AssertionError(f"a kernel misbehaves: {error}") from error
    return made + [session.stored[name].tobytes() for name in session.stored]


TARGET = Target("plan_files", draw, run)
