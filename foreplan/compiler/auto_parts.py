"""A given batch in as few micro-batches as fit: `accumulate="auto"`."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from foreplan.base.arguments import shown, whole
from foreplan.base.errors import DoesNotFitError, UsageError
from foreplan.base.units import format_bytes, parse_budget
from foreplan.compiler.compiled import Compiled
from foreplan.graph import Graph
from foreplan.lower.outside import device_bytes
from foreplan.options import Options

Make = Callable[..., Graph]  # a model from its batch: `make(batch=8)`


def in_parts(make: Any, options: Options, compile_one: Callable[[Graph, Options], Compiled]) -> Compiled:
    """The step on a whole batch, in the fewest equal micro-batches with which it fits the memory: that of the budget,
    or the card's own.

    A micro-batch costs next to no time, and recomputation does. So each number of micro-batches is tried as it is
    planned without a budget. Only where even micro-batches of one sample do not fit, they are planned within the
    memory.

    Args:
        make: a function with a parameter `batch`, whose default is the whole batch.
        options: with `accumulate` "auto".
        compile_one: compiles a graph with the number of micro-batches that its options say.

    Raises:
        UsageError: there is no such function, no optimizer, or no memory that is known.
        DoesNotFitError: not even micro-batches of one sample fit.
    """
    batch, memory = _whole_batch(make), _memory(options)
    if options.optimizer is None:
        raise UsageError("gradients are accumulated for an update: pass an optimizer, or leave accumulate out")
    counts = [count for count in range(1, batch + 1) if batch % count == 0]
    steps: dict[int, Compiled] = {}

    def fits(count: int) -> bool:
        steps[count] = compile_one(make(batch=batch // count), replace(options, accumulate=count, budget=None))
        return steps[count].counted_bytes <= memory

    if fits(1):
        return _with_budget(steps[1], options, memory)
    low, high = 0, len(counts)  # what counts[low] gives does not fit, what counts[high] gives does
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(counts[middle]) else (middle, high)
    if high < len(counts):
        return _with_budget(steps[counts[high]], options, memory)
    least = steps[counts[-1]]
    if options.checkpoint:
        raise DoesNotFitError(
            f"does not fit: {batch} micro-batches of one sample need {format_bytes(least.counted_bytes)}, and there "
            f"are {format_bytes(memory)}",
            needed=least.counted_bytes,
            capacity=memory,
            lower_bound=least.plan.lower_bound_bytes,
            plan=least.plan,
        )
    return compile_one(make(batch=1), replace(options, accumulate=batch, budget=memory))


def _whole_batch(make: Any) -> int:
    wanted = (
        "accumulate='auto' makes the model with smaller batches: give a function with a parameter `batch`, whose "
        "default is the whole batch, such as partial(models.resnet50, batch=64) or `def make(batch=64): return "
        "from_onnx('model.onnx', batch=batch)`"
    )
    if isinstance(make, Graph) or not callable(make):
        raise UsageError(f"{wanted}; this is {repr(make) if isinstance(make, Graph) else shown(make)}")
    default = make.keywords.get("batch") if isinstance(make, partial) else None  # which `**sizes` does not show
    if default is None:
        with contextlib.suppress(TypeError, ValueError, KeyError):  # what has no signature, or no such parameter
            default = inspect.signature(make).parameters["batch"].default
    if default in (None, inspect.Parameter.empty):
        raise UsageError(wanted)
    return whole("the default of batch", default, 1)


def _memory(options: Options) -> int:
    """What the step may take, as `Compiled.counted_bytes` counts."""
    target = str(getattr(options.target, "name", options.target))
    allowed = device_bytes(target) if options.budget is None else parse_budget(options.budget)
    if isinstance(allowed, float):
        raise UsageError(
            f"with accumulate='auto' a budget is a size, such as 2GiB, and {options.budget} is a share of an arena "
            "that is not known yet"
        )
    if allowed is None:
        raise UsageError(
            f"accumulate='auto' fits a step into a memory, and the target {target} names no machine: give a budget "
            "(budget=, --budget), or a card"
        )
    return allowed


def _with_budget(step: Compiled, options: Options, memory: int) -> Compiled:
    """The step, which is within the memory, with the budget that was asked for."""
    if options.budget is None:
        return step
    chosen = replace(step.options, budget=options.budget)
    return replace(step, options=chosen, plan=replace(step.plan, budget=memory))
