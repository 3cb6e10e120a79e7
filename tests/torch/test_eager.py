"""A step as PyTorch runs it, beside PyTorch: bytes that are alive after each phase, and the most of them within it.

Models are drawn. Each layer is written twice, for foreplan's tracer and for PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make setup-torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import foreplan as fp  # noqa: E402
from foreplan.eager import Variant, Workspaces, as_pytorch  # noqa: E402
from foreplan.eager.watched.loop import Recipe, run  # noqa: E402
from foreplan.frontend import nn as ours  # noqa: E402
from foreplan.frontend import spec, trace  # noqa: E402
from tests.profile import pick  # noqa: E402
from tests.torch.alive import most_within, phases  # noqa: E402

SEEDS = range(pick(12, 60, 600))
Rng = np.random.Generator
_numpy: Any = np


@dataclass
class Layer:
    """A layer in both tongues; `name` is unique in its model."""

    mine: Callable[[Any], Any]
    theirs: Callable[[Any], Any]
    modules: tuple[nn.Module, ...] = ()


class Drawn(nn.Module):
    def __init__(self, layers: list[Layer]) -> None:
        super().__init__()
        self.calls = [layer.theirs for layer in layers]
        self.parts = nn.ModuleList(module for layer in layers for module in layer.modules)

    def forward(self, x: Any) -> Any:
        for call in self.calls:
            x = call(x)
        return x


def of_module(mine: Callable[[Any], Any], module: nn.Module) -> Layer:
    return Layer(mine, module, (module,))


ACTIVATIONS = [
    (ours.gelu, F.gelu),
    (ours.silu, F.silu),
    (ours.relu6, F.relu6),
    (ours.tanh, torch.tanh),
    (ours.sigmoid, torch.sigmoid),
    (ours.leaky_relu, F.leaky_relu),
    (ours.elu, F.elu),
    (ours.softplus, F.softplus),
    (ours.hard_swish, F.hardswish),
    (ours.hard_sigmoid, F.hardsigmoid),
    (np.exp, torch.exp),
    (np.square, torch.square),
    (np.abs, torch.abs),
    (np.sin, torch.sin),
    (np.cos, torch.cos),
    (lambda x: 1.0 - x, lambda x: 1.0 - x),
    (lambda x: x * 2.0, lambda x: x * 2.0),
    (lambda x: x + 1.0, lambda x: x + 1.0),
    (lambda x: x / 3.0, lambda x: x / 3.0),
    (np.log1p, torch.log1p),
    (np.negative, torch.neg),
    (ours.mish, F.mish),
    (lambda x: 1.0 / x, lambda x: 1.0 / x),
    (lambda x: np.maximum(x, 0.1), lambda x: x.clamp(min=0.1)),
    (lambda x: np.sqrt(np.abs(x)), lambda x: torch.sqrt(torch.abs(x))),
]


def activation(rng: Rng) -> Layer:
    return Layer(*ACTIVATIONS[rng.integers(len(ACTIVATIONS))])


def image_layer(rng: Rng, name: str, channels: int) -> tuple[Layer, int]:
    """Of images [n, channels, h, w], and the channels that it gives."""
    kind, wide = rng.integers(13), int(rng.integers(1, 5)) * 2
    bias = bool(rng.integers(2))
    if kind <= 1:
        stride = int(rng.integers(1, 3))
        conv = nn.Conv2d(channels, wide, 3, stride, 1, bias=bias)
        return of_module(lambda x: ours.conv(x, wide, 3, stride, 1, bias=bias, name=name), conv), wide
    if kind == 2:
        up = nn.ConvTranspose2d(channels, wide, 2, 2)
        return of_module(lambda x: ours.conv_transpose(x, wide, 2, 2, name=name), up), wide
    if kind == 3:
        norm = nn.BatchNorm2d(channels)
        return of_module(lambda x: ours.batch_norm(x, name=name), norm), channels
    if kind == 4:
        six = bool(rng.integers(2))
        last = nn.ReLU6(inplace=True) if six else nn.ReLU(inplace=True)
        parts = nn.Sequential(nn.Conv2d(channels, wide, 1, bias=False), nn.BatchNorm2d(wide), last)

        def mine(x: Any) -> Any:
            y = ours.batch_norm(ours.conv(x, wide, 1, bias=False, name=name), name=f"{name}.norm")
            return ours.relu6(y) if six else ours.relu(y)

        return of_module(mine, parts), wide
    if kind == 5:
        return Layer(lambda x: ours.max_pool(x, 2, 1, 1), lambda x: F.max_pool2d(x, 2, 1, 1)), channels
    if kind == 6:
        return Layer(lambda x: ours.avg_pool(x, 2, 1, 1, True), lambda x: F.avg_pool2d(x, 2, 1, 1)), channels
    if kind == 7:
        inner = nn.Conv2d(channels, channels, 3, 1, 1)
        return Layer(
            lambda x: x + ours.conv(x, channels, 3, 1, 1, name=name), lambda x: x + inner(x), (inner,)
        ), channels
    if kind == 8:
        inner = nn.Conv2d(channels, wide, 3, 1, 1)
        return Layer(
            lambda x: ours.concat([x, ours.conv(x, wide, 3, 1, 1, name=name)]),
            lambda x: torch.cat([x, inner(x)], 1),
            (inner,),
        ), channels + wide
    if kind == 9:
        ratio = 0.2
        return Layer(lambda x: ours.dropout(x, ratio), lambda x: F.dropout(x, ratio)), channels
    if kind == 10:
        return of_module(lambda x: ours.group_norm(x, 2, name=name), nn.GroupNorm(2, channels)), channels
    if kind == 11:
        around = ((0, 0), (0, 0), (1, 0), (0, 1))
        return Layer(lambda x: _numpy.pad(x, around), lambda x: F.pad(x, (0, 1, 1, 0))), channels
    return activation(rng), channels


def token_layer(rng: Rng, name: str, width: int) -> tuple[Layer, int]:
    """Of [n, tokens, width], and the width that it gives."""
    kind, wide = rng.integers(22), int(rng.integers(1, 5)) * 4
    if kind <= 1:
        return of_module(lambda x: ours.linear(x, wide, name=name), nn.Linear(width, wide)), wide
    if kind == 2:
        plain = nn.Linear(width, wide, bias=False)
        return of_module(lambda x: ours.linear(x, wide, bias=False, name=name), plain), wide
    if kind == 3:
        return of_module(lambda x: ours.layer_norm(x, name=name), nn.LayerNorm(width)), width
    if kind == 4:
        return Layer(lambda x: ours.softmax(x), lambda x: x.softmax(-1)), width
    if kind == 5 and width % 2 == 0:
        return attention(name, width, written_out=False)
    if kind == 11 and width % 2 == 0:
        return attention(name, width, written_out=True)
    if kind == 6:
        inner = nn.Sequential(nn.Linear(width, wide), nn.GELU(), nn.Linear(wide, width))

        def mine(x: Any) -> Any:
            return x + ours.linear(ours.gelu(ours.linear(x, wide, name=f"{name}.a")), width, name=f"{name}.b")

        return Layer(mine, lambda x: x + inner(x), (inner,)), width
    if kind == 7:
        scale = nn.ParameterList([torch.randn(width)])
        return Layer(lambda x: x * ours.parameter(f"{name}.scale", (width,)), lambda x: x * scale[0], (scale,)), width
    if kind == 8:
        half = nn.Linear(width, width)

        def gated(x: Any) -> Any:
            return x * ours.sigmoid(ours.linear(x, width, name=name))

        return Layer(gated, lambda x: x * torch.sigmoid(half(x)), (half,)), width
    if kind == 9:
        return Layer(lambda x: x - x.mean(axis=-1, keepdims=True), lambda x: x - x.mean(-1, keepdim=True)), width
    if kind == 10:
        return Layer(
            lambda x: x / (1.0 + x.sum(axis=1, keepdims=True)), lambda x: x / (1.0 + x.sum(1, keepdim=True))
        ), width
    if kind == 12:
        return of_module(lambda x: ours.rms_norm(x, name=name), nn.RMSNorm(width, eps=1e-6)), width
    if kind == 13 and width > 2:
        return Layer(lambda x: x[:, :, 1:], lambda x: x[:, :, 1:]), width - 1
    if kind in (14, 15):
        inner, larger = nn.Linear(width, width), bool(rng.integers(2))

        def of_two(x: Any) -> Any:
            y = ours.linear(x, width, name=name)
            return np.maximum(x, y) if larger else np.where(x > 0.0, x, y)

        def their_two(x: Any) -> Any:
            y = inner(x)
            return torch.maximum(x, y) if larger else torch.where(x > 0.0, x, y)

        return Layer(of_two, their_two, (inner,)), width
    if kind == 16:
        return Layer(lambda x: np.cumsum(x, axis=1), lambda x: x.cumsum(1)), width
    if kind == 17:
        inner = nn.Linear(5, 5)

        def mixed(x: Any) -> Any:
            return ours.linear(x.swapaxes(1, 2), 5, name=name).swapaxes(1, 2)

        return Layer(mixed, lambda x: inner(x.transpose(1, 2)).transpose(1, 2), (inner,)), width
    if kind == 18:
        return Layer(lambda x: x - x.max(axis=-1, keepdims=True), lambda x: x - x.amax(-1, keepdim=True)), width
    if kind == 19:
        place = nn.ParameterList([torch.randn(5, width)])
        return Layer(lambda x: x + ours.parameter(f"{name}.place", (5, width)), lambda x: x + place[0], (place,)), width
    if kind == 20:
        return Layer(lambda x: ours.dropout(x, 0.1), lambda x: F.dropout(x, 0.1)), width
    return activation(rng), width


def attention(name: str, width: int, written_out: bool) -> tuple[Layer, int]:
    heads = 2
    inner = nn.Linear(width, 3 * width)

    def theirs(x: Any) -> Any:
        q, k, v = inner(x).split(width, -1)
        q, k, v = (each.unflatten(-1, (heads, -1)).transpose(1, 2) for each in (q, k, v))
        if written_out:
            y = ((q @ k.transpose(-1, -2)) / 2.0).softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v)
        del q, k, v  # a value is dropped when it has been read for the last time
        return y.transpose(1, 2).flatten(2)

    def mine(x: Any) -> Any:
        q, k, v = ours.split_heads(ours.linear(x, 3 * width, name=name), heads, 3)
        if not written_out:
            return ours.join_heads(ours.attention(q, k, v, heads_last=True))
        q, k, v = (each.swapaxes(1, 2) for each in (q, k, v))
        return ours.join_heads((ours.softmax((q @ k.swapaxes(2, 3)) / 2.0) @ v).swapaxes(1, 2))

    return Layer(mine, theirs, (inner,)), width


def drawn(rng: Rng) -> tuple[fp.Graph, nn.Module, Any]:
    """A model in both tongues, and its input."""
    of_images = bool(rng.integers(2))
    width, layers = 4, []
    shape = (2, 4, 8, 8) if of_images else (3, 5, 4)
    for i in range(int(rng.integers(1, 8))):
        layer, width = (image_layer if of_images else token_layer)(rng, f"l{i}", width)
        layers.append(layer)
    head = nn.Linear(width, 3)
    if of_images:
        layers.append(Layer(lambda x: ours.global_avg_pool(x), lambda x: F.adaptive_avg_pool2d(x, 1).flatten(1)))
    layers.append(of_module(lambda x: ours.linear(x, 3, name="head"), head))

    def model(x: Any) -> Any:
        for layer in layers:
            x = layer.mine(x)
        return x

    return trace(model, spec(shape)), Drawn(layers), torch.randn(shape)


def loss_of(y: Any, target: Any) -> Any:
    return F.cross_entropy(y.flatten(0, -2), target.flatten()) if y.dim() == 3 else F.cross_entropy(y, target)


OPTIMIZERS = [
    (fp.optim.SGD(0.1), lambda p, **how: torch.optim.SGD(p, 0.1, **how)),
    (fp.optim.SGD(0.1, 0.1), lambda p, **how: torch.optim.SGD(p, 0.1, weight_decay=0.1, **how)),
    (fp.optim.Momentum(0.1), lambda p, **how: torch.optim.SGD(p, 0.1, momentum=0.9, **how)),
    (fp.optim.Nesterov(0.1), lambda p, **how: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, **how)),
    (fp.optim.Adam(0.1), lambda p, **how: torch.optim.Adam(p, 0.1, **how)),
    (fp.optim.Adam(0.1, weight_decay=0.1), lambda p, **how: torch.optim.Adam(p, 0.1, weight_decay=0.1, **how)),
    (fp.optim.AdamW(0.1), lambda p, **how: torch.optim.AdamW(p, 0.1, **how)),
    (fp.optim.RMSprop(0.1), lambda p, **how: torch.optim.RMSprop(p, 0.1, **how)),
    (fp.optim.Adagrad(0.1), lambda p, **how: torch.optim.Adagrad(p, 0.1, **how)),
    (fp.optim.RMSprop(0.1, momentum=0.9), lambda p, **how: torch.optim.RMSprop(p, 0.1, momentum=0.9, **how)),
]


@pytest.mark.parametrize("seed", SEEDS)
def test_drawn_models(seed: int) -> None:
    rng = np.random.default_rng(seed)
    graph, module, x = drawn(rng)
    target = torch.zeros(graph.outputs["output"].shape[:-1], dtype=torch.int64)
    optimizer, make = OPTIMIZERS[rng.integers(len(OPTIMIZERS))]
    to_none, foreach = bool(rng.integers(3)), bool(rng.integers(2))
    theirs = phases(module, (x,), target, loss_of, make(module.parameters(), foreach=foreach), to_none=to_none)
    variant = Variant(zero="none" if to_none else "keep", optimizer="foreach" if foreach else "loop")
    mine = as_pytorch(graph, "cross_entropy", optimizer, variant, False, watched=True)
    assert [(phase.live, phase.most) for phase in mine.phases] == theirs


@pytest.mark.parametrize("target", ["cpu", "cuda"])
@pytest.mark.parametrize("seed", range(100, 100 + pick(8, 40, 60)))
def test_drawn_models_within_autocast(seed: int, target: str) -> None:
    """Beside real tensors on a processor, and the module itself on a card that is not here. A variable of the module
    may hold what autocast has converted, to the end of a layer: then the most of its forward pass is more.
    """
    rng = np.random.default_rng(seed)
    graph, module, x = drawn(rng)
    labels = torch.zeros(graph.outputs["output"].shape[:-1], dtype=torch.int64)
    variant, real = Variant(workspace=0), target == "cpu"
    mine = as_pytorch(graph, "cross_entropy", fp.optim.Momentum(0.1), variant, not real, precision="bf16", watched=True)
    recipe = Recipe(
        (x,), {}, loss_of, (labels,), lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), "bf16", 1, variant,
        None if real else Workspaces(0), real,
    )  # fmt: skip
    theirs = run(module, recipe, sums_in_place=False)
    for a, b in zip(mine.phases, theirs.phases, strict=True):
        assert a.live == b.live, a
        assert a.most == b.most or (a.name == "forward" and a.most < b.most), a


def of_mlp() -> tuple[fp.Graph, nn.Module, Any, Any]:
    graph = fp.models.build("mlp:width=16,layers=3,batch=8,inputs=12,classes=5")
    parts = [part for i in range(3) for part in (nn.Linear(16 if i else 12, 16), nn.ReLU(inplace=True))]
    module = nn.Sequential(*parts, nn.Linear(16, 5))
    return graph, module, torch.randn(8, 12), torch.zeros(8, dtype=torch.int64)


def test_checkpointed_parts() -> None:
    """Two stages of a chain, of convolution, normalisation and ReLU each."""
    from torch.utils.checkpoint import checkpoint

    def stage(x: Any, name: str) -> Any:
        with ours.scope(name):
            for i in "ab":
                x = ours.relu(ours.batch_norm(ours.conv(x, 4, 3, 1, 1, bias=False, name=i), name=f"{i}n"))
        return x

    def mine(x: Any) -> Any:
        x = ours.conv(x, 4, 1, name="first")
        for name in ("s1", "s2"):
            x = stage(x, name)
        return ours.linear(ours.global_avg_pool(x), 3, name="head")

    def half() -> list[nn.Module]:
        return [nn.Conv2d(4, 4, 3, 1, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True)]

    first, head = nn.Conv2d(3, 4, 1), nn.Linear(4, 3)
    stages = [nn.Sequential(*half(), *half()) for _ in range(2)]

    class Theirs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([first, *stages, head])

        def forward(self, x: Any) -> Any:
            x = first(x)
            for each in stages:
                x = checkpoint(each, x, use_reentrant=False)
            return head(F.adaptive_avg_pool2d(x, 1).flatten(1))

    module, x, target = Theirs(), torch.randn(2, 3, 8, 8), torch.zeros(2, dtype=torch.int64)
    theirs = phases(module, (x,), target, loss_of, torch.optim.SGD(module.parameters(), 0.1))
    variant = Variant(checkpoint=["s1", "s2"])
    graph = trace(mine, spec((2, 3, 8, 8)))
    found = as_pytorch(graph, "cross_entropy", fp.optim.SGD(0.1), variant, watched=True)
    assert [(phase.live, phase.most) for phase in found.phases] == theirs


@pytest.mark.parametrize("grad", ["off", "unused"])
def test_a_forward_pass_alone(grad: str) -> None:
    from tests.torch.alive import Alive

    graph, module, x, target = of_mlp()
    found = as_pytorch(graph, "cross_entropy", None, Variant(grad=grad, loss="kept"), watched=True)
    alive, kept = Alive(), []
    for tensor in (x, target, *module.parameters()):
        alive.count(tensor)
    with alive, torch.set_grad_enabled(grad == "unused"):
        for phase in found.phases[2:]:
            alive.mark()
            kept.append(loss_of(module(x), target))
            assert (phase.live, phase.most) == alive.mark()


@pytest.mark.parametrize("which", ["plan", "eager"])
def test_pytorchs_own_viewer_reads_snapshots(which: str) -> None:
    import pickle

    from torch.cuda import _memory_viz as viewer

    from foreplan.views.snapshot import eager_snapshot, plan_snapshot

    step = fp.compile(of_mlp()[0], "cross_entropy", fp.optim.Nesterov(0.1))
    made = plan_snapshot(step.memory, "mlp") if which == "plan" else eager_snapshot(step.as_pytorch().eager)
    snapshot = pickle.loads(pickle.dumps(made))
    held = sum(each["requested_size"] for each in snapshot["segments"])
    assert f"total_allocated: {viewer.Bytes(held)}" in viewer.segsum(snapshot)
    trace_text = viewer.trace(snapshot)
    assert f"{len(snapshot['device_traces'][0])} entries" in trace_text and "cudaMalloc" in trace_text
    for page in (viewer.trace_plot(snapshot), viewer.segment_plot(snapshot)):
        assert "<html" in page or "<script" in page


def test_gradients_are_summed_in_place_where_nothing_looks_on() -> None:
    """Beside the CPU's own allocator, as PyTorch's profiler records it."""
    from torch.profiler import ProfilerActivity, profile, record_function

    def mine(x: Any) -> Any:
        y = ours.linear(x, 64, name="a")
        return y * 2.0 + y * 3.0 + y * 5.0

    a, x = nn.Linear(64, 64), torch.randn(128, 64)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        y = a(x)
        loss = (y * 2.0 + y * 3.0 + y * 5.0).mean()
        del y
        with record_function("backward pass"):
            loss.backward()
    most = most_within(record, "backward pass")
    graph = trace(mine, spec((128, 64)))
    unseen, watched = (as_pytorch(graph, "mean", None, Variant(), watched=each).phases for each in (False, True))
    assert 0 <= most - (unseen[3].most - unseen[1].live) < 64  # numbers within ops
    assert watched[3].most - unseen[3].most == 128 * 64 * 4


def test_a_loop_is_counted_as_one_in_python() -> None:
    """A moving average of each number, with a weight of its own, step by step."""
    inner, weights = nn.Linear(6, 6), nn.ParameterList([torch.randn(3, 6), torch.randn(6)])

    def mine(x: Any) -> Any:
        x = ours.linear(x, 6, name="inner")
        start, w = ours.parameter("start", (3, 6)), ours.parameter("weight", (6,))

        def cell(h: Any, each: Any) -> tuple[Any, Any]:
            h = ours.tanh(h * w + each)
            return h, h

        return fp.scan(cell, start, x)[1]

    class Theirs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.weights = inner, weights

        def forward(self, x: Any) -> Any:
            x = self.inner(x)
            h, found = self.weights[0], []
            for each in x.unbind(0):
                h = torch.tanh(h * self.weights[1] + each)
                found.append(h)
            return torch.stack(found)

    module, x = Theirs(), torch.randn(7, 3, 6)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    theirs = phases(module, (x,), None, lambda y, _: y.mean(), optimizer)
    found = as_pytorch(trace(mine, spec((7, 3, 6))), "mean", fp.optim.SGD(0.1), Variant(), watched=True)
    assert [(phase.live, phase.most) for phase in found.phases] == theirs
