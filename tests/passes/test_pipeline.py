"""The list of passes: what passes require and ensure holds on models, and what can be left out can."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import foreplan as fp
from foreplan.base.errors import ForeplanError, UsageError
from foreplan.compiler.pipeline import passes_of_inference, passes_of_training
from foreplan.compiler.step_graphs import step_graphs, uses_of
from foreplan.frontend.losses import attach_loss
from foreplan.graph import Graph
from foreplan.options import Options
from foreplan.passes import (
    Differentiate,
    Entry,
    Pass,
    Ran,
    SelectOutputs,
    Stage,
    before,
    run_passes,
    split_channels,
    without,
)
from foreplan.passes.choose_trained import FreezeStatistics
from foreplan.passes.pipeline import Entries, of_stages
from foreplan.passes.ranks import DifferentiateInParts, GradientUses, SyncBatchNorm
from foreplan.passes.tile.samples import SplitBands, SplitLogits, SplitSamples
from foreplan.passes.training import TrainingForm
from tests.ops.check import evaluate
from tests.passes.texts import PASSES

SMALL = (
    "mlp:batch=3,width=8,layers=2",
    "resnet18:batch=2,size=32",
    "gpt2_small:batch=1,seq=8,layers=1,width=16,heads=2",
)
TRAINING = passes_of_training(Options(fp.losses.cross_entropy, target="numpy"))
OPTIONAL = sorted({each.name for each in TRAINING if each.step.optional})


@pytest.mark.parametrize("target", ["numpy", "cpu:threads=1", "cuda:h100"])
@pytest.mark.parametrize("name", SMALL)
def test_a_list_has_stages_and_says_what_changed(name: str, target: str) -> None:
    ran: list[Ran] = []
    graph = fp.models.build(name)
    made, _ = step_graphs(graph, Options(fp.losses.cross_entropy, fp.optim.SGD(0.1), target=target), ran.append)
    assert ran[-1].graph is made and any(each.changed for each in ran)
    assert [each.entry.stage for each in ran] == sorted((each.entry.stage for each in ran), key=list(Stage).index)
    for old, each in zip((graph, *(each.graph for each in ran)), ran):
        again = each.graph is not old and each.graph.as_text() == old.as_text()
        assert not again, f"{each.entry.name} has nothing to do, and gives another graph"


def test_every_pass_says_what_it_requires_and_ensures() -> None:
    assert not [name for name, kind in PASSES.items() if not (kind.requires and kind.ensures)]


@pytest.mark.parametrize("name", OPTIONAL)
def test_an_optional_pass_can_be_left_out(name: str) -> None:
    graph = fp.models.build("mlp:batch=3,width=8,layers=2,inputs=6,classes=4")
    ran: list[Ran] = []
    whole = run_passes(graph, TRAINING)
    less = run_passes(graph, without(name)(TRAINING), watch=ran.append)
    assert name not in {each.entry.name for each in ran}
    rng = np.random.default_rng(0)
    data = {"x": rng.normal(size=(3, 6)).astype(np.float32), "target": rng.integers(0, 4, 3)}
    stored = {v.name: rng.normal(size=v.shape).astype(np.float32) for v in graph.parameters}
    found, wanted = evaluate(less, data, stored, hard=False), evaluate(whole, data, stored, hard=False)
    for parameter, gradient in whole.gradients.items():
        np.testing.assert_allclose(found[less.gradients[parameter]], wanted[gradient], rtol=1e-5, atol=1e-6)


def test_what_is_left_out_by_mistake_is_named() -> None:
    with pytest.raises(UsageError, match=r"no pass 'fuse'; the passes are accumulate, attach_loss, choose_trained"):
        without("fuse")
    with pytest.raises(UsageError, match="nothing works without the pass 'differentiate'"):
        without("differentiate")


# Options of a training step, with the passes that they add, and those that they take away.
SGD = fp.optim.SGD(0.1)
ASKED: dict[str, tuple[dict[str, object], set[str], set[str]]] = {
    "weights": ({"freeze": ["a"]}, {"choose_trained"}, set()),
    "narrow weights": ({"narrow_weights": True}, set(), {"master_weights"}),
    "no loss": ({"loss": None}, set(), {"attach_loss"}),
    "bf16": ({"precision": "bf16"}, {"with_precision", "write_out_loops"}, set()),
    "fp16": ({"precision": "fp16"}, {"with_precision", "write_out_loops"}, {"chunk_losses"}),
    "a target without loops": ({"target": "cuda:h100"}, {"write_out_loops"}, set()),
    "ranks": ({"ranks": 2}, {"share_of_mean", "sum_gradients", "mean_of_all"}, set()),
    "statistics of one rank": ({"batch_norm": "sync"}, set(), set()),
    "statistics of all": (
        {"batch_norm": "sync", "ranks": 2},
        {"share_of_mean", "sum_gradients", "mean_of_all", "sync_batch_norm"},
        set(),
    ),
    "products": (
        {"ranks": 2, "tensor": 2},
        {"share_of_mean", "sum_gradients", "mean_of_all", "split_products", "gather_again"},
        set(),
    ),
    "stages": ({"ranks": 2, "stages": 2, "optimizer": SGD}, {"stage_step"}, {"differentiate"}),
    "a segment": ({"split": {"a": 2}}, {"split_segments"}, set()),
}


def names_of(entries: Entries) -> set[str]:
    return {each.name for each in entries}


@pytest.mark.parametrize("case", ASKED)
def test_what_an_option_adds_to_the_list(case: str) -> None:
    given, more, less = ASKED[case]
    plain = names_of(TRAINING)
    asked = names_of(passes_of_training(Options(**{"loss": "cross_entropy", "target": "numpy", **given})))  # type: ignore[arg-type]
    assert (asked - plain, plain - asked) == (more, less)


def test_the_options_of_passes() -> None:
    def steps(tiles: Iterable[Pass] = (), uses: GradientUses | None = None, **given: object) -> list[Pass]:
        options = Options(**{"loss": "mse", "target": "numpy", **given})  # type: ignore[arg-type]
        return [each.step for each in passes_of_training(options, tiles, uses)]

    assert FreezeStatistics(False) in steps() and TrainingForm(1) in steps()
    assert SelectOutputs(("y",)) in steps(outputs=["y"])
    assert FreezeStatistics(True) in steps(batch_norm="frozen") and SelectOutputs(()) in steps()
    synced = steps(batch_norm="sync", ranks=2)
    assert SyncBatchNorm(2) in synced and TrainingForm(2) in synced
    (step,) = (each for each in steps(gradients=["x"], precision="fp16") if isinstance(each, Differentiate))
    assert (step.inputs, step.scaled, step.in_turn) == (("x",), True, False)
    parts: list[dict[str, Any]] = [{"tiles": [SplitBands(3)]}, {"tiles": [SplitSamples(), SplitLogits()]}]
    parts += [{"split": {"a..loss": 2}}, {"tiles": [split_channels]}, {"split": {"a": 2}}]
    turns = [each.in_turn for given in parts for each in steps(**given) if isinstance(each, Differentiate)]
    assert turns == [True, True, True, False, False] and SplitBands(3) in steps(**parts[0])
    asked = Options(optimizer=SGD, ranks=2, shard="state")
    (whole,) = (each for each in steps(uses=uses_of(asked), ranks=2) if isinstance(each, DifferentiateInParts))
    assert whole.sharding.ranks.shard == "state"


def test_the_list_of_inference() -> None:
    plain = names_of(passes_of_inference(Options(target="numpy")))
    assert not plain & {"choose_trained", "select_outputs", "split_segments", "split_products", "differentiate"}
    given = {"outputs": ["y"], "split": {"a": 2}, "freeze": ["a"], "precision": "bf16", "ranks": 2, "tensor": 2}
    asked = names_of(passes_of_inference(Options(**given, target="numpy")))  # type: ignore[arg-type]
    more = {"choose_trained", "select_outputs", "split_segments", "with_precision", "write_out_loops", "split_products"}
    assert (asked - plain, plain - asked) == (more, set())
    last = [each.stage for each in passes_of_inference(Options(precision="bf16", target="numpy"))][-1]
    assert last is Stage.TRAINING, "narrow values are simplified once more"


def test_a_pass_stands_before_another_one_where_that_is_first() -> None:
    @dataclass(frozen=True)
    class OfThisTest(Pass, requires=("forward",), ensures=("forward",)):
        """Does nothing."""

        def _run(self, graph: Graph) -> Graph:
            return graph

    changed = before("fuse_maps", OfThisTest())(TRAINING)
    names = [each.name for each in changed]
    assert names.count("of_this_test") == 1 and names[names.index("of_this_test") + 1] == "fuse_maps"
    assert names.index("of_this_test") < names.index("differentiate")
    assert before("fuse_conv_maps", OfThisTest())(TRAINING) == TRAINING


def test_a_graph_without_what_a_pass_requires_is_refused() -> None:
    graph, training = fp.models.build(SMALL[1]), of_stages(TRAINING, (Stage.TRAINING,))
    with pytest.raises(ForeplanError, match="differentiate requires that a graph has loss: it has none"):
        run_passes(graph, training)
    with pytest.raises(ForeplanError, match=r"differentiate requires that a graph has training form: .* is not in it"):
        run_passes(attach_loss(graph, "cross_entropy"), training)
    with pytest.raises(ForeplanError, match="chunk_losses requires that a graph has forward"):
        run_passes(fp.differentiate(graph, "cross_entropy"), [each for each in TRAINING if each.name == "chunk_losses"])
    assert all(isinstance(each, Entry) for each in training)
