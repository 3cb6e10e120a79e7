"""Collectives against what they say in NumPy, and their derivatives against what adjoints are: <c, A x> = <A' c, x>."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import foreplan as fp
from foreplan.graph import Graph, GraphBuilder, TensorType
from foreplan.graph.registry import parse_op
from foreplan.graph.types import DTYPES
from foreplan.ops.collective import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Collective,
    OnlyOn,
    OwnPart,
    ReduceScatter,
    Shift,
)
from foreplan.ops.local_index import LocalIndex
from foreplan.runtime.session import Session
from tests.ranks.threads import Thread, run

Arrays = list[np.ndarray]


def pieces(xs: Arrays) -> list[Arrays]:
    """By rank, its tensor as one piece a rank."""
    return [np.split(x, len(xs)) for x in xs]


# What each rank gets, from what all have.
OPS: dict[str, tuple[Callable[[int], Collective], Callable[[Arrays], Arrays]]] = {
    "all_reduce": (AllReduce, lambda xs: [sum(xs)] * len(xs)),  # type: ignore[list-item]
    "reduce_scatter": (ReduceScatter, lambda xs: [sum(p[r] for p in pieces(xs)) for r in range(len(xs))]),  # type: ignore[misc]
    "all_gather": (AllGather, lambda xs: [np.concatenate(xs)] * len(xs)),
    "all_to_all": (AllToAll, lambda xs: [np.concatenate([p[r] for p in pieces(xs)]) for r in range(len(xs))]),
    "broadcast": (lambda n: Broadcast(n, n - 1), lambda xs: [xs[-1]] * len(xs)),
    "shift": (lambda n: Shift(n, 1), lambda xs: [xs[r - 1] for r in range(len(xs))]),
    "shift back": (lambda n: Shift(n, -2), lambda xs: [xs[(r + 2) % len(xs)] for r in range(len(xs))]),
    "own_part": (OwnPart, lambda xs: [pieces(xs)[r][r] for r in range(len(xs))]),
    "only_on": (lambda n: OnlyOn(n, n // 2), lambda xs: [x * (r == len(xs) // 2) for r, x in enumerate(xs)]),
}


def forward(op: Collective, type: TensorType) -> Graph:
    """y = op(x)."""
    b = GraphBuilder()
    return b.finish({"y": b.apply(op, b.input("x", type))})


def backward(op: Collective, type: TensorType) -> Graph:
    """The cotangent of x, from that of y."""
    b = GraphBuilder()
    x = b.input("x", type)
    y = b.apply(op, x)
    (g,) = op.vjp(b, [x], [y], [b.input("c", y.type)])
    assert g is not None
    return b.finish({"g": g})


def on_ranks(graph: Graph, target: str, inputs: list[dict[str, np.ndarray]]) -> Arrays:
    """The output on each rank."""
    program = fp.lower(graph, target)
    plan = fp.plan(program)

    def job(world: Thread) -> Any:
        return next(iter(Session(program, plan).step(inputs[world.rank]).outputs.values()))

    return run(len(inputs), job)


@pytest.mark.parametrize("name", OPS)
def test_what_moves_gives_elements_of_ranks_alone(name: str) -> None:
    make, wanted = OPS[name]
    xs = np.split(np.arange(1.0, 33.0) ** 2, 4)  # no sum of which is another one
    assert make(4).moves == all(np.isin(y, xs).all() for y in wanted(xs))


@pytest.mark.parametrize("target", ["numpy", "cpu"])
@pytest.mark.parametrize("name", OPS)
def test_what_each_rank_gets(name: str, target: str) -> None:
    make, meaning = OPS[name]
    rng = np.random.default_rng(sum(map(ord, name)))
    for ranks in (2, 3, 5):
        shape = (ranks * int(rng.integers(1, 4)), *rng.integers(1, 9, rng.integers(0, 3)))
        type = TensorType(DTYPES["float32"], tuple(map(int, shape)))
        xs = [rng.standard_normal(shape).astype(np.float32) for _ in range(ranks)]
        ys = on_ranks(forward(make(ranks), type), target, [{"x": x} for x in xs])
        for y, wanted in zip(ys, meaning(xs), strict=True):
            np.testing.assert_allclose(y, wanted, rtol=1e-6, atol=1e-6)
        cs = [rng.standard_normal(y.shape).astype(np.float32) for y in ys]
        gs = on_ranks(backward(make(ranks), type), target, [{"x": x, "c": c} for x, c in zip(xs, cs)])
        pairs = [sum(float(np.vdot(a, b)) for a, b in zip(*both)) for both in ((cs, ys), (gs, xs))]
        assert pairs[0] == pytest.approx(pairs[1], rel=1e-4, abs=1e-4)


@pytest.mark.parametrize(("ranks", "stride"), [(2, 1), (2, 3), (3, 2), (3, 1)])
@pytest.mark.parametrize("name", OPS)
def test_groups(name: str, ranks: int, stride: int) -> None:
    """Of six ranks: neighbours, or ranks that stand apart. Each group does what a job of its size does."""
    make, meaning = OPS[name]
    op = dataclasses.replace(make(ranks), stride=stride)
    rng = np.random.default_rng(stride)
    xs = [rng.standard_normal((6, 2)).astype(np.float32) for _ in range(6)]
    b = GraphBuilder()
    x = b.input("x", TensorType(DTYPES["float32"], (6, 2)))
    graph = b.finish({"y": b.apply(op, x), "sum": b.apply(AllReduce(6), x)})
    ys = on_ranks(graph, "numpy", [{"x": x} for x in xs])
    numbers = np.arange(6).reshape(-1, ranks, stride).transpose(0, 2, 1).reshape(-1, ranks)
    assert parse_op(str(op)) == op
    for group in numbers:
        for rank, wanted in zip(group, meaning([xs[r] for r in group]), strict=True):
            np.testing.assert_allclose(ys[rank], wanted, rtol=1e-6, atol=1e-6)


def test_local_index() -> None:
    """Rows of a table of three parts; from the end too, if none is ignored."""
    for op in (LocalIndex(3, extent=4), LocalIndex(3, extent=4, ignored=-100)):
        b = GraphBuilder()
        x = b.input("x", TensorType(DTYPES["int64"], (24,)))
        graph = b.finish({"y": b.apply(op, x)})
        assert parse_op(str(op)) == op
        given = np.arange(-12, 12) if op.ignored is None else np.array([*range(12), *[-100] * 12])
        ys = on_ranks(graph, "numpy", [{"x": given}] * 3)
        for rank, y in enumerate(ys):
            rows = np.where(given == -100, -1, given % 12)
            np.testing.assert_array_equal(y, np.where(rows // 4 == rank, rows - 4 * rank, -1))
        for wrong in (12, -13 if op.ignored is None else -1):
            with pytest.raises(fp.InputError, match="'x' holds"):
                on_ranks(graph, "numpy", [{"x": np.full(24, wrong)}] * 3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int64", "bool", "uint8", "float64"])
def test_elements_of_all_types_move(dtype: str) -> None:
    type = TensorType(DTYPES[dtype], (6, 3))
    xs = [np.random.default_rng(r).integers(0, 2, (6, 3)).astype(type.dtype.numpy) for r in range(3)]
    for name in ("all_gather", "all_to_all", "broadcast", "shift"):
        make, meaning = OPS[name]
        for y, wanted in zip(on_ranks(forward(make(3), type), "numpy", [{"x": x} for x in xs]), meaning(xs)):
            np.testing.assert_array_equal(y, wanted)


def test_sums_are_taken_in_the_order_of_ranks() -> None:
    """Whatever arrives first: 2^24 + 1 - 2^24 is 0 in this order, and 1 in others."""
    type = TensorType(DTYPES["float32"], (3,))
    xs = [np.full(3, x, np.float32) for x in (2.0**24, 1.0, -(2.0**24))]
    for y in on_ranks(forward(AllReduce(3), type), "numpy", [{"x": x} for x in xs]):
        np.testing.assert_array_equal(y, np.zeros(3))


@pytest.mark.parametrize("name", OPS)
def test_text(name: str) -> None:
    op = OPS[name][0](4)
    assert parse_op(str(op)) == op


@pytest.mark.parametrize("name", ["reduce_scatter", "all_to_all", "own_part"])
def test_shapes_that_do_not_divide(name: str) -> None:
    with pytest.raises(fp.ShapeError, match="must be a multiple of the 4 ranks"):
        forward(OPS[name][0](4), TensorType(DTYPES["float32"], (6, 2)))
    with pytest.raises(fp.ModelError, match="root must be one of 4 ranks"):
        parse_op("rank_broadcast(ranks=4, root=4)")
    with pytest.raises(fp.ModelError, match="ranks and stride must be 1 or more"):
        parse_op("all_reduce(ranks=0)")


@pytest.mark.parametrize("name", OPS)
def test_one_rank_alone(name: str) -> None:
    """Nothing is exchanged, and the result is what it is for all ranks there are."""
    make, meaning = OPS[name]
    x = np.arange(6, dtype=np.float32)
    program = fp.lower(forward(make(1), TensorType(DTYPES["float32"], (6,))), "numpy")
    (y,) = Session(program, fp.plan(program)).step({"x": x}).outputs.values()
    np.testing.assert_array_equal(y, meaning([x])[0])
