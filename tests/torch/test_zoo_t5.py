"""T5 beside transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make setup-torch")
modeling = pytest.importorskip(
    "transformers.models.t5.modeling_t5", reason="transformers is not installed: make setup-torch"
)

import foreplan as fp  # noqa: E402
from foreplan.models.t5 import position_buckets  # noqa: E402
from tests.torch.zoo import beside, drawn  # noqa: E402


def test_logits_and_gradients(tmp_path: Path) -> None:
    config = modeling.T5Config(
        vocab_size=40, d_model=24, d_kv=10, d_ff=56, num_layers=2, num_heads=3, dropout_rate=0.0, use_cache=False
    )
    module = drawn(modeling.T5ForConditionalGeneration(config))
    sizes = {"layers": 2, "width": 24, "heads": 3, "depth": 10, "features": 56, "vocabulary": 40}
    graph = fp.models.t5_small(batch=2, seq=37, decoder_seq=20, **sizes)
    rng = np.random.default_rng(0)
    inputs = {"tokens": rng.integers(0, 40, (2, 37)), "decoder_tokens": rng.integers(0, 40, (2, 20))}
    target = rng.integers(0, 40, (2, 20))
    target[1, 15:] = -100
    beside(
        graph, module, lambda module, x, y: module(input_ids=x, decoder_input_ids=y).logits, inputs, target, tmp_path
    )


@pytest.mark.parametrize("causal", [False, True])
def test_buckets_of_positions(causal: bool) -> None:
    distance = torch.arange(600)[None, :] - torch.arange(600)[:, None]
    wanted = modeling.T5Attention._relative_position_bucket(distance, bidirectional=not causal)
    assert (position_buckets(600, 600, causal) == wanted.numpy()).all()
