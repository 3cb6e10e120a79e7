"""What is sent, and where it arrives, stays as it is until the exchange is done, however little memory there is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import foreplan as fp
from foreplan.base.errors import PlanError
from foreplan.graph import Graph, GraphBuilder, TensorType
from foreplan.graph.types import FLOAT32
from foreplan.ops.collective import Begin, Finish
from foreplan.ops.join import concat
from foreplan.ops.map import elementwise
from foreplan.ops.reduce import reduce
from foreplan.runtime.world.check import check_exchanges
from tests.ranks.threads import Thread, run

SIZE = 1 << 14


def two_at_a_time() -> Graph:
    """An exchange of `2 x + 1`, which is cheap to compute again, beside work that needs much memory."""
    b = GraphBuilder("g")
    x = b.input("x", TensorType(FLOAT32, (SIZE,)))
    first = elementwise(b, lambda a: a * 7.0, x, dtype=FLOAT32)
    sent = elementwise(b, lambda a: a * 2.0 + 1.0, x, dtype=FLOAT32, name="sent")
    begun = [b.apply(Begin(2, "shift", 1), each) for each in (first, sent)]
    arrived = b.apply(Finish(2), begun[0], first, begun[1])
    factors = (1.0, 3.0, 5.0, 9.0)
    many = concat(b, [elementwise(b, lambda a, f=f: a * f, arrived, dtype=FLOAT32) for f in factors])
    total = reduce(b, "sum", elementwise(b, lambda a: a * a, many, dtype=FLOAT32), (0,))
    last = elementwise(b, lambda a, t: a + t, x, total, dtype=FLOAT32)
    return b.finish({"arrived": b.apply(Finish(2), begun[1], sent, total), "last": last})


def test_what_is_under_way_is_neither_dropped_nor_made_again() -> None:
    graph, rng = two_at_a_time(), np.random.default_rng(0)
    given = [rng.standard_normal(SIZE, np.float32) for _ in range(2)]
    whole = fp.compile(graph, target="numpy", remat="off").arena_bytes
    fitted = 0
    for share in (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7):
        try:
            step = fp.compile(graph, target="numpy", budget=int(share * whole), fission="off")
        except fp.DoesNotFitError:
            continue
        fitted += 1
        check_exchanges(step.program, step.plan)

        def arrived(world: Thread, step: fp.Compiled = step) -> np.ndarray:
            return step.bind().step({"x": given[world.rank]}).outputs["arrived"].copy()

        for rank, found in enumerate(run(2, arrived)):
            np.testing.assert_array_equal(found, given[1 - rank] * np.float32(2) + np.float32(1))
    assert fitted


def test_a_plan_that_makes_it_again_is_refused() -> None:
    """As the planner makes it, unless it is told what is under way."""
    program = fp.lower(two_at_a_time(), "numpy", links="5GB/s,2us")  # by which to begin again is dear
    assert [value.name for value in program.values if value.kept]
    untold = replace(program, values=tuple(replace(value, kept=False) for value in program.values))
    whole, told = fp.plan(program, remat="off").arena_bytes, set()
    for share in (0.9, 0.85):
        plan = fp.plan(untold, budget=int(share * whole))
        fp.verify(plan, untold)
        with pytest.raises(PlanError) as caught:
            check_exchanges(untold, plan)
        told.add(str(caught.value))
    assert any("was made again while it was sent" in text for text in told), told
