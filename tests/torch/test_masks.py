"""Masks that are known while a module is imported: kept once for all samples, and not at all where places say them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make setup-torch")
from torch import nn  # noqa: E402

import foreplan as fp  # noqa: E402
from foreplan.frontend.torch.masks import compact, diagonals  # noqa: E402
from foreplan.graph import Kind  # noqa: E402
from foreplan.ops.attention.ops import Attention  # noqa: E402
from foreplan.ops.expr import Arg  # noqa: E402
from foreplan.ops.map import Map  # noqa: E402
from tests.frontend.judged import close  # noqa: E402
from tests.ops.check import run_op  # noqa: E402
from tests.profile import few  # noqa: E402

POSITIONS, HEADS = 160, 2


def constants(graph: fp.Graph) -> dict[str, int]:
    """Bytes of each that is no number."""
    return {x.name: x.type.nbytes for x in graph.stored if x.kind is Kind.CONSTANT and x.type.size > 1}


@pytest.mark.parametrize("dropout", few([0.0, 0.1]))
def test_gpt2_with_eager_attention_stores_no_mask_whatever_the_batch(dropout: float) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: make setup-torch")
    sizes = {"vocab_size": 61, "n_positions": POSITIONS, "n_embd": 16, "n_layer": 2, "n_head": HEADS}
    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": dropout}
    config = transformers.GPT2Config(**sizes, **dropouts, use_cache=False, bos_token_id=0, eos_token_id=0)
    model = transformers.GPT2LMHeadModel._from_config(config, attn_implementation="eager")
    for batch in (1, 3):
        graph = fp.from_torch(model, torch.randint(1, 61, (batch, POSITIONS)), check=True)
        assert sorted(constants(graph).values()) == [4 * POSITIONS, 4 * POSITIONS, 8 * POSITIONS]  # the last are ids
        step = fp.compile(graph, "cross_entropy", fp.optim.SGD(0.1), target="numpy")
        ops = [node.op for node in step.graph.nodes if isinstance(node.op, Attention)]
        assert [op.causal for op in ops] == ([] if dropout else [True, True])
        assert sum(constants(step.graph).values()) <= 16 * POSITIONS + 64


MASKS: dict[str, Any] = {
    "causal": lambda ahead: ahead <= 0,
    "window": lambda ahead: (ahead <= 0) & (ahead > -20),
    "both ways": lambda ahead: abs(ahead) < 9,
    "not itself": lambda ahead: ahead != 0,
    "the last": lambda ahead: ahead >= 100,
}


class Attending(nn.Module):
    """Attention with a mask of places that it makes in one of the usual ways."""

    def __init__(self, mask: str, way: str) -> None:
        super().__init__()
        self.mask, self.way, self.qkv = MASKS[mask], way, nn.Linear(8, 3 * 8)

    def forward(self, x: Any) -> Any:
        """[B, T, 8]."""
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).split(8, dim=-1))
        places = torch.arange(x.shape[1])
        seen = self.mask(places - places[:, None])[None, None].expand(len(x), 1, -1, -1)
        added = torch.where(seen, 0.0, torch.finfo(torch.float32).min).to(x.dtype)
        if self.way == "one op":
            return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        if self.way == "one op, numbers":
            return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=added)
        scores = q @ k.mT * 0.5
        if self.way == "added":
            scores = scores + added
        elif self.way == "filled":
            scores = scores.masked_fill(~seen, -1e9)
        else:
            scores = torch.where(seen, scores, -1e9)
        return torch.tanh(scores).sum(1) if self.way == "chosen" else scores.softmax(-1) @ v


PAIRS = [(mask, way) for mask in MASKS for way in ("added", "filled", "chosen", "one op", "one op, numbers")]


# Of a query that reads no key, PyTorch's own kernel gives a gradient that is not that of what it computes.
@pytest.mark.parametrize(("mask", "way"), few([x for x in PAIRS if x != ("the last", "one op, numbers")], (0, 6, 7)))
def test_masks_of_diagonals_are_not_stored(mask: str, way: str) -> None:
    module, x = Attending(mask, way), torch.randn(2, POSITIONS, 8)
    graph = fp.from_torch(module, x, check=True)
    assert sum(constants(graph).values()) <= 12 * POSITIONS
    step = fp.compile(graph, fp.losses.mean, fp.optim.SGD(1.0), target="numpy")
    session = step.bind()
    before = {name: np.array(value) for name, value in session.parameters.items()}
    session.step({value.name: x.numpy() for value in graph.inputs})
    module(x).mean().backward()
    for name, weight in module.named_parameters():
        close(before[name] - session.parameters[name], weight.grad.numpy(), name)


@pytest.mark.parametrize("dtype", ["float32", "bool", "int64", "float16"])
def test_diagonals_are_found_and_nothing_else_is(dtype: str) -> None:
    rng = np.random.default_rng(0)
    for _ in range(60):
        rows, columns = rng.integers(32, 70, 2)
        low, high = sorted(rng.integers(1 - rows, columns, 2))
        ahead = np.arange(columns) - np.arange(rows)[:, None]
        array = np.where((ahead >= low) & (ahead <= high), 1, 0).astype(dtype)[None]
        found = diagonals(array)
        if array.all():
            assert found is None
            continue
        assert found is not None
        expr = found.expr(*(Arg(i) for i in range(len(found.operands))))
        np.testing.assert_array_equal(run_op(Map((str(expr),)), *found.operands)[0], array)
        place = 0, rows // 2, columns // 2
        array[place] = not array[place]
        assert diagonals(array) is None or low == high == columns // 2 - rows // 2


@pytest.mark.parametrize("way", ["added", "one op, numbers"])
def test_masks_of_double_precision(way: str) -> None:
    module, x = Attending("window", way).double(), torch.randn(2, POSITIONS, 8).double()
    graph = fp.from_torch(module, x)
    (found,) = fp.compile(graph, target="numpy").bind().step({"x": x.numpy()}).outputs.values()
    np.testing.assert_allclose(found, module(x).detach(), rtol=1e-9, atol=1e-12)


def test_what_is_equal_to_the_bit_is_kept_once() -> None:
    grid = np.arange(12, dtype=np.float32).reshape(1, 3, 4)
    assert compact(np.broadcast_to(grid, (5, 3, 4))).shape == (1, 3, 4)
    assert compact(np.full((3, 4), 2.0)).shape == (1, 1)
    assert compact(np.array([[0.0], [-0.0]])).shape == (2, 1) and compact(np.zeros((0, 3))).shape == (0, 3)
    assert compact(np.array([[np.nan], [np.nan]])).shape == (1, 1)
    assert (
        diagonals(np.arange(5000) < 3000) is None
        and compact(np.array(3.0)).shape == ()
        and compact(np.arange(4)[None, ::2]).tolist() == [[0, 2]]
    )


def test_a_known_tensor_that_is_the_same_for_all_samples_is_stored_for_one() -> None:
    class Placed(nn.Linear):
        def forward(self, x: Any) -> Any:
            table = torch.sin(torch.arange(12.0).reshape(3, 4)).expand(len(x), 3, 4).clone()
            return super().forward(x) + table

    x = torch.randn(5, 3, 4)
    graph = fp.from_torch(Placed(4, 4), x, check=True)
    assert list(constants(graph).values()) == [4 * 12]
