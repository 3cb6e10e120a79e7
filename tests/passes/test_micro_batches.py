"""A training step as a body for each micro-batch and an update after them."""

from __future__ import annotations

import numpy as np
import pytest

import foreplan as fp
from foreplan import passes
from foreplan.base.errors import ModelError
from foreplan.frontend.losses import attach_loss
from foreplan.graph import Graph, Kind, parse_graph
from foreplan.lower import lower
from foreplan.lower.program import Program
from tests.ops.check import evaluate
from tests.passes.steps import halves


def forward(name: str) -> Graph:
    return passes.training_form(passes.SelectOutputs([])(attach_loss(fp.models.build(name), fp.losses.cross_entropy)))


@pytest.fixture(scope="module")
def both() -> tuple[Graph, Graph]:
    return halves(forward("mlp:batch=3,width=8,layers=2,inputs=6,classes=4"), fp.optim.Adam(0.1))


def written_home(program: Program, name: str) -> list[tuple[str, bool]]:
    """(op, whether it must overwrite what it adds to) of what gives a stored value its next content."""
    home = next(slot.operand.value for slot in program.stored if slot.name == name)
    found = []
    for action, call in zip(program.actions, program.calls):
        for i, value in enumerate(action.writes):
            if program.values[value].home == home:
                in_place = any(pair.write == i and pair.required for pair in action.overwrites)
                found.append((call.op.name, in_place))
    return found


def test_the_halves_list_the_same_stored_values(both: tuple[Graph, Graph]) -> None:
    body, update = both
    assert body.stored == update.stored
    changed = {value.kind for value in body.updates}
    assert changed == {Kind.ACCUMULATOR}
    assert {value.kind for value in update.updates} == {Kind.ACCUMULATOR, Kind.PARAMETER, Kind.STATE}
    assert set(body.updates) <= set(update.updates)
    assert [value.name for value in body.inputs] == ["x", "target"]
    assert [value.name for value in update.inputs] == ["learning_rate"]


def test_both_halves_are_text_that_reads_back(both: tuple[Graph, Graph]) -> None:
    for graph in both:
        assert parse_graph(graph.as_text()).as_text() == graph.as_text()


def test_products_are_added_to_the_kept_gradients_in_place(both: tuple[Graph, Graph]) -> None:
    program = lower(both[0])
    for name in ("hidden0", "hidden1", "out"):
        assert written_home(program, f"{name}.weight/gradient") == [("matmul", True)]
        assert written_home(program, f"{name}.bias/gradient") == [("map", True)]


def test_rows_of_an_embedding_are_added_in_place() -> None:
    def model(tokens: fp.frontend.Tensor) -> fp.frontend.Tensor:
        return fp.nn.linear(fp.nn.embedding(tokens, 50, 8, name="table"), 3, name="head")

    graph = attach_loss(fp.trace(model, fp.spec((6,), "int64")), fp.losses.cross_entropy)
    body, _ = halves(passes.training_form(graph), fp.optim.SGD(0.1))
    assert written_home(lower(body), "table.weight/gradient") == [("scatter_add", True)]


def test_gradients_of_convolutions_are_added_in_place_where_their_kernel_can() -> None:
    def model(x: fp.frontend.Tensor) -> fp.frontend.Tensor:
        x = fp.nn.conv(x, 4, 3, padding=1, name="full")
        x = fp.nn.conv(x, 4, 3, padding=1, groups=4, name="depthwise")
        x = fp.nn.conv(x, 8, 1, name="pointwise")
        return fp.nn.linear(fp.nn.flatten(x), 3, name="head")

    graph = attach_loss(fp.trace(model, fp.spec((2, 2, 5, 5))), fp.losses.cross_entropy)
    body, _ = halves(passes.training_form(graph), fp.optim.SGD(0.1))
    written = {
        name: written_home(lower(body), f"{name}.weight/gradient") for name in ("full", "depthwise", "pointwise")
    }
    assert written["full"] == written["pointwise"] == [("conv_weight_grad", True)]
    assert written["depthwise"] == [("map", True)]


def test_two_runs_add_up_and_the_update_clears(both: tuple[Graph, Graph]) -> None:
    body, update = both
    whole = passes.differentiate(forward("mlp:batch=3,width=8,layers=2,inputs=6,classes=4"))
    rng = np.random.default_rng(0)
    stored = {v.name: rng.normal(size=v.shape).astype(np.float32) for v in body.parameters}
    kept, sums, losses = dict(stored), {name: np.zeros_like(p) for name, p in stored.items()}, []
    for _ in range(2):
        data = {"x": rng.normal(size=(3, 6)).astype(np.float32), "target": rng.integers(0, 4, 3)}
        values = evaluate(body, data, kept, hard=False)
        kept |= {old.name: values[new] for old, new in body.updates.items()}
        expected = evaluate(whole, data, stored, hard=False)
        for name, gradient in whole.gradients.items():
            sums[name] += expected[gradient]
        assert whole.loss is not None
        losses.append(expected[whole.loss])
    for name, total in sums.items():
        np.testing.assert_allclose(kept[f"{name}/gradient"], total, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(values[body.loss], np.mean(losses), rtol=1e-6)
    assert kept["micro_batches"] == 2
    values = evaluate(update, {}, kept, hard=False)
    for old, new in update.updates.items():
        if old.kind is Kind.ACCUMULATOR:
            assert not values[new].any(), old.name


def test_what_has_no_gradient_gets_no_sum() -> None:
    def model(x: fp.frontend.Tensor) -> dict[str, fp.frontend.Tensor]:
        return {"y": fp.nn.linear(x, 3, name="used"), "z": fp.nn.linear(x, 3, name="idle")}

    graph = attach_loss(fp.trace(model, fp.spec((4, 5))), fp.losses.cross_entropy, ["y"])
    body, update = halves(passes.training_form(graph), fp.optim.SGD(0.1))
    assert {v.name for v in body.updates} == {"used.weight/gradient", "used.bias/gradient", "loss_sum", "micro_batches"}
    assert "idle.weight" not in {value.name for value in update.updates}
    assert any("does not depend on idle.weight, idle.bias" in note for note in body.notes)


def test_a_loss_that_depends_on_no_parameter_is_refused() -> None:
    graph = attach_loss(fp.trace(lambda x: x * 2.0, fp.spec((4, 5))), fp.losses.cross_entropy)
    with pytest.raises(ModelError, match="depends on no parameter"):
        halves(graph, fp.optim.SGD(0.1))


def test_what_is_needed_is_what_both_halves_need() -> None:
    """The update may take more than the body, as it does of a batch of one: a budget of what was named is enough."""
    graph = fp.models.build("mlp:batch=1,width=64,layers=2,inputs=64,classes=4")
    options = {"loss": fp.losses.cross_entropy, "optimizer": fp.optim.Adam(0.1), "accumulate": 2}
    with pytest.raises(fp.DoesNotFitError) as refused:
        fp.compile(graph, budget=1, **options)
    assert fp.compile(graph, budget=refused.value.needed, **options).arena_bytes <= refused.value.needed
