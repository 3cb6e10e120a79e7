"""Plan files that were edited, with digests made right: each is refused, or means what its records say.

A case is a saved plan's name and edits of its records; it is small, and as good for the next form of the file. What
loads runs between pages that nobody may touch, and with dead bytes poisoned. It must compute what the same steps
compute with every value in memory of its own, and on NumPy what `interpret` computes of its program. Where the program
is the one that was saved, it must give the very results that the saved plan gives.

A plan for several ranks is run by as many threads as it was saved for. All ranks of a job read one file; of stages one
reads the edited file, and the others those that were saved.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

import foreplan as fp
from foreplan.base.errors import SessionError
from foreplan.graph import Graph
from foreplan.lower.program import Program
from foreplan.planner import without_reuse
from foreplan.planner.memory.order_bound import order_bound
from foreplan.runtime import planread
from foreplan.runtime.planfile import plan_text
from foreplan.runtime.session import Session
from tests.fuzz.interpreter import interpret
from tests.fuzz.memory import guarded
from tests.fuzz.records import Data, applied, damaged, deepened, draw_edits, set_figures
from tests.fuzz.target import Target
from tests.ranks.threads import Thread
from tests.ranks.threads import run as run_ranks
from tests.runtime.micro_batches import data_for
from tests.runtime.test_planfile import reseal, sealed

STEPS, MOST_BYTES, MOST_BATCHES = 2, 64 << 20, 4


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
    "loop of ranks": lambda target: fp.compile(
        sequence(), fp.losses.cross_entropy, fp.optim.AdamW(0.1), target=target, ranks=2, shard="state"
    ),
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
    edits = draw_edits(rng, saved(name).data)
    return json.dumps({"saved": name, "edits": edits, "repair": rng.random() < 0.7}).encode()


# Editing.


def edited(case: Data) -> str:
    """The plan file that a case means, with its digest, and where it can be had the problem's, made right."""
    data, damages = applied(saved(case["saved"]).data, case["edits"])
    for half in (data, data.get("update")):
        with suppress(Exception):  # a half that cannot be read has no digest
            _make_right(half, data, case["repair"])
    text = reseal(deepened(sealed(data)))
    for damage in damages:
        head, digest, body = text.split("\n", 2)
        text = reseal(f"{head}\n{digest}\n{damaged(body, damage)}")
    return text


def _make_right(half: Data, data: Data, repair: bool) -> None:
    """The problem's digest; and, to get past the first check, figures that follow from the steps."""
    header = data["header"]
    about = Program((), (), (), target=header["target"], model=header["model"])
    kept = {} if half is data else {s.name: s for s in planread._program(data, about, "", {}).stored}
    program = planread._program(half, about, "", kept)
    half["plan"]["problem"] = program.digest
    if repair:
        set_figures(half, program)


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


def results_of(step: fp.Compiled, name: str, bind: Callable[[fp.Compiled], Session]) -> list[list[bytes]]:
    """What a step comes to, of the name under which it is saved: on each rank."""
    if saved(name).step.program.ranks > 1:
        return _results_of_ranks(step, name, bind)
    leading = (step.accumulate,) if step.accumulate > 1 else ()
    return [_results(lambda: bind(step), [data_for(step, i, leading) for i in range(STEPS)])]


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
        if str(error).startswith("ranks differ"):
            raise  # of stages, one alone reads the changed file
        raise AssertionError(f"a kernel misbehaves: {error}") from error
    return made + [session.stored[name].tobytes() for name in session.stored]


TARGET = Target("plan_files", draw, run)
