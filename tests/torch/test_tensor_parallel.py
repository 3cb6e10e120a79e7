"""Parts of products on two ranks beside PyTorch on one, for transformers as they are exported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make setup-torch")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: make setup-torch")

import foreplan as fp  # noqa: E402
from tests.ranks.threads import Thread, run  # noqa: E402

nn = torch.nn
STEPS, BATCH, SEQ, WORDS = 3, 2, 6, 20
SMALL = {"vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "use_cache": False}
LLAMA = SMALL | {"intermediate_size": 48, "num_key_value_heads": 2, "pad_token_id": None}


class Encoder(nn.Module):
    """PyTorch's own layers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, WORDS)

    def forward(self, ids: Any) -> Any:
        return self.head(self.layers(self.table(ids)))


class Logits(nn.Module):
    """What a language model of transformers gives."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids: Any) -> Any:
        return self.inner(ids).logits


def phi3() -> Any:
    """Queries, keys and values in one product, and gate and up in one."""
    return Logits(transformers.Phi3ForCausalLM(transformers.Phi3Config(**LLAMA | {"num_key_value_heads": 4})))


def neox() -> Any:
    """Queries, keys and values of each head side by side."""
    return Logits(transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**SMALL, intermediate_size=48)))


def gpt2() -> Any:
    """Weights that lie transposed."""
    none = {f"{name}_pdrop": 0.0 for name in ("resid", "embd", "attn")}
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=16, n_embd=32, n_layer=2, n_head=4, use_cache=False, **none
    )
    return Logits(transformers.GPT2LMHeadModel(config))


def qwen3() -> Any:
    """Queries and keys normalised by head, and two heads of keys."""
    return Logits(transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**LLAMA, head_dim=8)))


@pytest.mark.parametrize("make", [Encoder, phi3, neox, gpt2, qwen3])
def test_two_ranks_train_as_pytorch_does(make: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    module = make().train()
    rng = np.random.default_rng(0)
    batches = [tuple(rng.integers(0, WORDS, (2, BATCH, SEQ))) for _ in range(STEPS)]
    graph = fp.from_torch(module, torch.from_numpy(batches[0][0]))
    step = fp.compile(graph, fp.losses.cross_entropy, fp.optim.SGD(0.3), target="numpy", ranks=2, tensor=2)
    (note,) = [note for note in step.program.notes if note.startswith("tensor=2")]
    assert "whole" not in note, "all products are computed in parts"
    names = [slot.name for slot in step.program.required_inputs]

    def job(world: Thread) -> tuple[list[float], dict[str, Any]]:
        session = step.bind()
        losses = [session.step(dict(zip(names, batch))).loss for batch in batches]
        home = make()
        session.to_torch(home)
        return losses, home.state_dict()

    found = run(2, job)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.3)
    losses = []
    for ids, target in batches:
        logits = module(torch.from_numpy(ids))
        loss = nn.functional.cross_entropy(logits.reshape(-1, WORDS), torch.from_numpy(target).reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    for told, state in found:
        np.testing.assert_allclose(told, losses, rtol=2e-5)
        for name, weight in module.state_dict().items():
            np.testing.assert_allclose(state[name].numpy(), weight.numpy(), atol=2e-5, err_msg=name)
