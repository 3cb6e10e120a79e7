"""The training form: one random state for all random ops, streams of their own, and what a step leaves for the next."""

from __future__ import annotations

import numpy as np

from foreplan.graph import Graph, GraphBuilder, Kind, TensorType
from foreplan.graph.types import FLOAT32
from foreplan.ops.random import STATE, Random, dropout
from foreplan.passes import simplified, training_form
from tests.ops.check import evaluate


def dropouts(count: int) -> Graph:
    b = GraphBuilder("noise")
    x = b.input("x", TensorType(FLOAT32, (64,)))
    return b.finish({f"y{i}": dropout(b, x, 0.5) for i in range(count)})


def test_random_ops_share_a_state_and_have_streams_of_their_own() -> None:
    graph = training_form(dropouts(3))
    (state,) = [value for value in graph.stored if value.kind is Kind.STATE]
    assert (state.name, state.type) == ("random_state", STATE)
    drawn = [node for node in graph.nodes if isinstance(node.op, Random)]
    assert len(drawn) == 3 and all(node.inputs == (state,) for node in drawn)
    found = evaluate(simplified(graph), {"x": np.ones(64, np.float32)}, {state.name: np.array([7, 41], np.uint64)})
    masks = {found[value].tobytes() for value in simplified(graph).outputs.values()}
    assert len(masks) == 3  # 64 tosses of a coin each: no two are the same by chance


def test_the_state_moves_on_by_one_step_and_keeps_its_seed() -> None:
    graph = training_form(dropouts(2))
    ((state, new),) = graph.updates.items()
    found = evaluate(graph, {"x": np.ones(64, np.float32)}, {state.name: np.array([7, 41], np.uint64)})
    np.testing.assert_array_equal(found[new], np.array([7, 42], np.uint64))


def test_without_random_ops_there_is_no_state() -> None:
    graph = training_form(dropouts(0))
    assert not graph.stored and not graph.updates
