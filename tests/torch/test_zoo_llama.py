"""Llama beside transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="PyTorch is not installed: make setup-torch")
modeling = pytest.importorskip(
    "transformers.models.llama.modeling_llama", reason="transformers is not installed: make setup-torch"
)

import foreplan as fp  # noqa: E402
from foreplan.models.llama import frequencies  # noqa: E402
from tests.torch.zoo import beside, drawn  # noqa: E402

SIZES: dict[str, Any] = {"layers": 2, "width": 48, "features": 80, "vocabulary": 50, "heads": 6}


def config(kv_heads: int, tied: bool, rope: dict[str, Any]) -> Any:
    return modeling.LlamaConfig(
        vocab_size=SIZES["vocabulary"],
        hidden_size=SIZES["width"],
        intermediate_size=SIZES["features"],
        num_hidden_layers=SIZES["layers"],
        num_attention_heads=SIZES["heads"],
        num_key_value_heads=kv_heads,
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
        rope_parameters=rope,
    )


def stretched(factor: float) -> dict[str, Any]:
    further = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    return {"rope_type": "llama3", "rope_theta": 500000.0, "factor": factor, **further}


@pytest.mark.parametrize("kv_heads,tied", [(2, True), (6, False)])
def test_logits_and_gradients(kv_heads: int, tied: bool, tmp_path: Path) -> None:
    rope = stretched(32.0) if tied else {"rope_type": "default", "rope_theta": 10000.0}
    module = drawn(modeling.LlamaForCausalLM(config(kv_heads, tied, rope)))
    base, stretch = rope["rope_theta"], rope.get("factor", 1.0)
    graph = fp.models.llama(batch=2, seq=11, kv_heads=kv_heads, tied=tied, base=base, stretch=stretch, **SIZES)
    tokens = np.random.default_rng(0).integers(0, 50, (2, 12))
    inputs = {"tokens": tokens[:, :-1].copy()}
    beside(graph, module, lambda module, x: module(x).logits, inputs, tokens[:, 1:].copy(), tmp_path)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_frequencies_of_llama_3(factor: float) -> None:
    settings = config(6, True, stretched(factor))
    settings.head_dim = 64
    wanted = modeling.LlamaRotaryEmbedding(settings).inv_freq.numpy()
    np.testing.assert_allclose(frequencies(64, 500000.0, factor), wanted, rtol=1e-5)
