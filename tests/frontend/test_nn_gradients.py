"""Layers and functions of `nn`, forward and backward, against formulas in JAX, with random geometry."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from foreplan.base.errors import ShapeError, UsageError
from foreplan.frontend import nn, spec, trace
from tests.frontend.judged import close, run
from tests.oracle.peers import jax, jnp, pulled
from tests.profile import pick

TARGETS = ("numpy", "cpu:threads=1")
DRAWS = pick(1, 1, 2)


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def same(ours: Callable[..., Any], theirs: Callable[..., Any], *arrays: np.ndarray, target: str = "numpy") -> None:
    """`theirs` takes the stored tensors by name, then the arrays."""
    found = run(ours, *arrays, target=target)
    expected, (weights, *inputs) = pulled(theirs, found.cotangent, found.weights, *arrays)
    close(found.output, expected, "output")
    for i, (got, want) in enumerate(zip(found.inputs, inputs)):
        if got is not None:
            close(got, want, f"gradient of input {i}")
    for name, got in found.gradients.items():
        close(got, weights[name], f"gradient of {name}")


def each(draws: int = DRAWS, targets: Sequence[str] = TARGETS[:1]) -> Callable[..., Any]:
    """A test for each of several seeds, on the engines in turns."""
    return pytest.mark.parametrize(("seed", "target"), [(s, targets[s % len(targets)]) for s in range(draws)])


# Recurrent layers


def way(cell: Callable[..., Any], x: Any, state: Any, backward: bool) -> tuple[Any, Any]:
    """One direction of one layer, x [T, N, I]."""
    shown = []
    for t in range(x.shape[0])[:: -1 if backward else 1]:
        state = cell(x[t], state)
        shown.append(state[0])
    return jnp.stack(shown[:: -1 if backward else 1]), state


def cell_of(kind: str, w: dict[str, Any], suffix: str, size: int) -> Callable[..., Any]:
    wi, wh = w[f"r.weight_ih_{suffix}"], w[f"r.weight_hh_{suffix}"]
    bi, bh = w.get(f"r.bias_ih_{suffix}", 0.0), w.get(f"r.bias_hh_{suffix}", 0.0)

    def lstm(x: Any, state: Any) -> Any:
        i, f, g, o = jnp.split(x @ wi.T + bi + state[0] @ wh.T + bh, 4, -1)
        c = jax.nn.sigmoid(f) * state[1] + jax.nn.sigmoid(i) * jnp.tanh(g)
        return jax.nn.sigmoid(o) * jnp.tanh(c), c

    def gru(x: Any, state: Any) -> Any:
        (ri, zi, ni), (rh, zh, nh) = jnp.split(x @ wi.T + bi, 3, -1), jnp.split(state[0] @ wh.T + bh, 3, -1)
        z = jax.nn.sigmoid(zi + zh)
        n = jnp.tanh(ni + jax.nn.sigmoid(ri + rh) * nh)
        return ((1 - z) * n + z * state[0],)

    def rnn(x: Any, state: Any) -> Any:
        return (jnp.tanh(x @ wi.T + bi + state[0] @ wh.T + bh),)

    return {"lstm": lstm, "gru": gru, "rnn": rnn}[kind]


@pytest.mark.parametrize("kind", ["rnn", "lstm", "gru"])
@each(targets=TARGETS)
def test_recurrent_layers(kind: str, seed: int, target: str) -> None:
    rng = np.random.default_rng([seed, len(kind)])
    steps, items, inputs, size = rng.integers(1, 5), rng.integers(1, 4), rng.integers(1, 5), int(rng.integers(1, 5))
    layers, both, first, bias = int(rng.integers(1, 3)), *(bool(n) for n in rng.integers(0, 2, 3))
    ways, count = 1 + both, 2 if kind == "lstm" else 1
    x = normal(rng, *((items, steps) if first else (steps, items)), inputs)
    states = [normal(rng, layers * ways, items, size) for _ in range(count)]

    def ours(x: Any, *given: Any) -> Any:
        state = given if kind == "lstm" else given[0]
        y, last = getattr(nn, kind)(x, size, layers, both, first, bias, state=state, name="r")
        return np.concatenate([part.reshape(-1) for part in (y, *(last if kind == "lstm" else (last,)))])

    def theirs(w: dict[str, Any], x: Any, *given: Any) -> Any:
        y, finals = jnp.swapaxes(x, 0, 1) if first else x, []
        for layer in range(layers):
            outputs = []
            for d in range(ways):
                cell = cell_of(kind, w, f"l{layer}" + "_reverse" * d, size)
                shown, last = way(cell, y, tuple(s[layer * ways + d] for s in given), bool(d))
                outputs.append(shown)
                finals.append(last)
            y = jnp.concatenate(outputs, -1)
        y = jnp.swapaxes(y, 0, 1) if first else y
        return jnp.concatenate([y.reshape(-1), *(jnp.stack(s).reshape(-1) for s in zip(*finals))])

    same(ours, theirs, x, *states, target=target)


def test_recurrent_layers_begin_with_zeros_and_drop_between_layers() -> None:
    x = normal(np.random.default_rng(0), 2, 3, 4)
    found = run(lambda x: nn.lstm(x, 5, name="r")[0], x)
    zeros = np.zeros((1, 2, 5), np.float32)
    given = run(lambda x: nn.lstm(x, 5, state=(zeros, zeros), name="r")[0], x)
    close(found.output, given.output)
    assert all(np.abs(w).max() <= 5**-0.5 for w in found.weights.values())
    graph = trace(lambda x: nn.gru(x, 5, 3, dropout=0.25)[0], spec((2, 3, 4)))
    assert sum(node.op.name == "dropout" for node in graph.nodes) == 2


# Images


@each(targets=TARGETS)
def test_adaptive_pools(seed: int, target: str) -> None:
    rng = np.random.default_rng(seed)
    spatial = [int(n) for n in rng.integers(1, 9, rng.integers(1, 4))]
    size = [int(rng.integers(1, 9)) if rng.random() < 0.6 else n for n in spatial]
    x = rng.permutation(np.arange(2 * 3 * np.prod(spatial))).reshape(2, 3, *spatial).astype(np.float32) / 50

    def windows(reduce: Callable[..., Any]) -> Callable[..., Any]:
        def pool(w: Any, x: Any) -> Any:
            found = []
            for place in np.ndindex(*size):
                spans = [slice(i * n // m, -(-(i + 1) * n // m)) for i, n, m in zip(place, spatial, size)]
                found.append(reduce(x[(..., *spans)], tuple(range(2, x.ndim))))
            return jnp.stack(found, -1).reshape(2, 3, *size)

        return pool

    same(lambda x: nn.adaptive_avg_pool(x, size), windows(jnp.mean), x, target=target)
    same(lambda x: nn.adaptive_max_pool(x, size), windows(jnp.max), x, target=target)


def test_adaptive_pools_take_one_number_and_none() -> None:
    x = spec((2, 3, 6, 7))
    for pool in (nn.adaptive_avg_pool, nn.adaptive_max_pool):
        shapes = [trace(lambda x, s=s, p=pool: p(x, s) + 0, x).outputs["output"].shape for s in (1, None, (None, 2))]
        assert shapes == [(2, 3, 1, 1), (2, 3, 6, 7), (2, 3, 6, 2)]


MODES = {"reflect": "reflect", "replicate": "edge", "circular": "wrap", "zeros": "constant", "edge": "edge"}


@pytest.mark.parametrize("mode", MODES)
@each()
def test_padding(mode: str, seed: int, target: str) -> None:
    rng = np.random.default_rng(seed)
    spatial = [int(n) for n in rng.integers(3, 7, rng.integers(1, 4))]
    pads = [tuple(int(n) for n in rng.integers(0, 3, 2)) for _ in spatial]
    x = normal(rng, 2, 2, *spatial)
    full = [(0, 0), (0, 0), *pads]
    same(lambda x: nn.pad(x, pads, mode) + 0.0, lambda w, x: jnp.pad(x, full, MODES[mode]), x, target=target)

    def theirs(w: dict[str, Any], x: Any) -> Any:
        y = jnp.pad(x, full, MODES[mode])
        y = jax.lax.conv_general_dilated(y, w["c.weight"], (2,) * len(spatial), "VALID")
        return y + w["c.bias"].reshape(-1, *(1 for _ in spatial))

    if mode != "edge":
        same(lambda x: nn.conv(x, 3, 2, 2, pads, name="c", padding_mode=mode), theirs, x, target=target)


def test_padding_with_a_value() -> None:
    x = normal(np.random.default_rng(0), 1, 2, 3)
    close(run(lambda x: nn.pad(x, 1, value=2.5), x).output, np.pad(x, [(0, 0), (0, 0), (1, 1)], constant_values=2.5))


@each()
def test_pixel_shuffle_and_back(seed: int, target: str) -> None:
    rng = np.random.default_rng(seed)
    r, c, h, w = (int(n) for n in rng.integers(1, 4, 4))
    lead = tuple(int(n) for n in rng.integers(1, 3, rng.integers(0, 3)))
    small, large = normal(rng, *lead, c * r * r, h, w), normal(rng, *lead, c, h * r, w * r)

    def shuffle(x: Any) -> Any:  # einops: (c i j) h w -> c (h i) (w j)
        return jnp.einsum("...cijhw->...chiwj", x.reshape(*lead, c, r, r, h, w)).reshape(large.shape)

    def unshuffle(x: Any) -> Any:
        return jnp.einsum("...chiwj->...cijhw", x.reshape(*lead, c, h, r, w, r)).reshape(small.shape)

    same(lambda x: nn.pixel_shuffle(x, r) * 2, lambda w, x: shuffle(x) * 2, small, target=target)
    same(lambda x: nn.pixel_unshuffle(x, r) * 2, lambda w, x: unshuffle(x) * 2, large, target=target)


# Activations and normalisation


@each()
def test_activations(seed: int, target: str) -> None:
    rng = np.random.default_rng(seed)
    x = 2 * normal(rng, 3, 4, int(rng.integers(1, 5)))
    same(nn.selu, lambda w, x: jax.nn.selu(x), x, target=target)
    same(lambda x: nn.glu(x, 1), lambda w, x: jax.nn.glu(x, 1), x, target=target)
    same(lambda x: nn.prelu(x, 4, name="p"), lambda w, x: jnp.where(x > 0, x, w["p.weight"][:, None] * x), x)
    same(lambda x: nn.prelu(x, name="p"), lambda w, x: jnp.where(x > 0, x, w["p.weight"] * x), x, target=target)


@each()
def test_instance_norm(seed: int, target: str) -> None:
    rng = np.random.default_rng(seed)
    x = normal(rng, 2, 3, *(int(n) for n in rng.integers(2, 6, rng.integers(1, 4)))) + 0.5
    axes = tuple(range(2, x.ndim))

    def theirs(w: dict[str, Any], x: Any) -> Any:
        y = (x - x.mean(axes, keepdims=True)) / jnp.sqrt(x.var(axes, keepdims=True) + 1e-3)
        weight, bias = (w.get(f"n.{name}", first) for name, first in (("weight", jnp.ones(3)), ("bias", jnp.zeros(3))))
        return y * weight.reshape(-1, *(1 for _ in axes)) + bias.reshape(-1, *(1 for _ in axes))

    for affine in (False, True):
        same(lambda x, a=affine: nn.instance_norm(x, a, 1e-3, "n"), theirs, x, target=target)


# Rotary embedding


@each(2 * DRAWS)
def test_rotary_embedding(seed: int, target: str) -> None:
    rng = np.random.default_rng(seed)
    b, h, t, d = (*(int(n) for n in rng.integers(1, 4, 3)), 2 * int(rng.integers(1, 5)))
    width, base = 2 * int(rng.integers(0, d // 2 + 1)), float(rng.uniform(10, 1e4))
    interleaved, last, batched, traced = (bool(rng.integers(2)) for _ in range(4))
    x = normal(rng, *((b, t, h, d) if last else (b, h, t, d)))
    places = rng.integers(0, 50, (b, t) if batched else (t,))

    def theirs(w: Any, x: Any, places: Any) -> Any:
        y = jnp.swapaxes(x, 1, 2) if last else x
        angle = places[..., None] / base ** (np.arange(0, width, 2) / max(width, 1))
        angle = angle.reshape(b if batched else 1, 1, t, width // 2)
        turned, rest = y[..., :width], y[..., width:]
        z = turned[..., ::2] + 1j * turned[..., 1::2]
        if not interleaved:
            z = turned[..., : width // 2] + 1j * turned[..., width // 2 :]
        z = z * jnp.exp(1j * angle)
        pair = jnp.stack([z.real, z.imag], -1 if interleaved else -2).reshape(turned.shape)
        y = jnp.concatenate([pair, rest], -1)
        return jnp.swapaxes(y, 1, 2) if last else y

    def ours(x: Any, p: Any) -> Any:
        return nn.rotary_embedding(x, p if traced else places, base, interleaved, width, last)

    same(ours, theirs, x, places, target=target)


def test_rotary_embedding_counts_from_zero() -> None:
    x = normal(np.random.default_rng(0), 2, 3, 4, 6)
    found = [run(lambda x, p=p: nn.rotary_embedding(x, p), x).output for p in (None, np.arange(4))]
    close(found[0], found[1], tol=0)


# Errors


@pytest.mark.parametrize(
    ("call", "shape", "told"),
    [
        (lambda x: nn.lstm(x, 3), (2, 3), r"\[batch, steps, inputs\]"),
        (lambda x: nn.lstm(x, 3, state=(x, x)), (2, 3, 4), r"must have the shape \[1, 2, 3\]"),
        (lambda x: nn.lstm(x, 3, state=(x,)), (2, 3, 4), r"pair \(h, c\)"),
        (lambda x: nn.lstm(x, 0), (2, 3, 4), "from 1 to"),
        (lambda x: nn.lstm(x, 3, state=1), (2, 3, 4), r"pair \(h, c\)"),
        (lambda x: nn.gru(x, 3, name=np.zeros(2)), (2, 3, 4), "name of a layer is a text"),
        (lambda x: nn.conv(x, "a", 1), (1, 2, 3), "conv's features must be a whole number"),
        (lambda x: nn.rnn(x, 3, activation="sin"), (2, 3, 4), "choose one of tanh, relu"),
        (lambda x: nn.gru(x, 3, 2, bidirectional="yes"), (2, 3, 4), "bidirectional is True or False"),
        (lambda x: nn.adaptive_avg_pool(x, 0), (1, 2, 3), "from 1 to"),
        (lambda x: nn.adaptive_max_pool(x, (1, 2)), (1, 2, 3), "2 numbers for 1 spatial"),
        (lambda x: nn.adaptive_max_pool(x, 1), (1, 2), "at least one spatial axis"),
        (lambda x: nn.pad(x, 3, "reflect"), (1, 2, 3), "mode reflect cannot add 3"),
        (lambda x: nn.pad(x, 1, "mirror"), (1, 2, 3), "choose one of constant"),
        (lambda x: nn.pad(x, "same"), (1, 2, 3), "needs images"),
        (lambda x: nn.conv(x, 2, 1, padding=1, padding_mode="mirror"), (1, 2, 3), "choose one of constant"),
        (lambda x: nn.pixel_shuffle(x, 2), (1, 6, 2, 2), "channels that 4 divides"),
        (lambda x: nn.pixel_unshuffle(x, 2), (1, 6, 3, 2), "that 2 divides"),
        (lambda x: nn.glu(x), (2, 3), "odd number"),
        (lambda x: nn.prelu(x, 2), (2, 3), "2 slopes"),
        (lambda x: nn.instance_norm(x), (2, 3), "at least one spatial axis"),
        (lambda x: nn.rotary_embedding(x), (2, 3, 4), "batch, heads"),
        (lambda x: nn.rotary_embedding(x), (2, 3, 4, 5), "odd"),
        (
            lambda x: nn.rotary_embedding(x, frequencies=[1.0]),
            (2, 3, 4, 6),
            "1 frequencies for 3 pairs",
        ),
        (lambda x: nn.rotary_embedding(x, np.arange(3)), (2, 3, 4, 6), r"\[3\] are neither \[4\] nor \[2, 4\]"),
    ],
)
def test_errors_say_what_is_wrong(call: Callable[..., Any], shape: tuple[int, ...], told: str) -> None:
    with pytest.raises((ShapeError, UsageError), match=told):
        trace(call, spec(shape))
