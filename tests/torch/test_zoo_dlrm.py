"""DLRM of the zoo beside the paper's own, written again with PyTorch's modules, with the same weights."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make setup-torch")

from foreplan import models  # noqa: E402
from tests.torch.zoo import beside, drawn  # noqa: E402

nn = torch.nn


def perceptron(*widths: int) -> Any:
    """Linear layers with a ReLU behind each."""
    layers: list[Any] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers)


class DLRM(nn.Module):
    """`DLRM_Net` of dlrm_s_pytorch.py with the interaction "dot", up to the last sigmoid."""

    def __init__(self, dense: int, tables: int, rows: int, width: int, hidden: int) -> None:
        super().__init__()
        self.emb_l = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        self.bot_l = perceptron(dense, hidden, hidden // 2, hidden // 8, width)
        self.top_l = perceptron(width + (tables + 1) * tables // 2, hidden, hidden // 2, 1)[:-1]

    def forward(self, dense: Any, categories: Any) -> Any:
        """Logits."""
        offsets = torch.arange(len(dense))
        x = self.bot_l(dense)
        rows = [table(categories[:, i], offsets) for i, table in enumerate(self.emb_l)]
        vectors = torch.cat([x, *rows], 1).view(len(dense), -1, x.shape[1])
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        count = vectors.shape[1]
        first = torch.tensor([i for i in range(count) for _ in range(i)])
        second = torch.tensor([j for i in range(count) for j in range(i)])
        return self.top_l(torch.cat([x, products[:, first, second]], 1))


def test_dlrm(tmp_path: Path) -> None:
    sizes = {"dense": 4, "tables": 5, "rows": 30, "width": 8, "hidden": 32}
    rng = np.random.default_rng(1)
    inputs = {"dense": rng.standard_normal((6, 4)).astype(np.float32), "categories": rng.integers(0, 30, (6, 5))}
    target = rng.integers(0, 2, (6, 1)).astype(np.float32)
    graph = models.dlrm(batch=6, **sizes)
    beside(graph, drawn(DLRM(**sizes)), lambda m, x, c: m(x, c), inputs, target, tmp_path, "binary_cross_entropy")


def test_the_default_sizes() -> None:
    with torch.device("meta"):
        module = DLRM(13, 26, 10_000, 16, 512)
    shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    graph = models.dlrm()
    assert {value.name: value.shape for value in graph.parameters} == shapes
    assert sum(value.type.size for value in graph.parameters) == 4_635_985
