"""The order in which exchanges begin and are waited for."""

from __future__ import annotations

from random import Random

import pytest

from foreplan.graph import Fill, Graph, GraphBuilder, Kind, TensorType, Value, as_dtype
from foreplan.graph.verify import verify_graph
from foreplan.lower import chosen_target
from foreplan.ops.collective import AllGather, AllToAll, Begin, Finish, Shift
from foreplan.ops.map import elementwise
from foreplan.ops.shape import slice_axis
from foreplan.passes.decompose import decompose
from foreplan.passes.ranks import overlap_exchanges
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
    return overlap_exchanges(decompose(graph, chosen_target("numpy")))


@pytest.mark.parametrize("seed", range(pick(20, 100, 1000)))
def test_drawn_graphs(seed: int) -> None:
    """Nothing is read before it is there, and large exchanges wait for others that have begun since."""
    graph = drawn(Random(seed))
    found = in_line(graph)
    verify_graph(found)
    before = decompose(graph, chosen_target("numpy"))
    assert sorted(node.name for node in found.nodes) == sorted(node.name for node in before.nodes)
    place = {value: i for i, node in enumerate(found.nodes) for value in node.outputs}
    for node in found.nodes:
        if isinstance(node.op, Finish):
            begun, sent, *others = node.inputs
            assert sent.type.nbytes > SOON or not others
            kinds = {found.producer[other].op.kind for other in (begun, *others)}  # type: ignore[attr-defined]
            assert len(kinds) == 1
            assert all(place[begun] < place[other] < place[node.outputs[0]] for other in others)


def order(size: int) -> list[str]:
    """Three exchanges, each of another product, and what each is used for."""
    b = GraphBuilder("line")
    x = b.input("x", TensorType(as_dtype("float32"), (size,)))
    used = []
    for i in range(3):
        x = elementwise(b, lambda x: x * 2.0, x, name=f"made{i}")
        b.scope = f"{i}/"
        exchanged = b.apply(AllToAll(2), x)
        b.scope = ""
        used.append(elementwise(b, lambda y: y + 1.0, exchanged, name=f"used{i}"))
    graph = in_line(b.finish({f"y{i}": value for i, value in enumerate(used)}))
    short = {"begin_exchange": "begin", "finish_exchange": "wait"}
    return [f"{short[n.op.name]}{n.name[0]}" if n.op.name in short else n.name for n in graph.nodes]


def test_work_goes_on_beside_large_exchanges() -> None:
    assert " ".join(order(LARGE)) == ("made0 begin0 made1 begin1 wait0 used0 made2 begin2 wait1 used1 wait2 used2")


def test_small_ones_are_waited_for_at_once() -> None:
    assert " ".join(order(SMALL)) == ("made0 begin0 wait0 used0 made1 begin1 wait1 used1 made2 begin2 wait2 used2")


def test_kinds_do_not_wait_for_one_another() -> None:
    """What is gathered needs nothing that was computed: it begins at once, and what was sent before goes on."""
    b = GraphBuilder("line")
    x = b.input("x", TensorType(as_dtype("float32"), (LARGE,)))
    used = []
    for i in range(2):
        x = elementwise(b, lambda x: x * 2.0, x, name=f"made{i}")
        for what, op in (("sent", AllToAll(2)), ("gathered", AllGather(2))):
            stored = b.store(f"part{i}", x.type, Kind.FROZEN, Fill(0.0))
            b.scope = f"{what}{i}/"
            exchanged = b.apply(op, x if what == "sent" else stored)
            b.scope = ""
            used.append(elementwise(b, lambda y: y + 1.0, exchanged, name=f"used_{what}{i}"))
    nodes = [n.name for n in in_line(b.finish({f"y{i}": value for i, value in enumerate(used)})).nodes]
    at = {f"{name.partition('/')[0]} begins" if "begin" in name else name: i for i, name in enumerate(nodes)}
    assert at["gathered0 begins"] < at["made1"] < at["sent1 begins"] < at["used_sent0"]
    assert at["gathered1 begins"] < at["used_gathered0"]


def test_what_the_next_one_needs_is_waited_for_at_once() -> None:
    """Activations are gathered one behind the other, and the first once more at the end: no sooner."""
    b = GraphBuilder("line")
    x = first = b.input("x", TensorType(as_dtype("float32"), (LARGE,)))
    for i in range(3):
        b.scope = f"{i}/"
        x = slice_axis(b, b.apply(AllGather(2), x), 0, 0, LARGE)
    b.scope = "again/"
    nodes = in_line(b.finish({"y": x, "again": b.apply(AllGather(2, time=1), first)})).nodes
    begun = [node.name.partition("/")[0] for node in nodes if isinstance(node.op, Begin)]
    assert begun == ["0", "1", "2", "again"]


def test_weights_are_gathered_ahead_of_activations() -> None:
    """Of other ranks, and for the next products: what is gathered of the activations between needs the first ones."""
    b = GraphBuilder("line")
    x = b.input("x", TensorType(as_dtype("float32"), (LARGE,)))
    parts = [b.store(f"part{i}", x.type, Kind.FROZEN, Fill(0.0)) for i in range(2)]
    for i, part in enumerate(parts):
        b.scope = f"weights{i}/"
        weights = slice_axis(b, b.apply(AllGather(2, stride=2), part), 0, 0, LARGE)
        b.scope = f"tokens{i}/"
        x = slice_axis(b, b.apply(AllGather(2), elementwise(b, lambda x, y: x + y, weights, x)), 0, 0, LARGE)
    nodes = [node.name.partition("/")[0] + node.op.name for node in in_line(b.finish({"y": x})).nodes]
    assert nodes.index("weights1begin_exchange") < nodes.index("weights0finish_exchange")
    assert nodes.index("weights0finish_exchange") < nodes.index("tokens0begin_exchange")
