"""Files of fresh modules, in which PyTorch's exporters merge what is equal: steps beside PyTorch's own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make setup-torch")
pytest.importorskip("onnxscript", reason="PyTorch's exporter is not installed: make setup-torch")

from torch import nn  # noqa: E402

import foreplan as fp  # noqa: E402
from tests.export.runtime import run  # noqa: E402
from tests.torch.exports import quiet  # noqa: E402

FORMS = {"dynamo": {"dynamo": True}, "torchscript": {"dynamo": False}}


class Encoder(nn.Module):
    """Layers that are copies of one another, and a head that is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(16)

    def forward(self, ids: Any) -> Any:
        """Scores of the words at each place."""
        return self.norm(self.layers(self.embed(ids))) @ self.embed.weight.t()


class Decoder(nn.Module):
    """Layers with attention to a memory, whose matrices are read in parts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        layer = nn.TransformerDecoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
        self.layers, self.head = nn.TransformerDecoder(layer, 2), nn.Linear(16, 11)

    def forward(self, ids: Any) -> Any:
        """Scores of the words at each place."""
        x = self.embed(ids)
        return self.head(self.layers(x, x.flip(1)))


class Shared(nn.Module):
    """One layer that is called twice by two names, a copy of it, and weights of two layers that are tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.first = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16))
        self.again, self.apart = self.first, copy.deepcopy(self.first)
        self.left, self.right = nn.Linear(16, 16, bias=False), nn.Linear(16, 16)
        self.right.weight = self.left.weight
        self.head = nn.Linear(16, 11)

    def forward(self, ids: Any) -> Any:
        """Scores of the words at each place."""
        x = self.apart(torch.tanh(self.again(torch.tanh(self.first(self.embed(ids))))))
        return self.head(torch.tanh(self.right(torch.tanh(self.left(x)))))


@pytest.mark.parametrize(
    "make, form",
    [
        (Encoder, "dynamo"),
        (Encoder, "torchscript"),
        (Shared, "dynamo"),
        (Shared, "torchscript"),
        (Decoder, "dynamo"),
        (Decoder, "torchscript"),
    ],
)
def test_what_is_equal_in_a_fresh_module_is_trained_as_pytorch_trains_it(
    make: Callable[[], Any], form: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    module, ids = make(), torch.arange(24).reshape(4, 6) % 11
    with quiet():
        torch.onnx.export(module.train(), (ids,), tmp_path / "model.onnx", **FORMS[form])
    (name,) = (value.name for value in onnx.load(tmp_path / "model.onnx").graph.input)
    graph = fp.from_onnx(tmp_path / "model.onnx")
    assert sum(value.type.size for value in graph.parameters) == sum(each.numel() for each in module.parameters())
    session = fp.compile(graph, fp.losses.cross_entropy, fp.optim.SGD(0.5)).bind()
    optimizer, target = torch.optim.SGD(module.parameters(), lr=0.5), (ids * 5 + 1) % 11
    for _ in range(6):
        loss = nn.functional.cross_entropy(module(ids).flatten(0, 1), target.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found = session.step({name: ids.numpy(), "target": target.numpy()})
        assert found.loss == pytest.approx(loss.item(), rel=2e-4)
    state = {key: value.detach().numpy() for key, value in module.state_dict().items()}
    by_name = {value.name for value in graph.parameters} & state.keys()
    assert len(by_name) > len(graph.parameters) // 2
    for key in by_name:
        np.testing.assert_allclose(session.parameters[key], state[key], rtol=5e-3, atol=2e-4, err_msg=key)
    session.to_onnx(tmp_path / "trained.onnx")
    (found,) = run(tmp_path / "trained.onnx", {name: ids.numpy()}).values()
    np.testing.assert_allclose(found, module(ids).detach().numpy(), rtol=5e-3, atol=2e-3)
