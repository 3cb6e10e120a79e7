"""`scan` against `jax.lax.scan`: results, gradients, structures, and what it puts into a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import foreplan as fp
from foreplan import nn
from foreplan.base.errors import InputError, ModelError, ShapeError, TraceError, UnsupportedError, UsageError
from foreplan.graph.value import Kind
from foreplan.ops.loop import Loop
from tests.frontend.judged import close, run
from tests.oracle.peers import jnp, lax, pulled
from tests.profile import pick


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def same(body: Callable[..., Any], *arrays: np.ndarray, target: str = "numpy") -> None:
    """`body(scan, np or jnp, *arrays)` with foreplan's scan and with JAX's."""
    found = run(lambda *xs: body(fp.scan, np, *xs), *arrays, target=target)
    expected, cotangents = pulled(lambda *xs: body(lax.scan, jnp, *xs), found.cotangent, *arrays)
    close(found.output, expected)
    for i, (got, want) in enumerate(zip(found.inputs, cotangents)):
        if got is not None:
            close(got, want, f"gradient of input {i}")


@pytest.mark.parametrize("seed", range(pick(1, 2, 12)))
def test_an_lstm_cell(seed: int) -> None:
    rng = np.random.default_rng(seed)
    steps, items, size = (int(n) for n in rng.integers(1, 5, 3))
    reverse = bool(seed % 2)

    def body(scan: Any, xp: Any, xs: Any, h: Any, c: Any, w: Any, r: Any) -> Any:
        def cell(carry: Any, x: Any) -> Any:
            h, c = carry["h"], carry["c"]
            i, f, g, o = xp.split(x @ w + h @ r, 4, -1)
            c = c / (1 + xp.exp(-f)) + xp.tanh(g) / (1 + xp.exp(-i))
            h = xp.tanh(c) / (1 + xp.exp(-o))
            return {"h": h, "c": c}, (h, [c * 2, h.sum()])

        last, (ys, [zs, sums]) = scan(cell, {"h": h, "c": c}, xs, reverse=reverse)
        return (ys * zs).sum((1, 2)) + sums + (last["h"] * last["c"]).sum()

    xs, h, c = normal(rng, steps, items, 3), normal(rng, items, size), normal(rng, items, size)
    arrays = xs, h, c, normal(rng, 3, 4 * size), normal(rng, size, 4 * size)
    same(body, *arrays, target="cpu:threads=1" if seed == 1 else "numpy")


def test_without_slices_and_with_several() -> None:
    rng = np.random.default_rng(0)

    def powers(scan: Any, xp: Any, x: Any) -> Any:
        last, ys = scan(lambda c, _: (c * x, c + 1.0), x, None, length=5)
        return xp.concatenate([last[None], ys])

    def several(scan: Any, xp: Any, a: Any, b: Any) -> Any:
        last, _ = scan(lambda c, ab: (c + ab[0] * ab[1].sum(), None), a[0], (a, b))
        return last

    def only_outputs(scan: Any, xp: Any, a: Any) -> Any:
        none, ys = scan(lambda c, x: (None, x * x), None, a)
        assert none is None
        return ys

    same(powers, normal(rng, 3))
    same(several, normal(rng, 4, 3), normal(rng, 4, 2, 2))
    same(only_outputs, normal(rng, 4, 3))


def test_a_first_carry_that_the_function_reads_too() -> None:
    """What the function finds around it is not the carry, even where both are one tensor."""

    def body(scan: Any, xp: Any, h: Any, xs: Any) -> Any:
        last, ys = scan(lambda c, x: (c * 0.5 + h * x, c - h), h, xs)
        return xp.concatenate([ys, last[None]])

    rng = np.random.default_rng(0)
    same(body, normal(rng, 3), normal(rng, 4, 3))


def test_scans_within_scans() -> None:
    def body(scan: Any, xp: Any, xs: Any) -> Any:
        def outer(c: Any, row: Any) -> Any:
            inner, ys = scan(lambda d, x: (d * 0.5 + x, d * x), c, row)
            return inner, ys.sum()

        last, sums = scan(outer, xs[0, 0], xs, reverse=True)
        return xp.concatenate([last[None], sums])

    same(body, normal(np.random.default_rng(0), 3, 4))


def test_parameters_are_made_once_and_what_never_changes_is_computed_once() -> None:
    calls = []

    def cell(h: Any, x: Any) -> Any:
        calls.append(1)
        scale = np.exp(nn.parameter("log_scale", 4))
        return np.tanh(nn.linear(h, 4, name="state") * scale + x), None

    graph = fp.trace(lambda xs: fp.scan(cell, np.zeros((2, 4)), xs)[0], fp.spec((6, 2, 4)))
    assert len(calls) == 1
    assert [v.name for v in graph.stored if v.kind is Kind.PARAMETER] == ["log_scale", "state.weight", "state.bias"]
    (loop,) = (node.op for node in graph.nodes if isinstance(node.op, Loop))
    assert [node.op.name for node in loop.graph.nodes].count("matmul") == 1
    assert "exp" in [node.name for node in graph.nodes] and "exp" not in [node.name for node in loop.graph.nodes]
    assert all(node.source.startswith("test_scan.py:") for node in graph.nodes)


def test_dropout_draws_anew_in_each_step() -> None:
    graph = fp.trace(lambda c: fp.scan(lambda c, _: (c, nn.dropout(c)), c, length=3)[1], fp.spec((64,)))
    step = fp.compile(graph, lambda output: output.sum(), optimizer=None, outputs=["output"], gradients=["c"])
    rows = step.bind().step({"c": np.ones(64, np.float32)}).outputs["output"]
    assert len({row.tobytes() for row in rows}) == 3


def test_no_step_at_all() -> None:
    x = np.ones((0, 3), np.float32)
    graph = fp.trace(lambda xs: fp.scan(lambda c, x: (c + x, x), np.ones(3), xs), fp.spec(x.shape))
    result = fp.compile(graph).bind().step({"xs": x})
    close(result.outputs["output_0"], np.ones(3))
    assert result.outputs["output_1"].shape == (0, 3)


def test_graphs_do_not_grow_with_steps() -> None:
    def nodes(steps: int) -> int:
        graph = fp.trace(lambda xs: fp.scan(lambda c, x: (np.tanh(c + x), c), xs[0], xs)[1], fp.spec((steps, 3)))
        return len(fp.compile(graph, fp.losses.mean, None, gradients=["xs"]).graph.nodes)

    few, some, many = map(nodes, (4, 8, 16))
    assert few == some == many


def many(function: Callable[[Any], Any], x: Any, times: int) -> Any:
    for _ in range(times):
        x = function(x)
    return x


X = (5, 3)
REFUSED: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "no pair": (lambda x: fp.scan(lambda c, x: c, x[0], x)[0], TraceError, "returns a pair"),
    "structure": (lambda x: fp.scan(lambda c, x: ((c, c), None), x[0], x)[0], TraceError, "changes its structure"),
    "shape": (lambda x: fp.scan(lambda c, x: (c.sum(), None), x[0], x)[0], TraceError, r"float32\[3\] to float32\[\]"),
    "type": (lambda x: fp.scan(lambda c, x: (c > 0, None), x[0], x)[0], TraceError, "astype"),
    "lengths": (lambda x: fp.scan(lambda c, x: (c, x), 0.0, (x, x[:2]))[1], TraceError, "first axes"),
    "a scalar": (lambda x: fp.scan(lambda c, x: (c, x), 0.0, x.sum())[1], TraceError, "first axes"),
    "other length": (lambda x: fp.scan(lambda c, x: (c, x), 0.0, x, length=4)[1], TraceError, "length=4"),
    "no length": (lambda x: fp.scan(lambda c, x: (c, x), x)[0], TraceError, "how often"),
    "bad length": (lambda x: fp.scan(lambda c, x: (c, None), x, length=1.5)[0], UsageError, "whole number"),
    "too long": (lambda x: fp.scan(lambda c, x: (c, None), x, length=10**6)[0], UsageError, "65536"),
    "too much": (
        lambda x: fp.scan(lambda c, _: (many(np.tanh, c, 40), None), x, length=60_000)[0],
        UnsupportedError,
        "60,000 steps of 40 nodes",
    ),
    "reverse": (lambda x: fp.scan(lambda c, x: (c, x), 0.0, x, reverse=1)[1], UsageError, "True or False"),
    "no function": (lambda x: fp.scan(x, x), UsageError, "takes a function"),
    "an error inside": (lambda x: fp.scan(lambda c, x: (c @ x[:2], None), x[0], x)[0], ShapeError, "test_scan.py"),
    "statistics": (
        lambda x: fp.scan(lambda c, _: (nn.batch_norm(c), None), x, length=2)[0], TraceError, "update its statistics"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_says_why(name: str) -> None:
    call, error, told = REFUSED[name]
    with pytest.raises(error, match=told):
        fp.trace(call, fp.spec(X))


def test_a_tensor_of_the_function_stays_inside() -> None:
    kept: list[Any] = []

    def cell(c: Any, x: Any) -> Any:
        kept.append(c + x)
        return c, x

    with pytest.raises(ModelError, match=r"before it is computed|which nothing computes"):
        fp.trace(lambda x: fp.scan(cell, x[0], x)[1] + kept[0], fp.spec(X))


def test_outside_a_trace() -> None:
    with pytest.raises(TraceError, match="nothing is being traced"):
        fp.scan(lambda c, x: (c, x), 0.0, np.ones(3))


@pytest.mark.parametrize("target", ["numpy", "cpu:threads=1"])
@pytest.mark.parametrize("written_out", [False, True])
def test_numbers_that_select_within_a_loop_are_checked(
    target: str, written_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def model(tokens: Any) -> Any:
        def cell(c: Any, token: Any) -> Any:
            return c + nn.embedding(token[:2].reshape((2,)), 7, 3, name="table"), None

        return fp.scan(cell, np.zeros((2, 3)), tokens)[0]

    if written_out:
        monkeypatch.setattr("foreplan.compiler.pipeline.has_loops", lambda options: False)
    session = fp.compile(fp.trace(model, fp.spec((5, 4), "int64")), target=target).bind()
    session.step({"tokens": np.full((5, 4), 6)})
    for wrong in (7, -8, 1 << 40):
        with pytest.raises(InputError, match="tokens"):
            session.step({"tokens": np.full((5, 4), wrong)})
