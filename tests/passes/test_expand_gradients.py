"""Gradients that a loss holds, differentiated once more. JAX is the judge."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import foreplan as fp
from foreplan import nn
from foreplan.base.errors import ForeplanError, ShapeError, UnsupportedError

TARGETS = ["numpy", "cpu:threads=1"]
HALF = 3  # images of each kind
Params = dict[str, Any]


def _normal(x: Any, axes: tuple[int, ...]) -> Any:
    return (x - x.mean(axes, keepdims=True)) / jnp.sqrt(x.var(axes, keepdims=True) + 1e-5)


def _scaled(y: Any, p: Params, kind: str) -> Any:
    around = (-1, 1, 1) if kind != "layer_norm" else y.shape[1:]
    return y * p["norm.weight"].reshape(around) + p["norm.bias"].reshape(around)


NORMS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "layer_norm": (lambda h: nn.layer_norm(h, axis=1, name="norm"), lambda h: _normal(h, (1, 2, 3))),
    "batch_norm": (lambda h: nn.batch_norm(h, name="norm"), lambda h: _normal(h, (0, 2, 3))),
}
POOLS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "max": (lambda h: nn.max_pool(h, 2), lambda h: h.reshape(*h.shape[:2], 4, 2, 4, 2).max((3, 5))),
    "mean": (lambda h: nn.avg_pool(h, 2), lambda h: h.reshape(*h.shape[:2], 4, 2, 4, 2).mean((3, 5))),
}


def _critic(norm: str, pool: str) -> Callable[[Any], Any]:
    def critic(x: Any) -> Any:
        h = NORMS[norm][0](nn.conv(x, 6, 3, padding=1, name="c1"))
        h = POOLS[pool][0](nn.leaky_relu(h, 0.2))
        h = np.tanh(nn.conv(h, 4, 3, padding=1, stride=2, name="c2"))
        return nn.linear(nn.flatten(h), 1, name="out")

    return critic


def _loss(norm: str, pool: str) -> Callable[..., Any]:
    """WGAN-GP's loss of a critic (Gulrajani et al. 2017): real, fake and mixed images go through it as one batch."""

    def loss(real: Any, fake: Any, share: Any) -> Any:
        mixed = share * real + (1.0 - share) * fake
        y = _critic(norm, pool)(nn.concat([real, fake, mixed], axis=0))
        g = fp.gradient(np.sum(y[2 * HALF :]), mixed)
        size = np.sqrt(np.sum(g * g, axis=(1, 2, 3)) + 1e-8)
        return np.mean(y[HALF : 2 * HALF]) - np.mean(y[:HALF]) + 10.0 * np.mean((size - 1.0) ** 2)

    return loss


def _in_jax(p: Params, norm: str, pool: str, real: Any, fake: Any, share: Any) -> Any:
    def critic(x: Any) -> Any:
        def conv(x: Any, name: str, stride: int) -> Any:
            y = jax.lax.conv_general_dilated(x, p[f"{name}.weight"], (stride, stride), ((1, 1), (1, 1)))
            return y + p[f"{name}.bias"][:, None, None]

        h = _scaled(NORMS[norm][1](conv(x, "c1", 1)), p, norm)
        h = jnp.tanh(conv(POOLS[pool][1](jnp.where(h > 0, h, 0.2 * h)), "c2", 2))
        return h.reshape(len(h), -1) @ p["out.weight"].T + p["out.bias"]

    mixed = share * real + (1.0 - share) * fake
    y = critic(jnp.concatenate([real, fake, mixed]))
    g = jax.grad(lambda m: critic(jnp.concatenate([real, fake, m]))[2 * HALF :].sum())(mixed)
    size = jnp.sqrt((g * g).sum((1, 2, 3)) + 1e-8)
    return y[HALF : 2 * HALF].mean() - y[:HALF].mean() + 10.0 * ((size - 1.0) ** 2).mean()


@pytest.mark.parametrize("norm, pool", [("layer_norm", "max"), ("batch_norm", "mean")])
def test_the_penalty_of_wgan_gp(norm: str, pool: str) -> None:
    rng = np.random.default_rng(len(norm))
    specs = [fp.spec((HALF, 2, 8, 8)), fp.spec((HALF, 2, 8, 8)), fp.spec((HALF, 1, 1, 1))]
    graph = fp.trace(_loss(norm, pool), *specs)
    feeds = {value.name: rng.uniform(-1, 1, value.shape).astype(np.float32) for value in graph.inputs}
    judge = jax.jit(jax.value_and_grad(lambda p: _in_jax(p, norm, pool, *feeds.values())))
    for target in TARGETS if pool == "mean" else TARGETS[:1]:
        session = fp.compile(graph, fp.losses.mean, fp.optim.SGD(0.05), target=target).bind()
        for value in graph.parameters:
            session.parameters[value.name][...] = rng.normal(0, 0.5, value.shape).astype(np.float32)
        before = {value.name: session.parameters[value.name].copy() for value in graph.parameters}
        found = session.step(feeds)
        wanted, slopes = judge(before)
        np.testing.assert_allclose(found.loss, wanted, rtol=2e-5)
        for name, slope in slopes.items():
            moved = (before[name] - session.parameters[name]) / 0.05
            np.testing.assert_allclose(moved, slope, rtol=2e-3, atol=2e-4 * np.abs(slope).max() + 1e-5, err_msg=name)


def test_the_size_of_the_slope_of_a_loss() -> None:
    """Cross-entropy behind a softmax, twice differentiated; one item is ignored."""
    rng = np.random.default_rng(4)
    x, w = (rng.normal(size=shape).astype(np.float32) for shape in ((5, 6), (6, 3)))
    target = np.array([0, 2, -100, 1, 1])

    def model(x: Any, target: Any) -> Any:
        logits = nn.softmax(np.sin(x @ nn.parameter("w", (6, 3), w))) * 3.0
        loss = np.sum(nn.cross_entropy(logits, target))
        return np.sum(fp.gradient(loss, x) ** 2) + loss

    def in_jax(w: Any) -> Any:
        def loss(x: Any) -> Any:
            scores = jax.nn.log_softmax(3.0 * jax.nn.softmax(jnp.sin(x @ w)))
            return -(jnp.take_along_axis(scores, jnp.maximum(target, 0)[:, None], 1)[:, 0] * (target >= 0)).sum()

        return (jax.grad(loss)(x) ** 2).sum() + loss(x)

    graph = fp.trace(model, fp.spec((5, 6)), fp.spec((5,), "int64"))
    found = fp.compile(graph, fp.losses.sum).bind().step({"x": x, "target": target})
    value, slope = jax.jit(jax.value_and_grad(in_jax))(w)
    np.testing.assert_allclose(found.loss, value, rtol=1e-5)
    np.testing.assert_allclose(found.gradients["w"], slope, rtol=1e-4, atol=1e-5)


def test_a_gradient_is_a_tensor_of_a_model_that_is_only_run() -> None:
    def model(x: Any, y: Any) -> Any:
        return fp.gradient(np.sum(np.sin(x) * y * y), x, y)

    x, y = (np.random.default_rng(i).normal(size=(3, 4)).astype(np.float32) for i in range(2))
    found = fp.compile(fp.trace(model, fp.spec((3, 4)), fp.spec((3, 4)))).bind().step({"x": x, "y": y}).outputs
    for got, wanted in zip(found.values(), jax.grad(lambda x, y: (jnp.sin(x) * y * y).sum(), (0, 1))(x, y)):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


def test_dropout_is_differentiated_in_the_form_that_a_step_computes() -> None:
    """Where an element is dropped, its gradient is zero; elsewhere it is scaled as the element is."""

    def model(x: Any) -> Any:
        y = nn.dropout(x, 0.5)
        w = nn.parameter("w", 64, 1.0)
        return y * w, fp.gradient(np.sum(y), x)

    graph = fp.trace(model, fp.spec((64,)))
    step = fp.compile(graph, lambda y, g: np.sum(y), fp.optim.SGD(0.0), outputs=list(graph.outputs))
    found = step.bind().step({"x": np.ones(64, "f4")}).outputs
    y, g = found.values()
    np.testing.assert_array_equal(y, g)
    assert set(np.unique(g)) == {0.0, 2.0}


@pytest.mark.parametrize("precision", ["bf16"])
def test_narrow_steps_hold_gradients_too(precision: str) -> None:
    def model(x: Any) -> Any:
        y = np.tanh(nn.linear(x, 8, name="l"))
        g = fp.gradient(np.sum(y * y), x)
        return np.mean(g * g)

    graph = fp.trace(model, fp.spec((16, 8)))
    x = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
    losses = [
        fp.compile(graph, fp.losses.mean, fp.optim.SGD(0.1), **options).bind(seed=0).step({"x": x}).loss
        for options in ({}, {"precision": precision})
    ]
    np.testing.assert_allclose(losses[1], losses[0], rtol=3e-2)


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        (lambda x: fp.gradient(x * x, x), ShapeError, "one floating-point number"),
        (lambda x: fp.gradient(np.sum(x), x > 0), ShapeError, "no gradient with respect to"),
        (lambda x: fp.gradient(np.sum(nn.attention(x, x, x)), x) * 1.0, UnsupportedError, "attention_grad"),
    ],
)
def test_what_has_no_gradient_is_refused(model: Any, error: type[ForeplanError], message: str) -> None:
    def loss(x: Any) -> Any:
        return np.sum(model(x)) * np.sum(nn.parameter("w", 1, 1.0))

    with pytest.raises(error, match=message):
        fp.compile(fp.trace(loss, fp.spec((1, 1, 4, 4))), fp.losses.mean, gradients=["x"])
