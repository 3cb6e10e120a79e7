"""Drawn networks of dense layers and attention, written in many ways: parts on ranks give what one process gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import foreplan as fp
from foreplan import optim
from foreplan.compiler.step_graphs import graphs_of_step
from foreplan.frontend import Tensor, nn
from foreplan.graph import Graph
from foreplan.options import Options
from foreplan.passes.tensor.regions import regions_of
from tests.profile import pick
from tests.ranks.training import assert_close, assert_same, trained

Layer = Callable[[Tensor, Tensor], Tensor]


class Draw:
    """One network, of layers whose parts are drawn once and written down as functions.

    Attributes:
        tensor: how many ranks make a group; every layer of the network divides into so many parts.
    """

    def __init__(self, seed: int) -> None:
        self.rng = rng = np.random.default_rng(seed)
        self.tensor = int(rng.integers(2, 4))
        self.seq, self.depth = int(rng.integers(2, 6)), int(rng.integers(1, 4))
        self.heads = self.tensor * int(rng.integers(1, 3))
        self.width = int(rng.integers(3, 9))
        self.places = self.one_of(None, rng.integers(0, 1 << 20, 8))  # constant indices of a table
        self.layers = [self.layer(f"l{i}") for i in range(int(rng.integers(1, 4)))]

    def one_of(self, *choices: Any) -> Any:
        """One of some."""
        return choices[self.rng.integers(len(choices))]

    def matrix(self, name: str, rows: int, columns: int) -> Callable[[Tensor], Tensor]:
        """A product with a weight, which is stored as either of its factors' orders, and mostly a bias."""
        turned, bias = self.one_of(True, False), self.one_of(True, True, False)
        init = fp.graph.Normal(0.3)

        def product(x: Tensor) -> Tensor:
            shape = (columns, rows) if turned else (rows, columns)
            w = nn.parameter(f"{name}.weight", shape, init=init)
            y = x @ (w.T if turned else w)
            return y + nn.parameter(f"{name}.bias", (columns,), init=init) if bias else y

        return product

    def layer(self, name: str) -> Layer:
        """Of one kind, maybe normalised before, maybe added behind."""
        kind = self.one_of(self.dense, self.gated, self.attention, self.attention)
        inner, norm, add = kind(name), self.one_of(True, False), self.one_of(True, False)

        def layer(x: Tensor, mask: Tensor) -> Tensor:
            y = inner(nn.layer_norm(x, name=f"{name}.norm") if norm else x, mask)
            return x + y if add else y

        return layer

    def dense(self, name: str) -> Layer:
        """Two products."""
        features = self.tensor * int(self.rng.integers(1, 5))
        up, down = self.matrix(f"{name}.up", self.width, features), self.matrix(f"{name}.down", features, self.width)
        act = self.one_of(nn.gelu, nn.relu, nn.silu, np.tanh, lambda x: x * x)
        way = self.one_of("plain", "turned", "flat")

        def layer(x: Tensor, mask: Tensor) -> Tensor:
            y = act(up(x.reshape(-1, self.width) if way == "flat" else x))
            if way == "turned":
                y = np.transpose(act(np.transpose(y, (2, 0, 1))), (1, 2, 0))
            return down(y).reshape(x.shape)

        return layer

    def gated(self, name: str) -> Layer:
        """Three products, or two of which one makes both factors."""
        features, packed = self.tensor * int(self.rng.integers(1, 4)), self.one_of(True, False)
        down = self.matrix(f"{name}.down", features, self.width)
        if packed:
            both = self.matrix(f"{name}.both", self.width, 2 * features)
            return lambda x, mask: down(nn.glu(both(x)))
        up, gate = (self.matrix(f"{name}.{way}", self.width, features) for way in ("up", "gate"))
        return lambda x, mask: down(up(x) * nn.silu(gate(x)))

    def attention(self, name: str) -> Layer:
        """By heads."""
        heads, depth, seq = self.heads, self.depth, self.seq
        inner, order = heads * depth, self.one_of("slices", "axis", "by head", "apart")
        fused, last, masked, sloped = (self.one_of(True, False) for _ in range(4))
        slopes = self.rng.standard_normal((heads, seq, seq)).astype(np.float32)  # a constant, by head
        down = self.matrix(f"{name}.down", inner, self.width)
        apart = [self.matrix(f"{name}.{way}", self.width, inner) for way in "qkv"] if order == "apart" else []
        packed = self.matrix(f"{name}.qkv", self.width, 3 * inner) if order != "apart" else None

        def qkv(x: Tensor) -> Sequence[Tensor]:
            """Each of [batch, seq, heads, depth]."""
            batch = x.shape[0]
            if packed is None:
                return [each(x).reshape(batch, seq, heads, depth) for each in apart]
            y = packed(x)
            if order == "slices":
                return [y[..., i * inner : (i + 1) * inner].reshape(batch, seq, heads, depth) for i in range(3)]
            if order == "axis":
                y = np.transpose(y.reshape(batch, seq, 3, heads, depth), (2, 0, 1, 3, 4))
                return [y[i] for i in range(3)]
            y = y.reshape(batch, seq, heads, 3, depth)
            return [y[:, :, :, i] for i in range(3)]

        def layer(x: Tensor, mask: Tensor) -> Tensor:
            q, k, v = qkv(x)
            if fused and last:
                o = nn.attention(q, k, v, causal=masked, heads_last=True)
            else:
                q, k, v = (np.transpose(each, (0, 2, 1, 3)) for each in (q, k, v))
                if fused:
                    o = nn.attention(q, k, v, causal=masked)
                else:
                    scores = q @ k.mT / np.sqrt(np.float32(depth))
                    scores = scores + slopes if sloped else scores
                    o = nn.softmax(scores + mask if masked else scores) @ v
                o = np.transpose(o, (0, 2, 1, 3))
            return down(o.reshape(x.shape[0], seq, inner))

        return layer

    def build(self, batch: int) -> Graph:
        """The network."""

        def model(x: Tensor, mask: Tensor) -> dict[str, Tensor]:
            if self.places is not None:
                rows = self.tensor * self.seq * 2
                table = nn.parameter("places", (rows, self.width), init=fp.graph.Normal(1.0))
                x = x + table.take(self.places[: self.seq] % rows, axis=0)
            for layer in self.layers:
                x = layer(x, mask)
            return {"y": x}

        shape = (batch, self.seq, self.width)
        return fp.trace(model, fp.spec(shape), fp.spec((batch, self.heads, self.seq, self.seq)))


@pytest.mark.parametrize("seed", range(pick(6, 9, 40)))
def test_drawn_networks(seed: int) -> None:
    drawn = Draw(seed)
    batches, ranks = 4, drawn.tensor * (1 + seed % 2)
    options = {"loss": fp.losses.mse, "target": "numpy" if seed % 3 else "cpu:threads=1"}
    (alone,) = trained(drawn.build, optim.Momentum(0.002), 1, batches, **options)
    found = trained(drawn.build, optim.Momentum(0.002), ranks, batches, tensor=drawn.tensor, **options)
    assert_close(found[0], alone)
    for each in found[1:]:
        assert_same(each, found[0])
        assert each.log == found[0].log


@pytest.mark.parametrize("seed", range(40))
def test_all_products_are_in_parts(seed: int) -> None:
    """However a layer is written."""
    drawn = Draw(seed)
    options = Options(fp.losses.mse, optim.SGD(0.1), target="numpy")
    seen = []

    def watch(ran: Any) -> None:
        if ran.entry.name == "fuse_attention":
            seen.append(regions_of(ran.graph, drawn.tensor))

    graphs_of_step(drawn.build(2), options, watch)
    assert seen[0].products and not seen[0].whole
