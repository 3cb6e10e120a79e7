"""The LSTM language model beside torch.nn.LSTM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make setup-torch")

import foreplan as fp  # noqa: E402
from tests.torch.zoo import beside, drawn  # noqa: E402


def logits(module: Any, tokens: Any) -> Any:
    return module["decoder"](module["rnn"](module["encoder"](tokens))[0])


def test_logits_and_gradients(tmp_path: Path) -> None:
    parts = {
        "encoder": torch.nn.Embedding(30, 12),
        "rnn": torch.nn.LSTM(12, 12, 2, batch_first=True),
        "decoder": torch.nn.Linear(12, 30),
    }
    graph = fp.models.lstm_lm(batch=3, seq=7, width=12, vocabulary=30)
    tokens = np.random.default_rng(0).integers(0, 30, (3, 8))
    inputs = {"tokens": tokens[:, :-1].copy()}
    beside(graph, drawn(torch.nn.ModuleDict(parts)), logits, inputs, tokens[:, 1:].copy(), tmp_path)
