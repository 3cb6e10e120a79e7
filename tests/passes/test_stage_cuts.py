"""Cuts beside all cuts that there are, the order of micro-batches beside the paper's, and layouts of models."""

from __future__ import annotations

from itertools import combinations, pairwise
from random import Random

import pytest

import foreplan as fp
from foreplan import optim
from foreplan.compiler.step_graphs import layout_of
from foreplan.graph import Graph, GraphBuilder, Kind, Node, Normal, TensorType
from foreplan.graph.types import FLOAT32
from foreplan.ops.map import elementwise
from foreplan.ops.reduce import reduce
from foreplan.options import Options
from foreplan.passes.stages import Layout, Unit, best_cuts, laid_out, units_of


def best_of_all(times: list[int], traffic: list[int], stages: int, slack: float) -> tuple[int, int]:
    """Bytes and the slowest stage's time of the best cuts, by looking at every one."""
    found = []
    for cuts in combinations(range(1, len(times)), stages - 1):
        spans = [sum(times[a:b]) for a, b in pairwise((0, *cuts, len(times)))]
        found.append((sum(traffic[cut] for cut in cuts), max(spans)))
    least = min(slowest for _, slowest in found)
    return min(each for each in found if each[1] <= least + int(least * slack))


@pytest.mark.parametrize("seed", range(300))
def test_cuts_are_the_best_of_all(seed: int) -> None:
    rng = Random(seed)
    count = rng.randint(1, 12)
    stages, slack = rng.randint(1, count), rng.choice([0.0, 0.05, 0.5, 3.0])
    times = [rng.choice([0, 1, 2, 5, rng.randint(0, 100)]) for _ in range(count)]
    traffic = [rng.choice([0, 1, 4, rng.randint(0, 50)]) for _ in range(count)]
    cuts = best_cuts(times, traffic, stages, slack)
    assert len(cuts) == stages - 1 and all(a < b for a, b in pairwise((0, *cuts, count)))
    spans = [sum(times[a:b]) for a, b in pairwise((0, *cuts, count))]
    assert (sum(traffic[cut] for cut in cuts), max(spans)) == best_of_all(times, traffic, stages, slack)


def test_more_stages_than_operations() -> None:
    with pytest.raises(ValueError, match="do not make 4 stages"):
        best_cuts([1, 2, 3], [0, 0, 0], 4)


def drawn(rng: Random) -> Graph:
    """Parameters and sums of earlier values, some of which are read much later."""
    b = GraphBuilder("drawn")
    values = [b.input("x", TensorType(FLOAT32, (3,)))]
    for number in range(rng.randint(2, 9)):
        weight = b.store(f"w{number}", TensorType(FLOAT32, (3,)), Kind.PARAMETER, Normal(1.0))
        one, other = values[-1], rng.choice(values)
        values.append(elementwise(b, lambda x, y, w: x * w + y, one, other, weight))
    loss = reduce(b, "sum", values[-1])
    return b.finish({}, loss=loss)


@pytest.mark.parametrize("seed", range(60))
def test_layouts_are_the_best_of_all(seed: int) -> None:
    """Bytes counted from what each stage reads of earlier ones, of every way to cut a drawn graph."""
    rng = Random(seed)
    graph = drawn(rng)
    stages = rng.randint(1, len(graph.nodes))
    weights = {node.name: rng.randint(1, 9) for node in graph.nodes}

    def price(node: Node) -> int:
        """Of forward nodes alone: those of derivatives have other names."""
        return weights.get(node.name, 0)

    def bytes_of(cuts: tuple[int, ...]) -> int:
        """What crosses: values and, of all but inputs, cotangents."""
        place = {value: at for at, node in enumerate(graph.nodes) for value in node.outputs}
        last = {value: at for at, node in enumerate(graph.nodes) for value in node.inputs}
        return sum(
            2 * value.type.nbytes for cut in cuts for value, at in place.items() if at < cut <= last.get(value, -1)
        )

    found = laid_out(graph, stages, price)
    assert [node for nodes in found.owned for node in nodes] == list(graph.nodes)
    sizes = [len(nodes) for nodes in found.owned]
    cuts = tuple(sum(sizes[: i + 1]) for i in range(stages - 1))
    times = [weights[node.name] for node in graph.nodes]
    spans = [sum(times[a:b]) for a, b in pairwise((0, *cuts, len(times)))]
    assert found.nanoseconds == tuple(spans)
    traffic = [bytes_of((cut,)) for cut in range(len(times))]
    assert (bytes_of(cuts), max(spans)) == best_of_all(times, traffic, stages, 0.05)
    assert bytes_of(cuts) == sum(2 * value.type.nbytes for values in found.crossing for value in values)


def layout(text: str, stages: int) -> Layout:
    options = Options(
        fp.losses.cross_entropy, optim.SGD(0.1), target="cuda:h100", ranks=stages, stages=stages, accumulate=4
    )
    return layout_of(fp.models.build(text), options)


def test_transformers_are_cut_between_blocks() -> None:
    """There alone one tensor crosses. The embedding is of the first stage, and of the last one where it is tied."""
    found = layout("gpt2_small:layers=12,vocabulary=512,batch=1", 4)
    assert [[value.type.shape for value in values] for values in found.crossing] == [[(1, 1024, 768)]] * 3
    names = {value.name: value for value in found.graph.stored}
    assert found.holders(names["wte.weight"]) == (0, 3) and found.holders(names["wpe.weight"]) == (0,)
    assert max(found.nanoseconds) <= 1.1 * sum(found.nanoseconds) / 4
    lines = found.as_text().splitlines()
    assert len(lines) == 4 and lines[0].startswith("stage 0: ") and "sends 3.00 MiB in" in lines[0]


def test_what_only_stored_values_make_crosses_nowhere() -> None:
    """It is made in both stages that read it, right before its first reader there."""
    b = GraphBuilder("scaled")
    x = b.input("x", TensorType(FLOAT32, (3,)))
    weight = b.store("w", TensorType(FLOAT32, (3,)), Kind.PARAMETER, Normal(1.0))
    half = elementwise(b, lambda w: w * 0.5, weight, name="half")
    for name in ("first", "second", "third", "fourth"):
        x = elementwise(b, lambda x, w: x * w + 1.0, x, half if name != "second" else weight, name=name)
    graph = b.finish({}, loss=reduce(b, "sum", x))
    found = laid_out(graph, 3, lambda node: {"first": 2, "second": 2, "third": 1, "fourth": 1}.get(node.name, 0))
    assert [[node.name for node in nodes] for nodes in found.nodes] == [
        ["half", "first"],
        ["second"],
        ["half", "third", "fourth", "reduce"],
    ]
    assert [[value.name for value in values] for values in found.crossing] == [["first"], ["second"]]
    assert found.holders(weight) == (0, 1, 2)


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 1), (2, 1), (2, 5), (4, 2), (4, 4), (4, 9), (7, 30)])
def test_the_order_of_micro_batches(stages: int, micro_batches: int) -> None:
    """Narayanan et al. 2021, section 2.2: no more than as many in flight as there are stages from here on; the last
    stage runs each back at once; and each runs in its order, forward before back.
    """
    for stage in range(stages):
        units = units_of(stage, stages, micro_batches)
        for forward in (True, False):
            assert [unit.number for unit in units if unit.forward is forward] == list(range(micro_batches))
        flying, most = 0, 0
        for unit in units:
            flying += 1 if unit.forward else -1
            most = max(most, flying)
            assert flying >= 0 and (unit.forward or units.index(Unit(True, unit.number)) < units.index(unit))
        assert most == min(stages - stage, micro_batches)
    assert [unit.forward for unit in units_of(stages - 1, stages, micro_batches)] == [True, False] * micro_batches
