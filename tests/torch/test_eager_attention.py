"""A step counted from a graph beside the module's own, with attention that PyTorch has one op for."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make setup-torch")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: make setup-torch")

import foreplan as fp  # noqa: E402
from tests.profile import few  # noqa: E402

SIZES = {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "attention_dropout": 0.0, "hidden_dropout_prob": 0.0}
SIZES |= {"attention_probs_dropout_prob": 0.0, "use_cache": False, "bos_token_id": 0, "eos_token_id": 0}
NETWORKS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "n_embd": 64, "n_layer": 2,
             "n_head": 4}),
    "llama": ("LlamaForCausalLM", {"num_key_value_heads": 2}),
    "bert": ("BertForMaskedLM", {}),
    "opt": ("OPTForCausalLM", {"dropout": 0.0, "ffn_dim": 128, "word_embed_proj_dim": 64}),
    "gpt_neox": ("GPTNeoXForCausalLM", {}),
    "qwen2": ("Qwen2ForCausalLM", {"num_key_value_heads": 2}),
}  # fmt: skip


class Logits(torch.nn.Module):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Any) -> Any:
        return self.model(input_ids=input_ids, use_cache=False).logits


def built(name: str, **more: Any) -> tuple[torch.nn.Module, torch.Tensor]:
    kind, sizes = NETWORKS[name]
    config = transformers.AutoConfig.for_model(name, **SIZES | sizes)
    return Logits(getattr(transformers, kind)._from_config(config, **more)), torch.randint(1, 100, (2, 64))


@pytest.mark.parametrize("name", few(list(NETWORKS), (0, 1)))
def test_of_transformers(name: str) -> None:
    module, tokens = built(name)
    own = fp.eager_memory(module, tokens, loss="cross_entropy", optimizer=fp.optim.AdamW(1e-3))
    step = fp.compile(fp.from_torch(module, tokens), "cross_entropy", fp.optim.AdamW(1e-3), target="numpy")
    assert step.as_pytorch().eager.peak == pytest.approx(own.peak, rel=0.006)


def test_attention_that_the_author_writes_out() -> None:
    module, tokens = built("gpt2", attn_implementation="eager")
    own = fp.eager_memory(module, tokens, loss="cross_entropy", optimizer=fp.optim.AdamW(1e-3))
    step = fp.compile(fp.from_torch(module, tokens), "cross_entropy", fp.optim.AdamW(1e-3), target="numpy")
    places = 2 * 64 * 4  # of queries and keys, which the graph has in the place of a mask
    assert step.as_pytorch(attention="eager").eager.peak == own.peak + places
    assert step.as_pytorch().eager.peak < 0.96 * own.peak
