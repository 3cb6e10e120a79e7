"""The loss over a large vocabulary: when it is made in chunks, and that nothing else changes."""

from __future__ import annotations

import numpy as np
import pytest

import foreplan as fp
from foreplan import passes
from foreplan.frontend.losses import attach_loss
from foreplan.graph import Graph, as_dtype, parse_graph
from foreplan.ops.linear_cross_entropy import LinearCrossEntropy
from foreplan.passes import chunk_loss, chunk_losses, simplified
from tests.ops.check import evaluate
from tests.oracle.peers import jax, jnp
from tests.passes.steps import training_step

RNG = np.random.default_rng(0)

HEAD = """graph %g
input %h: float64[2,3,4]
input %target: int64[2,3]
parameter %w: float64[7,4] = fill(1.0)
parameter %c: float64[7] = fill(0.0)
%logits: float64[2,3,7] = matmul(transpose_b=True) [%h, %w] as %logits
"""
ENTROPY = "%e.0: float64[2,3], %e.1: float64[2,3] = cross_entropy(axis=2) [%{}, %target] as %e\n"
COUNTED = """%marks: float64[2,3] = map(exprs=('float64(ne(a0, -100))',)) [%target] as %marks
%count: float64[] = reduce(how='sum', axes=(0, 1)) [%marks] as %count
%sum: float64[] = reduce(how='sum', axes=(0, 1)) [%e.0] as %sum
%loss: float64[] = map(exprs=('(a0 / max(a1, 1.0))',)) [%sum, %count] as %loss
loss %loss
"""


LIMIT = chunk_loss.SAVED_BYTES


@pytest.fixture(autouse=True)
def however_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the pass act on graphs of any size."""
    monkeypatch.setattr(chunk_loss, "SAVED_BYTES", -(1 << 40))


def fused(graph: Graph) -> list[LinearCrossEntropy]:
    return [node.op for node in graph.nodes if isinstance(node.op, LinearCrossEntropy)]


def by_jax(
    h: np.ndarray, w: np.ndarray, c: np.ndarray, target: np.ndarray, how: str
) -> tuple[float, dict[str, np.ndarray]]:
    """Loss and gradients of `w` and `c`."""

    def loss(w: jax.Array, c: jax.Array) -> jax.Array:
        logs = jax.nn.log_softmax(h @ w.T + c, -1)
        picked = jnp.take_along_axis(logs, jnp.where(target < 0, 0, target)[..., None], -1)[..., 0]
        total = -jnp.where(target < 0, 0.0, picked).sum()
        return total / {"counted": max(1, (target >= 0).sum()), "mean": target.size, "sum": 1}[how]

    with jax.enable_x64(True):
        value, (dw, dc) = jax.jit(jax.value_and_grad(loss, (0, 1)))(w, c)
    return float(value), {"w": np.asarray(dw), "c": np.asarray(dc)}


def check(graph: Graph, how: str, biased: bool = False, rows: tuple[slice, ...] = ()) -> Graph:
    """Loss and gradients of the rewritten graph equal JAX's."""
    inputs = {"h": RNG.normal(size=(2, 3, 4)), "target": np.array([[1, -100, 6], [0, 3, -100]])}
    stored = {"w": RNG.normal(size=(7, 4)), "c": RNG.normal(size=7)}
    training = training_step(graph)
    found = evaluate(training, inputs, {name: x for name, x in stored.items() if name in graph_names(training)})
    h, target = inputs["h"][rows], inputs["target"][rows]
    value, gradients = by_jax(h, stored["w"], stored["c"] * biased, target, how)
    assert training.loss is not None
    np.testing.assert_allclose(found[training.loss], value, rtol=1e-12)
    for name, gradient in training.gradients.items():
        np.testing.assert_allclose(found[gradient], gradients[name], rtol=1e-10, atol=1e-12)
    return training


def graph_names(graph: Graph) -> set[str]:
    return {value.name for value in graph.stored if value.name in ("w", "c")}


def test_the_frontends_loss_becomes_one_op() -> None:
    graph = parse_graph(HEAD + ENTROPY.format("logits") + COUNTED)
    after = simplified(chunk_losses(graph))
    assert [line for line in after.as_text().splitlines() if " as %" in line] == [
        "%reshape: float64[6,4] = reshape(shape=(6, 4)) [%h] as %reshape",
        "%reshape.1: int64[6] = reshape(shape=(6,)) [%target] as %reshape.1",
        "~%e/linear.0: float64[], %e/linear.1: float64[6,4], %e/linear.2: float64[7,4] = linear_cross_entropy() "
        "[%reshape, %w, %reshape.1] as %e/linear",
    ]
    assert "never whole" in after.notes[-1]
    training = check(graph, "counted")
    assert fused(training) and training.gradients["w"].name == "e/linear.2"


@pytest.mark.parametrize("how", ["sum", "mean"])
def test_sum_and_mean(how: str) -> None:
    end = f"%loss: float64[] = reduce(how='{how}', axes=(0, 1)) [%e.0] as %loss\nloss %loss\n"
    (op,) = fused(check(parse_graph(HEAD + ENTROPY.format("logits") + end), how))
    assert not op.mean


@pytest.mark.parametrize("bias", ["map(exprs=('(a0 + a1)',)) [%logits, %c]", "map(exprs=('(a0 + a1)',)) [%c, %logits]"])
def test_a_bias_goes_along(bias: str) -> None:
    graph = parse_graph(HEAD + f"%biased: float64[2,3,7] = {bias} as %biased\n" + ENTROPY.format("biased") + COUNTED)
    training = check(graph, "counted", biased=True)
    assert fused(training) and set(training.gradients) == {"w", "c"}


def test_views_of_the_logits_become_views_of_the_hidden_states() -> None:
    middle = """%next: float64[2,2,7] = slice(starts=(0, 0, 0), shape=(2, 2, 7), steps=(1, 1, 1)) [%logits] as %next
%rows: float64[4,7] = reshape(shape=(4, 7)) [%next] as %rows
%cut: int64[2,2] = slice(starts=(0, 0), shape=(2, 2), steps=(1, 1)) [%target] as %cut
%flat: int64[4] = reshape(shape=(4,)) [%cut] as %flat
%e.0: float64[4], %e.1: float64[4] = cross_entropy(axis=1) [%rows, %flat] as %e
%square: float64[2,2] = reshape(shape=(2, 2)) [%e.0] as %square
%loss: float64[] = reduce(how='mean', axes=(0, 1)) [%square] as %loss
loss %loss
"""
    assert fused(check(parse_graph(HEAD + middle), "mean", rows=(slice(None), slice(0, 2))))


def test_a_matrix_that_is_not_transposed() -> None:
    text = HEAD.replace("%w: float64[7,4]", "%w: float64[4,7]").replace("matmul(transpose_b=True)", "matmul()")
    graph = parse_graph(text + ENTROPY.format("logits") + COUNTED)
    training = training_step(graph)
    assert fused(training)
    inputs = {"h": RNG.normal(size=(2, 3, 4)), "target": RNG.integers(0, 7, (2, 3))}
    w = RNG.normal(size=(4, 7))
    found = evaluate(training, inputs, {"w": w})
    _, gradients = by_jax(inputs["h"], w.T, np.zeros(7), inputs["target"], "counted")
    np.testing.assert_allclose(found[training.gradients["w"]], gradients["w"].T, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "text",
    [
        HEAD + ENTROPY.format("logits") + COUNTED + "output %y = %logits\n",
        HEAD + ENTROPY.format("logits") + COUNTED + "output %y = %e.0\n",
        HEAD + ENTROPY.format("logits") + COUNTED + "output %y = %e.1\n",
        HEAD + ENTROPY.format("logits").replace("axis=2", "axis=1").replace("float64[2,3]", "float64[2,7]") + COUNTED,
        HEAD
        + "%warm: float64[2,3,7] = map(exprs=('(a0 * 2.0)',)) [%logits] as %warm\n"
        + ENTROPY.format("warm")
        + COUNTED,
    ],
    ids=["logits returned", "losses returned", "lse returned", "another axis", "scaled logits"],
)
def test_what_somebody_else_reads_stays(text: str) -> None:
    if "axis=1" in text:
        text = text.replace("%target: int64[2,3]", "%target: int64[2,7]").replace("float64[2,3] =", "float64[2,7] =")
    graph = parse_graph(text)
    assert chunk_losses(graph) is graph


def test_the_other_count_leaves_the_division_in_the_graph() -> None:
    graph = parse_graph(HEAD + ENTROPY.format("logits") + COUNTED.replace("-100", "3"))
    (op,) = fused(chunk_losses(graph))
    assert not op.mean and "a0 / max(a1, 1.0)" in chunk_losses(graph).as_text()


@pytest.mark.parametrize(
    "name,expected", [("gpt2_small:batch=1,seq=128,layers=1", 0), ("gpt2_small:seq=512,layers=1", 1)]
)
def test_only_where_it_saves_a_mebibyte(name: str, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_loss, "SAVED_BYTES", LIMIT)
    graph = fp.models.build(name)
    step = fp.compile(graph, loss=fp.losses.cross_entropy, optimizer=fp.optim.SGD(0.1), remat="off")
    assert sum(isinstance(call.op, LinearCrossEntropy) for call in step.program.calls) == expected
    assert any("never whole" in note for note in step.program.notes) == bool(expected)
    step = fp.compile(graph, loss=fp.losses.cross_entropy, optimizer=fp.optim.SGD(0.1), remat="off", outputs=["logits"])
    assert not any(isinstance(call.op, LinearCrossEntropy) for call in step.program.calls)


@pytest.mark.parametrize("name", ["gpt2_small", "bert_base"])
def test_zoo_models_keep_loss_and_gradients(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = fp.models.build(f"{name}:batch=2,seq=6,layers=1,width=8,heads=2,vocabulary=40")
    graph = parse_graph(graph.as_text().replace("float32", "float64"))
    forward = simplified(passes.training_form(passes.select_outputs(attach_loss(graph, "cross_entropy"), [])))
    inputs = {v.name: RNG.integers(0, 2 if v.name == "segments" else 40, v.shape) for v in forward.inputs}
    stored = {v.name: RNG.normal(size=v.shape) for v in forward.parameters}
    with_op = training_step(forward)
    monkeypatch.setattr(chunk_loss, "SAVED_BYTES", 1 << 40)
    without = training_step(forward)
    assert fused(with_op) and not fused(without)
    got, expected = evaluate(with_op, inputs, stored), evaluate(without, inputs, stored)
    assert with_op.loss is not None and without.loss is not None
    np.testing.assert_allclose(got[with_op.loss], expected[without.loss], rtol=1e-12)
    assert set(with_op.gradients) == set(without.gradients)
    for parameter, gradient in with_op.gradients.items():
        wanted = expected[without.gradients[parameter]]
        np.testing.assert_allclose(got[gradient], wanted, rtol=1e-8, atol=1e-9, err_msg=parameter)


@pytest.mark.parametrize(("dtype", "chunked"), [("float32", 1), ("bfloat16", 1), ("float16", 0)])
def test_no_loss_is_made_in_chunks_where_gradients_need_a_scale(dtype: str, chunked: int) -> None:
    """In chunks the gradient is made, and rounded, with the loss: before it has the scale."""
    graph = parse_graph((HEAD + ENTROPY.format("logits") + COUNTED).replace("float64", "float32"))
    assert len(fused(training_step(graph, dtype=as_dtype(dtype)))) == chunked


SCALAR = """parameter %one: float64[] = fill(1.0)
%more: float64[2,3,7] = map(exprs=('(a0 + a1)',)) [%logits, %one] as %more
"""
SUM = """parameter %d: float64[2,3,7] = fill(1.0)
%more: float64[2,3,7] = matmul(transpose_b=True) [%h, %w, %d] as %more
"""
NUMBER = """graph %g
input %target: int64[1]
parameter %w: float64[] = fill(1.0)
%logits: float64[1,1] = reshape(shape=(1, 1)) [%w] as %logits
%e.0: float64[1], %e.1: float64[1] = cross_entropy(axis=1) [%logits, %target] as %e
%loss: float64[] = reduce(how='sum', axes=(0,)) [%e.0] as %loss
loss %loss
"""


@pytest.mark.parametrize("more", [SCALAR, SUM, NUMBER], ids=["a scalar added", "a sum of products", "one number"])
def test_logits_of_other_kinds_stay(more: str) -> None:
    text = more if more is NUMBER else HEAD + more + ENTROPY.format("more") + COUNTED
    assert not fused(chunk_losses(parse_graph(text)))


@pytest.mark.parametrize("kinds", [("frozen", "frozen"), ("frozen", "parameter"), ("parameter", "frozen")])
def test_a_frozen_matrix_gets_no_gradient(kinds: tuple[str, str]) -> None:
    """What is trained lies before it; the gradient passes through."""
    head = HEAD.replace("input %h: float64[2,3,4]", "input %x: float64[2,3,4]\nparameter %s: float64[4] = fill(1.0)")
    head = head.replace("parameter %w", f"{kinds[0]} %w").replace("parameter %c", f"{kinds[1]} %c")
    scaled = "%h: float64[2,3,4] = map(exprs=('(a0 * a1)',)) [%x, %s] as %h\n"
    biased = "%b: float64[2,3,7] = map(exprs=('(a0 + a1)',)) [%logits, %c] as %b\n"
    text = head.replace("%logits:", scaled + "%logits:") + biased + ENTROPY.format("b") + COUNTED
    training = training_step(parse_graph(text))
    (op,) = fused(training)
    assert op.frozen == (kinds == ("frozen", "frozen"))
    (node,) = [node for node in training.nodes if isinstance(node.op, LinearCrossEntropy)]
    assert len(node.outputs) == (2 if op.frozen else 4)
    stored = {"w": RNG.normal(size=(7, 4)), "c": RNG.normal(size=7), "s": RNG.normal(size=4)}
    x, target = RNG.normal(size=(2, 3, 4)), np.array([[1, -100, 6], [0, 3, -100]])
    found = evaluate(training, {"x": x, "target": target}, stored)

    def loss(weights: dict[str, jax.Array]) -> jax.Array:
        logs = jax.nn.log_softmax((x * weights["s"]) @ weights["w"].T + weights["c"], -1)
        return (
            -jnp.where(target < 0, 0.0, jnp.take_along_axis(logs, np.maximum(target, 0)[..., None], -1)[..., 0]).sum()
            / 4
        )

    with jax.enable_x64(True):
        value, gradients = jax.jit(jax.value_and_grad(loss))(
            {name: jnp.asarray(array) for name, array in stored.items()}
        )
    assert training.loss is not None
    np.testing.assert_allclose(found[training.loss], float(value), rtol=1e-12)
    assert set(training.gradients) == {"s"} | {name for name, kind in zip("wc", kinds) if kind == "parameter"}
    for name, gradient in training.gradients.items():
        np.testing.assert_allclose(found[gradient], gradients[name], rtol=1e-10, atol=1e-12)
