"""The order in which exchanges begin and are waited for, beside the texts of `overlap_exchanges/`: in drawn graphs."""

from __future__ import annotations

from random import Random

import pytest

from foreplan.graph import Graph, GraphBuilder, TensorType, Value, as_dtype
from foreplan.graph.verify import verify_graph
from foreplan.lower import chosen_target
from foreplan.ops.collective import AllToAll, Finish, Shift
from foreplan.ops.map import elementwise
from foreplan.passes.decompose import Decompose
from foreplan.passes.ranks import OverlapExchanges
from foreplan.passes.ranks.overlap import SOON
from tests.profile import pick

LARGE, SMALL = SOON // 2, 8  # elements


def drawn(rng: Random) -> Graph:
    """Sums of what was computed before, and exchanges of it, large and small."""
    b = GraphBuilder("drawn")
    made: dict[int, list[Value]] = {
        size: [b.input(f"x{size}", TensorType(as_dtype("float32"), (size,)))] for size in (LARGE, SMALL)
    }
    for _ in range(rng.randint(5, 40)):
        values = made[rng.choice([LARGE, SMALL])]
        one, two = (rng.choice(values[-6:]) for _ in range(2))
        exchange = rng.choice([AllToAll(2), AllToAll(2), Shift(2), None, None, None])
        values.append(b.apply(exchange, one) if exchange else elementwise(b, lambda x, y: x + 2 * y, one, two))
    return b.finish({f"y{i}": x for i, x in enumerate(x for values in made.values() for x in values)})


def in_line(graph: Graph) -> Graph:
    """The graph as `numpy` runs it."""
    return OverlapExchanges()(Decompose(chosen_target("numpy"))(graph))


@pytest.mark.parametrize("seed", range(pick(20, 100, 1000)))
def test_drawn_graphs(seed: int) -> None:
    """Nothing is read before it is there, and large exchanges wait for others that have begun since."""
    graph = drawn(Random(seed))
    found = in_line(graph)
    verify_graph(found)
    before = Decompose(chosen_target("numpy"))(graph)
    assert sorted(node.name for node in found.nodes) == sorted(node.name for node in before.nodes)
    place = {value: i for i, node in enumerate(found.nodes) for value in node.outputs}
    for node in found.nodes:
        if isinstance(node.op, Finish):
            begun, sent, *others = node.inputs
            assert sent.type.nbytes > SOON or not others
            kinds = {found.producer[other].op.kind for other in (begun, *others)}  # type: ignore[attr-defined]
            assert len(kinds) == 1
            assert all(place[begun] < place[other] < place[node.outputs[0]] for other in others)
