"""The list of passes: what it requires and ensures holds on models, and what can be left out can."""

from __future__ import annotations

import numpy as np
import pytest

import foreplan as fp
from foreplan.base.errors import ForeplanError, UsageError
from foreplan.frontend.losses import attach_loss
from foreplan.graph import Graph
from foreplan.lower import target_named
from foreplan.passes import PASSES, Ran, Settings, Stage, list_without, run_passes
from tests.ops.check import evaluate

SMALL = (
    "mlp:batch=3,width=8,layers=2",
    "resnet18:batch=2,size=32",
    "gpt2_small:batch=1,seq=8,layers=1,width=16,heads=2",
)
OPTIONAL = sorted({each.name for each in PASSES if each.optional})


def asked(graph: Graph, target: str = "numpy") -> Settings:
    def attach(graph: Graph) -> Graph:
        return attach_loss(graph, fp.losses.cross_entropy)

    return Settings((), attach, trains=True, machine=target_named(target))


@pytest.mark.parametrize("target", ["numpy", "cpu:threads=1", "cuda:h100"])
@pytest.mark.parametrize("name", SMALL)
def test_what_passes_require_and_ensure_holds(name: str, target: str) -> None:
    ran: list[Ran] = []
    graph = fp.models.build(name)
    made = run_passes(graph, asked(graph, target), tuple(Stage), check=True, watch=ran.append)
    assert ran[-1].graph is made and any(each.changed for each in ran)
    assert [each.step.stage for each in ran] == sorted((each.step.stage for each in ran), key=list(Stage).index)
    for before, each in zip((graph, *(each.graph for each in ran)), ran):
        assert each.changed or each.graph is before, f"{each.step.name} has nothing to do, and gives another graph"


@pytest.mark.parametrize("name", OPTIONAL)
def test_an_optional_pass_can_be_left_out(name: str) -> None:
    graph = fp.models.build("mlp:batch=3,width=8,layers=2,inputs=6,classes=4")
    ran: list[Ran] = []
    stages = (Stage.FORWARD, Stage.MEMORY, Stage.TRAINING)
    whole = run_passes(graph, asked(graph), stages)
    less = run_passes(graph, asked(graph), stages, passes=list_without([name]), watch=ran.append)
    assert name not in {each.step.name for each in ran}
    rng = np.random.default_rng(0)
    data = {"x": rng.normal(size=(3, 6)).astype(np.float32), "target": rng.integers(0, 4, 3)}
    stored = {v.name: rng.normal(size=v.shape).astype(np.float32) for v in graph.parameters}
    found, wanted = evaluate(less, data, stored, hard=False), evaluate(whole, data, stored, hard=False)
    for parameter, gradient in whole.gradients.items():
        np.testing.assert_allclose(found[less.gradients[parameter]], wanted[gradient], rtol=1e-5, atol=1e-6)


def test_what_is_left_out_by_mistake_is_named() -> None:
    with pytest.raises(UsageError, match=r"no pass 'fuse'; the passes are choose_trained, quantised_weights, master"):
        list_without(["fuse"])
    with pytest.raises(UsageError, match="nothing works without the pass 'differentiate'"):
        list_without(["differentiate"])


def test_a_graph_without_what_a_pass_requires_is_refused() -> None:
    graph = fp.models.build(SMALL[1])
    with pytest.raises(ForeplanError, match="differentiate requires that a graph has loss: it has none"):
        run_passes(graph, asked(graph), (Stage.TRAINING,), check=True)
    with pytest.raises(ForeplanError, match=r"differentiate requires that a graph has training form: .* is not in it"):
        run_passes(attach_loss(graph, "cross_entropy"), asked(graph), (Stage.TRAINING,), check=True)
