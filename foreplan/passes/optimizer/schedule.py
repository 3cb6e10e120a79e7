"""Learning rates that follow from the number of updates, computed within the step in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from foreplan.base.arguments import instance, listed, number_in, whole
from foreplan.base.errors import UsageError
from foreplan.graph.types import FLOAT32
from foreplan.ops.evaluate import computed
from foreplan.ops.expr import Arg, Const, Expr, as_expr, call, maximum, minimum, parse_expr, sqrt, substitute, where
from foreplan.ops.map import Map

_ANY = (0.0, FLOAT32.largest)
_MOST = 1 << 52


@dataclass(frozen=True)
class Schedule:
    """A learning rate for each update, in the place of a number: `AdamW(cosine(1e-3, steps=1000, warmup=50))`.

    The step computes it from its own count of updates. So a run goes on exactly from a checkpoint, a step of several
    micro-batches counts once, and a step that a loss scale has left out does not count. `schedule(t)` is the rate of
    the update that t others came before.

    Attributes:
        name: the call that made it, for people.
        formula: an expression of a0, the number of updates before, of type float64.
    """

    name: str
    formula: str

    def at(self, count: Expr) -> Expr:
        """The rate of the update that `count` others came before."""
        return substitute(parse_expr(self.formula), [count])

    def __call__(self, count: int) -> float:
        """The rate of the update that `count` others came before.

        Raises:
            UsageError: the count is not a whole number, or negative.
        """
        before = np.float64(whole("a number of updates", count, 0, _MOST))
        whole_formula = self.at(Arg(0)) + 0.0 * Arg(0)  # which reads its argument in any case
        return float(computed(Map((str(whole_formula),)), [np.asarray(before)])[0])

    def __repr__(self) -> str:
        return self.name


def constant(rate: float, *, warmup: int = 0) -> Schedule:
    """The same rate, after a warm-up.

    Args:
        rate: the learning rate.
        warmup: updates in which it rises from 0 in a straight line. The first of them has the rate 0.
    """
    return _made("constant", rate, warmup, None, lambda t, w: Const(_rate(rate)))


def cosine(rate: float, *, steps: int, warmup: int = 0, end: float = 0.0) -> Schedule:
    """From `rate` to `end` along half a cosine (Loshchilov and Hutter 2017, arXiv:1608.03983), then `end`.

    Args:
        rate: the largest learning rate.
        steps: updates until the end, with those of the warm-up.
        warmup: updates in which it rises from 0 in a straight line.
        end: the last rate.
    """
    top, low = _rate(rate), number_in("cosine: end", end, *_ANY)

    def after(t: Expr, length: int) -> Expr:
        return low + (top - low) * 0.5 * (1.0 + call("cos", math.pi * minimum(t / float(length), 1.0)))

    return _made("cosine", rate, warmup, steps, after, end=low)


def linear(rate: float, *, steps: int, warmup: int = 0, end: float = 0.0) -> Schedule:
    """From `rate` to `end` in a straight line, then `end`; arguments as of `cosine`."""
    low = number_in("linear: end", end, *_ANY)
    return _made("linear", rate, warmup, steps, _falling(_rate(rate), low, 1.0), end=low)


def polynomial(rate: float, *, steps: int, power: float, warmup: int = 0, end: float = 0.0) -> Schedule:
    """end + (rate − end)·(1 − t/T)^power, then `end`; T are the steps after the warm-up, else as `cosine`."""
    low = number_in("polynomial: end", end, *_ANY)
    exponent = number_in("polynomial: power", power, math.ulp(0.0), math.inf)
    after = _falling(_rate(rate), low, exponent)
    return _made("polynomial", rate, warmup, steps, after, power=exponent, end=low)


def _falling(top: float, low: float, power: float) -> Callable[[Expr, int], Expr]:
    def after(t: Expr, length: int) -> Expr:
        left = 1.0 - minimum(t / float(length), 1.0)
        return low + (top - low) * (left if power == 1.0 else call("pow", left, power))

    return after


def staircase(rate: float, *, every: int, factor: float = 0.1, warmup: int = 0) -> Schedule:
    """`rate`, multiplied by a factor after every so many updates; those of the warm-up do not count.

    Args:
        rate: the first learning rate.
        every: updates from one change to the next.
        factor: of each change.
        warmup: updates in which it rises from 0 in a straight line.
    """
    top, length = _rate(rate), whole("staircase: every", every, 1, _MOST)
    by = number_in("staircase: factor", factor, *_ANY)

    def after(t: Expr, _: int) -> Expr:
        return top * call("pow", Const(by), call("floor", t / float(length)))

    return _made("staircase", rate, warmup, None, after, every=length, factor=by)


def inverse_sqrt(rate: float, *, warmup: int) -> Schedule:
    """rate·√(warmup / t) after a warm-up (Vaswani et al. 2017, arXiv:1706.03762, section 5.3).

    Args:
        rate: the largest learning rate, at the end of the warm-up.
        warmup: updates in which it rises from 0 in a straight line; at least 1.
    """
    top, before = _rate(rate), whole("inverse_sqrt: warmup", warmup, 1, _MOST)
    return _made("inverse_sqrt", rate, before, None, lambda t, _: top * sqrt(float(before) / (t + float(before))))


def one_cycle(rate: float, *, steps: int, rise: float = 0.3, start: float = 25.0, final: float = 1e4) -> Schedule:
    """Up from rate/start to `rate`, then down to rate/(start·final), each along half a cosine (Smith and Topin 2018,
    arXiv:1708.07120, in PyTorch's form); then that.

    Args:
        rate: the largest learning rate.
        steps: updates until the end.
        rise: the share of them in which the rate rises.
        start: what the first rate is smaller by.
        final: what the last rate is smaller by than the first.
    """
    top, length = _rate(rate), whole("one_cycle: steps", steps, 2, _MOST)
    share = number_in("one_cycle: rise", rise, 0.0, 1.0)
    by = number_in("one_cycle: start", start, math.ulp(0.0), math.inf)
    further = number_in("one_cycle: final", final, math.ulp(0.0), math.inf)
    low, last = top / by, top / by / further
    peak, end = share * length - 1.0, length - 1.0

    def between(first: float, second: float, part: Expr) -> Expr:
        return second + (first - second) * 0.5 * (1.0 + call("cos", math.pi * part))

    t, down = Arg(0), between(top, last, minimum((Arg(0) - peak) / (end - peak), 1.0))
    expr = where(t <= peak, between(low, top, t / peak), down) if peak > 0 else down
    said = f"one_cycle({top!r}, steps={length}, rise={share!r}, start={by!r}, final={further!r})"
    return Schedule(said, str(expr))


def joined(schedules: Iterable[Schedule], boundaries: Iterable[int]) -> Schedule:
    """Schedules one after the other, each of which counts from where it begins.

    Args:
        schedules: two or more.
        boundaries: the number of updates before the second begins, before the third, and so on, in ascending order.

    Raises:
        UsageError: there is not one boundary between each two schedules, or they do not ascend.
    """
    how = "make it with cosine(…), linear(…) and so on"
    parts = [instance("joined: a schedule", each, Schedule, how) for each in listed("joined: schedules", schedules)]
    places = [whole("joined: a boundary", each, 1, _MOST) for each in listed("joined: boundaries", boundaries)]
    if len(parts) < 2 or len(places) != len(parts) - 1 or sorted(set(places)) != places:
        raise UsageError(
            f"joined: {len(parts)} schedules have {max(0, len(parts) - 1)} ascending boundaries between them, and "
            f"{places} is given"
        )
    t = Arg(0)
    expr = parts[0].at(t)
    for part, place in zip(parts[1:], places):
        expr = where(t < float(place), expr, part.at(t - float(place)))
    return Schedule(f"joined({parts!r}, {places!r})", str(expr))


def _rate(rate: Any) -> float:
    return number_in("a learning rate", rate, *_ANY)


def _made(
    kind: str, rate: float, warmup: int, steps: int | None, after: Callable[[Expr, int], Expr], **further: object
) -> Schedule:
    """A schedule with a warm-up.

    Args:
        kind: the function that is called, for people.
        rate: at the end of the warm-up.
        warmup: updates in which it rises from 0.
        steps: updates until the end, with those of the warm-up; None: there is no end.
        after: the formula, of updates since the warm-up and of how many there are until the end.
        further: arguments, for people.
    """
    top, before = _rate(rate), whole(f"{kind}: warmup", warmup, 0, _MOST)
    length = 1
    if steps is not None:
        length = whole(f"{kind}: steps", steps, 1, _MOST) - before
        if length < 1:
            raise UsageError(f"{kind}: {steps} steps end before a warm-up of {before} does")
    t: Expr = Arg(0)
    if before:
        expr = where(t < float(before), top * (t / float(before)), after(maximum(t - float(before), 0.0), length))
    else:
        expr = after(t, length)
    arguments: Sequence[tuple[str, object]] = [
        *([] if steps is None else [("steps", steps)]),
        *([("warmup", before)] if before else []),
        *further.items(),
    ]
    return Schedule(f"{kind}({', '.join([repr(top), *(f'{k}={v!r}' for k, v in arguments)])})", str(as_expr(expr)))
