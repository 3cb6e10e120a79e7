"""Shared plans that were edited, with digests made right: each is refused, or another right answer.

What is taken has figures of its own, and steps that compute what those of the planner compute: bound between pages that
nobody may touch, and with dead bytes poisoned.
"""

from __future__ import annotations

import json
import random
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from foreplan.base.errors import DoesNotFitError, UsageError
from foreplan.compiler.kept_plans import _Question
from foreplan.planner import Plan, verify
from foreplan.planner.memory.order_bound import order_bound
from tests.fuzz.plan_files import SAVED, TARGETS, results_of, saved
from tests.fuzz.records import Data, applied, damaged, deepened, draw_edits, set_figures
from tests.fuzz.target import Target

# Budgets as shares of the arena without one, and whether values may be computed again.
BUDGETS = ((1.0, "off"), (0.9, "auto"))


@lru_cache(maxsize=64)
def _asked(name: str, share: float, remat: str) -> tuple[_Question, Plan]:
    """A question about a saved step, and the planner's answer; where it does not fit, with the least budget."""
    program = saved(name).step.program
    budget = int(share * saved(name).step.arena_bytes)
    question = _Question(program, budget, remat, None)
    try:
        return question, question.plan()
    except DoesNotFitError as error:
        question = replace(question, asked=error.needed)
        return question, question.plan()


@lru_cache(maxsize=64)
def _records(name: str, share: float, remat: str) -> Data:
    question, found = _asked(name, share, remat)
    records: Data = json.loads(question.written(found))
    return records


def draw(rng: random.Random) -> bytes:
    """A question and edits of its answer, as JSON."""
    name = f"{rng.choice(list(SAVED))} on {TARGETS[rng.random() < 0.25]}"
    share, remat = rng.choice(BUDGETS)
    edits = draw_edits(rng, _records(name, share, remat))
    about = {"saved": name, "share": share, "remat": remat}
    return json.dumps({**about, "edits": edits, "repair": rng.random() < 0.7}).encode()


def run(case: bytes, folder: Path) -> None:
    """Read the plan as whoever asks does, and run its steps.

    Raises:
        UsageError: it is no answer.
    """
    told = json.loads(case)
    name, share, remat = told["saved"], told["share"], told["remat"]
    question, own = _asked(name, share, remat)
    records, damages = applied(_records(name, share, remat), told["edits"])
    if told["repair"]:
        with suppress(Exception):  # what cannot be read has no figures
            set_figures(records, question.problem)
    text = deepened(json.dumps(records, separators=(",", ":")))
    for damage in damages:
        text = damaged(text, damage)
    found = question.answer(text.encode(errors="surrogatepass"))
    if found is None:
        raise UsageError("it is no answer")
    verify(found, question.problem)
    assert found.order_lower_bound_bytes == order_bound(question.problem)
    assert question.asked is not None and found.arena_bytes <= question.asked
    step = saved(name).step
    wanted = results_of(replace(step, plan=own), name, lambda each: each.bind(seed=1))
    taken = replace(step, plan=found)
    assert results_of(taken, name, lambda each: each.bind(seed=1)) == wanted, "not the results of the planner's"
    assert results_of(taken, name, lambda each: each.bind(seed=1, poison=True)) == wanted, "poison changes the results"


TARGET = Target("shared_plans", draw, run, sample=60)
