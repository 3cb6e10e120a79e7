"""Layers of `nn` beside those of `torch.nn`: drawn geometry, the same weights by name, outputs and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make setup-torch")

from foreplan import nn  # noqa: E402
from tests.frontend.judged import Found, close, run  # noqa: E402
from tests.profile import pick  # noqa: E402

SEEDS = range(pick(1, 3, 30))
F = torch.nn.functional


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def beside(module: Any, found: Found, call: Callable[..., Any], *arrays: np.ndarray) -> None:
    """`call(module, *tensors)` against what was found. The state_dict's names begin with `m.` here."""
    if module is not None:
        weights = {name.removeprefix("m."): torch.from_numpy(array) for name, array in found.weights.items()}
        module.load_state_dict(weights, strict=True)
    tensors = [torch.from_numpy(x).requires_grad_(x.dtype.kind == "f") for x in arrays]
    expected = call(module, *tensors)
    close(found.output, expected.detach().numpy(), "output")
    expected.backward(torch.from_numpy(found.cotangent))
    for i, (got, tensor) in enumerate(zip(found.inputs, tensors)):
        if got is not None:
            close(got, tensor.grad.numpy(), f"gradient of input {i}")
    for name, weight in module.named_parameters() if module is not None else ():
        close(found.gradients[f"m.{name}"], weight.grad.numpy(), f"gradient of {name}")


@pytest.mark.parametrize("kind", ["RNN", "LSTM", "GRU"])
@pytest.mark.parametrize("seed", SEEDS)
def test_recurrent_layers(kind: str, seed: int) -> None:
    rng = np.random.default_rng([seed, ord(kind[0])])
    steps, items, inputs, size, layers = (int(n) for n in rng.integers(1, 5, 5))
    layers, (both, first, bias) = 1 + layers % 3, (bool(n) for n in rng.integers(0, 2, 3))
    options = {"bidirectional": both, "batch_first": first, "bias": bias}
    module = getattr(torch.nn, kind)(inputs, size, layers, **options)
    x = normal(rng, *((items, steps) if first else (steps, items)), inputs)
    states = [normal(rng, layers * (1 + both), items, size) for _ in range(1 + (kind == "LSTM"))]

    def ours(x: Any, *given: Any) -> Any:
        state = given if kind == "LSTM" else given[0]
        y, last = getattr(nn, kind.lower())(x, size, layers, **options, state=state, name="m")
        return np.concatenate([part.reshape(-1) for part in (y, *(last if kind == "LSTM" else (last,)))])

    def theirs(module: Any, x: Any, *given: Any) -> Any:
        y, last = module(x, given if kind == "LSTM" else given[0])
        return torch.cat([part.reshape(-1) for part in (y, *(last if kind == "LSTM" else (last,)))])

    found = run(ours, x, *states)
    assert [*found.weights] == [f"m.{name}" for name in module.state_dict()]
    assert all(np.abs(w).max() <= size**-0.5 for w in found.weights.values())
    beside(module, found, theirs, x, *states)


@pytest.mark.parametrize("seed", SEEDS)
def test_adaptive_pools(seed: int) -> None:
    rng = np.random.default_rng(seed)
    spatial = [int(n) for n in rng.integers(1, 9, rng.integers(1, 4))]
    size = [int(rng.integers(1, 9)) if rng.random() < 0.8 else None for _ in spatial]
    x = rng.integers(-3, 3, (2, 3, *spatial)).astype(np.float32)  # with ties, whose gradient goes to one element
    for ours, name in ((nn.adaptive_avg_pool, "avg"), (nn.adaptive_max_pool, "max")):
        theirs = getattr(F, f"adaptive_{name}_pool{len(spatial)}d")
        wanted = size if len(spatial) > 1 else size[0] or spatial[0]
        beside(None, run(lambda x, f=ours: f(x, size) * 1.0, x), lambda _, x, f=theirs, s=wanted: f(x, s), x)


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
@pytest.mark.parametrize("seed", SEEDS)
def test_convolutions_with_padding_modes(mode: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    axes = int(rng.integers(1, 4))
    kernel, pads = ([int(n) for n in rng.integers(low, 4, axes)] for low in (1, 0))
    x = normal(rng, 2, 4, *(int(n) for n in rng.integers(4, 7, axes)))
    stride, groups = int(rng.integers(1, 3)), int(rng.choice([1, 2]))
    conv = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)[axes - 1]
    module = conv(4, 6, tuple(kernel), stride, tuple(pads), groups=groups, padding_mode=mode)
    found = run(lambda x: nn.conv(x, 6, kernel, stride, pads, groups, name="m", padding_mode=mode), x)
    beside(module, found, lambda module, x: module(x), x)


@pytest.mark.parametrize("seed", SEEDS)
def test_other_layers(seed: int) -> None:
    rng = np.random.default_rng(seed)
    axes, r = int(rng.integers(1, 4)), int(rng.integers(1, 4))
    x = normal(rng, 2, 4, *(int(n) for n in rng.integers(2, 6, axes)))
    norm = (torch.nn.InstanceNorm1d, torch.nn.InstanceNorm2d, torch.nn.InstanceNorm3d)[axes - 1]
    for affine in (False, True):
        found = run(lambda x, a=affine: nn.instance_norm(x, a, name="m"), x)
        beside(norm(4, affine=affine), found, lambda module, x: module(x), x)
    for count in (1, 4):
        found = run(lambda x, n=count: nn.prelu(x, n, name="m"), x)
        assert (found.weights["m.weight"] == torch.nn.PReLU(count).weight.detach().numpy()).all()
        beside(torch.nn.PReLU(count), found, lambda module, x: module(x), x)
    beside(None, run(nn.selu, x), lambda _, x: F.selu(x), x)
    beside(None, run(lambda x: nn.glu(x, 1), x), lambda _, x: F.glu(x, 1), x)
    small = normal(rng, 2, 2 * r * r, 3, 2)
    beside(None, run(lambda x: nn.pixel_shuffle(x, r) * 1.0, small), lambda _, x: F.pixel_shuffle(x, r), small)
    large = normal(rng, 2, 2, 3 * r, 2 * r)
    beside(None, run(lambda x: nn.pixel_unshuffle(x, r) * 1.0, large), lambda _, x: F.pixel_unshuffle(x, r), large)


@pytest.mark.parametrize("seed", SEEDS)
def test_rotary_embedding_is_that_of_llama(seed: int) -> None:
    llama = pytest.importorskip(
        "transformers.models.llama.modeling_llama", reason="transformers is not installed: make setup-torch"
    )
    rng = np.random.default_rng(seed)
    b, h, t, d = (*(int(n) for n in rng.integers(1, 5, 3)), 2 * int(rng.integers(1, 6)))
    config = llama.LlamaConfig(hidden_size=h * d, num_attention_heads=h, head_dim=d)
    rotary = llama.LlamaRotaryEmbedding(config)
    x, places = normal(rng, b, h, t, d), rng.integers(0, 40, (b, t))

    def theirs(_: Any, x: Any, places: Any) -> Any:
        cos, sin = rotary(x, places)
        return llama.apply_rotary_pos_emb(x, x, cos, sin)[0]

    beside(None, run(lambda x, p: nn.rotary_embedding(x, p), x, places), theirs, x, places)
