"""The op's derivative against differences of its float64 kernel."""

from __future__ import annotations

from random import Random

import numpy as np

from foreplan.graph import Builder, Op, Value
from tests.ops.check import check_vjp
from tests.profile import pick
from tests.sweep.case import Case
from tests.sweep.judges.numpy import outputs
from tests.sweep.table import Entry, class_of

# Kinks, steep places and states that a step must not change: numbers apart from each other, and no state.
SAMPLES = pick(3, 4, 6)  # elements of each input that are tried


def draw(entry: Entry, rng: Random) -> Case:
    """A case of float64, at which it can be differentiated."""
    return (entry.smooth or entry.draw)(rng)


def serves(entry: Entry, name: str) -> bool:
    """Whether an op has a derivative."""
    cls = class_of(name)
    return cls.vjp is not Op.vjp and cls.name not in (
        "random",
        "arg_reduce",
        "stop_gradient",
        "straight_through",
        "quantised",
    )


def judge(case: Case) -> int:
    """Raise AssertionError where the derivative is none; 0 where none was taken."""
    op = case.op
    if op.name == "linear_cross_entropy" and op.frozen:  # type: ignore[attr-defined]
        return 0  # its weights are those that nobody wants gradients of

    def build(b: Builder, *values: Value) -> list[Value]:
        made = b.node(op, *values)
        # Statistics, log-sum-exps and gradients that forward ops also give are not differentiated.
        return made[:1] if op.name in FIRST_ONLY else made

    arrays = [_smooth(x, i, op.name) for i, x in enumerate(case.arrays())]
    if op.name != "map" and not all(np.isfinite(y).all() for y in outputs(op, arrays) if y.dtype.kind == "f"):
        return 0  # a window that sees nothing, a target that is wrong
    check_vjp(build, *arrays, tol=2e-5, samples=SAMPLES)
    return 1


VARIANCES = {"batch_norm": 4, "batch_norm_grad": 3}  # the input that must be positive
FIRST_ONLY = ("attention", "linear_cross_entropy", "max_pool", "top_k")


def _smooth(x: np.ndarray, index: int, name: str) -> np.ndarray:
    """Numbers where differences mean something, in float64."""
    if x.dtype.kind in "iub":
        return x
    rng = np.random.default_rng(x.size + index)
    if name in ("max_pool", "top_k"):  # no two that a step could exchange
        return (rng.permutation(x.size).reshape(x.shape) - x.size / 2) * 0.37 + 0.11
    if name == "reduce":  # likewise, and none that cancel: sums are compared in several orders
        return (rng.permutation(x.size).reshape(x.shape) + 1) * (8.0 / max(1, x.size))
    if VARIANCES.get(name) == index:
        return rng.uniform(0.5, 2.0, x.shape)
    return rng.standard_normal(x.shape)
