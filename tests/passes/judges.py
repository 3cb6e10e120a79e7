"""How each text of a pass is judged, beside its words: what the graph before and the graph after compute.

Most passes are held by `hold_same`. Others mean something else, and have a judge of their own in `JUDGES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from foreplan.graph import Graph, Kind, Value
from foreplan.graph.flat import Flat
from foreplan.graph.init import generator_for
from foreplan.graph.shard import Sharded
from foreplan.graph.verify import verify_graph
from foreplan.ops.marks import Gradient, StopGradient
from foreplan.passes import differentiate
from foreplan.passes.expand_gradients import expand_gradients
from foreplan.passes.ranks import Ranks, SumGradients
from tests.ops.check import evaluate
from tests.passes.of_ranks import evaluate_ranks
from tests.passes.texts import drawn, hold_same, named, tolerance

Arrays = Mapping[str, np.ndarray]
Judge = Callable[[Graph, Graph, np.random.Generator], None]
# From the name of a result, what the graph before gives of it on each rank, a rank, and that graph, to what the graph
# after is to give there.
Wanted = Callable[[str, Sequence[np.ndarray], int, Graph], np.ndarray]
STEP = 1e-6  # of differences
RANKS = 2  # of texts about several
# The passes that change no bit of any result.
EXACT = {
    "fold_constants",
    "fuse_maps",
    "fuse_norm_masks",
    "group_updates",
    "join_maps",
    "pack_attention",
    "pack_masks",
    "share_common",
    "trim_loops",
    "write_out_loops",
}


def judge(name: str) -> Judge:
    """The judge of a pass."""
    return JUDGES.get(name, partial(hold_same, far=0.0 if name in EXACT else None))


def hold_common(before: Graph, after: Graph, rng: np.random.Generator) -> None:
    """Check that what both graphs return is the same; stored values that have become wider have the same numbers.
    A pass may choose what is returned, trained or read.
    """
    inputs, stored = drawn(after.inputs, rng), drawn(before.stored, rng)
    wider = {value.name: value.dtype.numpy for value in after.stored}
    pairs = [(before, after)]
    if before.loss is not None and before.parameters and after.parameters:
        pairs.append((differentiate(before), differentiate(after)))
    for old, new in pairs:
        found = evaluate(old, inputs, stored, hard=False)
        changed = {name: array.astype(wider[name]) for name, array in stored.items() if name in wider}
        _hold(named(old), found, named(new), evaluate(new, inputs, changed, hard=False), tolerance(old, new))


def hold_first(before: Graph, after: Graph, rng: np.random.Generator) -> None:
    """Check that both graphs return the same when stored values have their first content, which is of another kind."""
    inputs = drawn(before.inputs, rng)
    results = evaluate(before, inputs, hard=False), evaluate(after, inputs, hard=False)
    _hold(named(before), results[0], named(after), results[1], tolerance(before, after))


def hold_forward(before: Graph, after: Graph, rng: np.random.Generator) -> None:
    """Check that both graphs return the same, whatever gradients they have: marks are for these alone."""
    hold_common(replace(before, loss=None), replace(after, loss=None), rng)


def hold_differences(before: Graph, after: Graph, rng: np.random.Generator) -> None:
    """Check that a step returns what its forward pass does, and the gradients that differences of the loss give; or
    moves each parameter against its gradient, by the learning rate.
    """
    inputs, stored = drawn(before.inputs, rng), drawn(before.stored, rng)
    found = evaluate(after, inputs, stored, hard=False)
    forward = evaluate(before, inputs, stored, hard=False)
    rates = [found[value] for value in after.inputs if value.name == "learning_rate"]
    moved = {old: new for old, new in after.updates.items() if old.kind is Kind.PARAMETER}
    results = {name: value for name, value in named(after).items() if value not in moved.values()}
    _hold(named(before), forward, results, found, tolerance(before))
    assert before.loss is not None
    gradients = {name: found[value] for name, value in after.gradients.items()}
    gradients |= {old.name: (found[before.updates.get(old, old)] - found[new]) / rates[0] for old, new in moved.items()}
    for name, gradient in gradients.items():
        wanted = _differences(before, before.loss, inputs | stored, name, gradient.shape)
        np.testing.assert_allclose(gradient, wanted, rtol=1e-6, atol=1e-8, err_msg=name)


def hold_inner_differences(before: Graph, after: Graph, rng: np.random.Generator) -> None:
    """Check gradients that a model asks for, of its inputs, and returns: against differences of what they are of."""
    given = drawn(before.inputs, rng) | drawn(before.stored, rng)
    found = evaluate(after, given, given, hard=False)
    for at, node in enumerate(before.nodes):
        for x, gradient in zip(node.inputs[1:], node.outputs) if isinstance(node.op, Gradient) else ():
            y = node.inputs[0]
            inner = expand_gradients(replace(before, nodes=before.nodes[:at], outputs={"y": y}, loss=None, updates={}))
            wanted = _differences(inner, inner.outputs["y"], given, x.name, x.shape)
            for name, value in before.outputs.items():
                if value is gradient:
                    np.testing.assert_allclose(found[after.outputs[name]], wanted, rtol=1e-6, atol=1e-8, err_msg=name)


def hold_mean_loss(before: Graph, after: Graph, rng: np.random.Generator) -> None:
    """Check that a body that runs twice returns the mean of both losses the second time."""
    assert before.loss is not None and after.loss is not None
    stored, kept, losses = drawn(before.stored, rng), dict[str, np.ndarray](), list[np.ndarray]()
    for _ in range(2):
        inputs = drawn(before.inputs, rng)
        losses.append(evaluate(before, inputs, stored, hard=False)[before.loss])
        found = evaluate(after, inputs, stored | kept, hard=False)
        kept = {old.name: found[new] for old, new in after.updates.items() if old not in before.updates}
    np.testing.assert_allclose(found[after.loss], np.mean(losses), rtol=tolerance(before))


def only_rules(before: Graph, after: Graph, rng: np.random.Generator) -> None:
    """Check the rules of graphs alone: a training form computes something else than inference, at random where it has
    dropout; a stage of several has a part of the results; and steps of several ranks are held in tests/ranks to those
    of one.
    """
    verify_graph(after)


def of_ranks(wanted: Wanted, alike: bool = False) -> Judge:
    """A judge of graphs that several ranks run together: both are run so, on inputs of each rank's own.

    Args:
        wanted: see `Wanted`.
        alike: whether all ranks have the same inputs.
    """

    def hold(before: Graph, after: Graph, rng: np.random.Generator) -> None:
        whole = drawn(before.stored, rng)
        groups = [node.op.ranks * node.op.stride for node in after.nodes if hasattr(node.op, "stride")]
        count = max([RANKS, *groups])
        inputs = [drawn(before.inputs, rng)] * count if alike else [drawn(before.inputs, rng) for _ in range(count)]
        results = []
        for graph in (before, after):
            stored = [{x.name: _part(x, whole, rank) for x in graph.stored} for rank in range(count)]
            results.append(evaluate_ranks(graph, inputs, stored))
        olds, news = named(before), named(after)
        assert olds.keys() == news.keys()
        for name, value in olds.items():
            old = [found[value] for found in results[0]]
            for rank, found in enumerate(results[1]):
                expected = wanted(name, old, rank, before)
                np.testing.assert_allclose(found[news[name]], expected, rtol=1e-5, atol=1e-6, err_msg=name)

    return hold


def hold_parts(before: Graph, after: Graph, rng: np.random.Generator) -> None:
    """Check that ranks that compute parts of products give what one gives, and that their gradients are those of the
    sum of their losses, which are alike.
    """
    of_ranks(_same, alike=True)(before, after, rng)
    if before.loss is not None:
        step = SumGradients(Ranks(RANKS, tensor=RANKS))(differentiate(after))
        of_ranks(_times_ranks, alike=True)(differentiate(before), step, rng)


def _same(name: str, found: Sequence[np.ndarray], rank: int, graph: Graph) -> np.ndarray:
    return found[rank]


def _share(name: str, found: Sequence[np.ndarray], rank: int, graph: Graph) -> np.ndarray:
    return found[rank] / len(found) if name == "loss" else found[rank]


def _sum_of_losses(name: str, found: Sequence[np.ndarray], rank: int, graph: Graph) -> np.ndarray:
    return np.sum(found, 0) if name == "loss" else found[rank]


def _times_ranks(name: str, found: Sequence[np.ndarray], rank: int, graph: Graph) -> np.ndarray:
    return len(found) * found[rank] if name.startswith("gradient ") else found[rank]


def _sum_of_gradients(name: str, found: Sequence[np.ndarray], rank: int, graph: Graph) -> np.ndarray:
    what, _, of = name.partition(" ")
    if what != "gradient":
        return found[rank]
    (parameter,) = [value for value in graph.stored if value.name == of]
    if not isinstance(parameter.init, Sharded):
        return np.sum(found, 0)
    shard = parameter.init.shard
    return shard.join([np.sum(found[part :: shard.ranks], 0) for part in range(shard.ranks)])


def _part(value: Value, whole: Arrays, rank: int) -> np.ndarray:
    """What a rank stores: all of a tensor, its part of one, or its part of a row of several."""
    if isinstance(value.init, Flat):
        lies = value.init
        row = np.zeros(value.type.size * lies.ranks, value.dtype.numpy)
        for each in lies.members:
            row[each.start : each.start + each.type.size] = whole[each.name].reshape(-1)
        return np.split(row, lies.ranks)[rank // lies.stride % lies.ranks]
    given = whole.get(value.name)
    if isinstance(value.init, Sharded) and (given is None or given.shape != value.shape):
        sharded = value.init
        array = _first(value, sharded.type.shape) if given is None else given
        return sharded.shard.take(array, rank % sharded.shard.ranks)
    return _first(value, value.shape) if given is None else given


def _first(value: Value, shape: Sequence[int]) -> np.ndarray:
    assert value.init is not None
    array = np.empty(shape, value.dtype.numpy)
    value.init.fill(array, generator_for(0, value.name))
    return array


def _differences(graph: Graph, y: Value, given: Arrays, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Central differences of a number by an input or a stored value. What is stopped stays as it is."""
    stops = [node for node in graph.nodes if isinstance(node.op, StopGradient)]
    stopped = [node.outputs[0] for node in stops]
    found = evaluate(graph, given, given, hard=False)
    given = {**given, **{value.name: found[value] for value in stopped}}
    still = tuple(node for node in graph.nodes if node not in stops)
    graph = replace(graph, inputs=(*graph.inputs, *stopped), nodes=still)
    wanted = np.empty(shape)
    for index in np.ndindex(shape):
        sides = []
        for step in (STEP, -STEP):
            moved = np.array(given[name])
            moved[index] += step
            content = {**given, name: moved}
            sides.append(float(evaluate(graph, content, content, hard=False)[y]))
        wanted[index] = (sides[0] - sides[1]) / (2 * STEP)
    return wanted


def _hold(
    olds: Mapping[str, Value],
    old: Mapping[Value, np.ndarray],
    news: Mapping[str, Value],
    new: Mapping[Value, np.ndarray],
    far: float,
) -> None:
    """Check that results of one name are the same."""
    for name in olds.keys() & news.keys():
        wanted, found = (each.astype(np.float64) for each in (old[olds[name]], new[news[name]]))
        scale = np.abs(wanted[np.isfinite(wanted)]).max(initial=0.0)
        np.testing.assert_allclose(found, wanted, rtol=far, atol=far * scale, err_msg=name)


JUDGES: dict[str, Judge] = {
    "attach_loss": hold_common,
    "choose_trained": hold_common,
    "cut_into_stages": only_rules,
    "decompose": of_ranks(_same),
    "differentiate": hold_differences,
    "differentiate_in_parts": only_rules,
    "expand_gradients": hold_inner_differences,
    "gather_again": of_ranks(_same),
    "lay_out_weights": of_ranks(_same),
    "master_weights": hold_common,
    "mean_loss": hold_mean_loss,
    "mean_of_all": of_ranks(_sum_of_losses),
    "overlap_exchanges": of_ranks(_same),
    "quantised_weights": hold_first,
    "select_outputs": hold_common,
    "share_of_mean": of_ranks(_share),
    "split_products": hold_parts,
    "stage_step": only_rules,
    "sum_gradients": of_ranks(_sum_of_gradients),
    "sync_batch_norm": of_ranks(_same, alike=True),
    "training_form": only_rules,
    "without_marks": hold_forward,
}
