"""What would make a step need less memory: each change is compiled and planned, none is guessed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from foreplan.base.errors import ForeplanError
from foreplan.base.units import ceil_div
from foreplan.compiler.api import compile_with
from foreplan.compiler.compiled import Compiled
from foreplan.fit.fitting import batch_of
from foreplan.graph import Graph, Kind
from foreplan.lower import engine_info
from foreplan.options import Options
from foreplan.planner import plan_curve, totals
from foreplan.report.explanation import Change, Rebuild
from foreplan.report.memory import Memory

MIB = 1 << 20
SHARES = (0.01, 0.05, 0.20)  # of predicted time, that recomputation may add


def changes(step: Compiled, rebuild: Rebuild | None = None) -> tuple[Change, ...]:
    """What each change would bring.

    Args:
        step: as it is now. One from a plan file has no model: what needs another graph is left out.
        rebuild: the model for a batch; None: nothing is said of other batches.
    """
    found = list(_recomputed(step))
    if step.model is not None:
        now = step.estimate()["predicted_seconds"]
        found += [_tried(step, now, step.model, *change) for change in _of_options(step, step.model)]
        if rebuild is not None:
            found += _batches(step, now, step.model, rebuild)
    return tuple(found)


def _recomputed(step: Compiled) -> Iterator[Change]:
    """The lowest plans found within shares of added time. What the second half of a step needs stays."""
    if step.options.checkpoint or step.plan.budget is not None:
        return
    rest = 0 if step.update is None else step.update.plan.arena_bytes
    curve = plan_curve(step.program, thorough=False)
    orders = [point.order for point in curve.points]
    ratios = [each.extra_seconds_ratio for each in totals(step.program, orders)]
    now = totals(step.program, [[run.action for run in step.plan.steps]])[0].extra_seconds_ratio
    for share in SHARES:
        best = max((i for i, ratio in enumerate(ratios, 1) if ratio <= share), default=0)
        plan = curve.plan(best)
        arena = max(plan.arena_bytes, rest)
        if arena < step.arena_bytes:
            on_card = engine_info(step.program.target).on_card  # where a budget is the whole card's
            asked = Memory.of(step.program, plan).peak if on_card else arena
            ratio = (1 + ratios[best - 1]) / (1 + now) - 1 if best else 0.0
            how = f"--budget {ceil_div(100 * asked, MIB) / 100:.2f}MiB"
            yield Change(f"recompute, {share:+.0%} of time at most", how, arena, ratio)


def _of_options(step: Compiled, model: Graph) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Changes of options: what, the flags, and the options."""
    options, engine = step.options, engine_info(step.program.target)
    if step.memory.workspace and options.workspace == "auto":
        yield "no scratch memory for kernels", "--workspace 0", {"workspace": 0}
    if step.program.loss is None:
        return
    if engine.on_card and not options.offload:
        yield "copy activations to host memory", "--offload", {"offload": True}
    if options.precision == "float32":
        yield "compute in bfloat16", "--precision bf16", {"precision": "bf16"}
    names = [value.name for value in model.stored if value.kind is Kind.PARAMETER]
    head = names[-1].rpartition(".")[0] if names else ""
    if head and not all(name.startswith(f"{head}.") for name in names) and not options.freeze:
        chosen = {"freeze": ("*",), "train": (head,)}
        yield f"train {head} alone", f"--freeze '*' --train {head}", chosen


def _tried(
    step: Compiled, now: float, model: Graph, name: str, how: str, change: dict[str, Any], samples: float = 1.0
) -> Change:
    """A change, compiled.

    Args:
        now: predicted seconds of the step as it is.
        samples: in a step, over those of a step now.
    """
    options: Options = replace(step.options, **change)
    try:
        other = compile_with(model, options)
    except ForeplanError as error:
        return Change(name, how, None, note=str(error).splitlines()[0])
    then = other.estimate()["predicted_seconds"]
    ratio = then / now / samples - 1 if now and then else None
    return Change(name, how, other.arena_bytes, ratio)


def _batches(step: Compiled, now: float, model: Graph, rebuild: Rebuild) -> Iterator[Change]:
    """Half of the batch at a time, and half of the batch."""
    batch = batch_of(model)
    if batch is None or batch < 2 or batch % 2:
        return
    half = batch // 2
    changes: list[tuple[str, str, dict[str, Any], float]] = []
    if step.program.loss is not None and step.accumulate == 1 and step.options.optimizer is not None:
        told = f"two micro-batches of {half}, their gradients added up"
        changes.append((told, f"--batch {half} --accumulate 2", {"accumulate": 2}, 1.0))
    changes.append((f"a batch of {half}", f"--batch {half}", {}, 0.5))
    try:
        smaller = rebuild(half)
    except ForeplanError as error:
        yield Change(changes[-1][0], changes[-1][1], None, note=str(error).splitlines()[0])
        return
    for name, how, change, samples in changes:
        yield _tried(step, now, smaller, name, how, change, samples)
