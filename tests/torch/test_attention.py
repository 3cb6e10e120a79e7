"""Attention of PyTorch models, with and without masks: one op that never holds all scores, and PyTorch's results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make setup-torch")

import foreplan as fp  # noqa: E402
from foreplan.ops.attention.ops import Attention  # noqa: E402
from tests.frontend.judged import close  # noqa: E402

POSITIONS, WIDTH, HEADS = 160, 32, 2


class Layer(torch.nn.Module):  # type: ignore[misc, name-defined]
    """Self-attention as PyTorch's users write it."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal, self.qkv = causal, torch.nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Any, mask: Any = None) -> Any:
        q, k, v = (
            part.unflatten(-1, (HEADS, WIDTH // HEADS)).transpose(1, 2) for part in self.qkv(x).split(WIDTH, dim=-1)
        )
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.causal)
        return y.transpose(1, 2).flatten(2)


def ops(step: fp.Compiled, name: str) -> list[Any]:
    return [node.op for node in step.graph.nodes if node.op.name == name]


def mask_of(kind: str) -> Any:
    """Of all queries, one of which reads no key; or of keys, of which the last are padding."""
    generator = torch.Generator().manual_seed(0)
    if kind == "of keys":
        return torch.arange(POSITIONS)[None, None, None] < torch.tensor([100, 160])[:, None, None, None]
    mask = torch.rand(2, 1, POSITIONS, POSITIONS, generator=generator) > 0.3
    mask[:, :, 7] = False
    return mask if kind == "of truths" else torch.where(mask, 0.0, -torch.inf)


@pytest.mark.parametrize("kind", ["none", "causal", "of truths", "of keys", "of numbers"])
def test_one_op_and_the_same_gradients(kind: str) -> None:
    torch.manual_seed(0)
    module, x = Layer(kind == "causal"), torch.randn(2, POSITIONS, WIDTH)
    given = (x,) if kind in ("none", "causal") else (x, mask_of(kind))
    graph = fp.from_torch(module, *given)
    step = fp.compile(graph, fp.losses.mse, fp.optim.SGD(1.0))
    (op,) = ops(step, "attention")
    assert isinstance(op, Attention) and op.causal == (kind == "causal") and not ops(step, "softmax")
    target = torch.randn(2, POSITIONS, WIDTH)
    data = {value.name: tensor.numpy() for value, tensor in zip(graph.inputs, given)} | {"target": target.numpy()}
    session = step.bind()
    before = {name: np.array(value) for name, value in session.parameters.items()}
    loss = session.step(data).loss
    expected = torch.nn.functional.mse_loss(module(*given), target)
    expected.backward()
    close(np.float32(loss), expected.detach().numpy(), "loss")
    for name, weight in module.named_parameters():
        close(before[name] - session.parameters[name], weight.grad.numpy(), name)
