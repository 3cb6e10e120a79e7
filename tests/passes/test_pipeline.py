"""The list of passes: what passes require and ensure holds on models, and what can be left out can."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

import foreplan as fp
from foreplan.base.errors import ForeplanError, UsageError
from foreplan.compiler.pipeline import passes_of_inference, passes_of_training
from foreplan.compiler.step_graphs import step_graphs
from foreplan.frontend.losses import attach_loss
from foreplan.graph import Graph
from foreplan.options import Options
from foreplan.passes import Entry, Pass, Ran, Stage, before, run_passes, without
from foreplan.passes.pipeline import of_stages
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


def test_what_no_option_asks_for_is_not_in_the_list() -> None:
    plain = {each.name for each in passes_of_inference(Options(target="numpy"))}
    assert not plain & {"choose_trained", "select_outputs", "split_segments", "split_products", "cut_into_stages"}
    assert {"attach_loss", "choose_trained"} & {each.name for each in TRAINING} == {"attach_loss"}
    asked = Options(outputs=["y"], split={"a": 2}, freeze=["a"], target="numpy")
    assert {"choose_trained", "select_outputs", "split_segments"} <= {each.name for each in passes_of_inference(asked)}


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
