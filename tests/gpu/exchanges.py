"""Graphs of one collective each, and what they are given."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from foreplan.graph import Graph, GraphBuilder, TensorType
from foreplan.graph.types import FLOAT32
from foreplan.ops import collective
from foreplan.ops.shape import transpose


def kinds(ranks: int) -> Mapping[str, collective.Collective]:
    """Every collective, by name."""
    return {
        "all_gather": collective.AllGather(ranks),
        "all_to_all": collective.AllToAll(ranks),
        "reduce_scatter": collective.ReduceScatter(ranks),
        "all_reduce": collective.AllReduce(ranks),
        "broadcast": collective.Broadcast(ranks, root=ranks - 1),
        "shift": collective.Shift(ranks, by=-1),
        "shift by nothing": collective.Shift(ranks, by=ranks),
        "own_part": collective.OwnPart(ranks),
        "only_on": collective.OnlyOn(ranks, root=1),
    }


def of_one(op: collective.Collective, shape: tuple[int, ...]) -> Graph:
    """A graph of a collective: of one tensor, and of another one that lies transposed."""
    b = GraphBuilder("g")
    x = b.input("x", TensorType(FLOAT32, shape))
    y = b.input("y", TensorType(FLOAT32, shape[::-1]))
    turned = transpose(b, y, tuple(reversed(range(len(shape)))))
    return b.finish({"of_x": b.apply(op, x), "of_y": b.apply(op, turned)})


def given(ranks: int, shape: tuple[int, ...]) -> list[dict[str, np.ndarray]]:
    """Inputs of each rank."""
    rng = np.random.default_rng(0)
    shapes = {"x": shape, "y": shape[::-1]}
    return [{name: rng.standard_normal(x, np.float32) for name, x in shapes.items()} for _ in range(ranks)]
