"""A PyTorch module under a head of foreplan's own, beside the same in PyTorch: losses and weights of ten steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import foreplan as fp

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make setup-torch")
nn = torch.nn


class Backbone(nn.Module):
    """Convolutions with batch normalisation, and a head that is cut off."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(6, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        self.fc = nn.Linear(8, 5)

    def features(self, x: Any) -> Any:
        """[N, 8] for images [N, 3, 9, 9]."""
        return self.body(self.stem(x)).mean((2, 3))

    def forward(self, x: Any) -> Any:
        """Scores."""
        return self.fc(self.features(x))


@pytest.mark.parametrize("frozen", [(), ("stem",)])
@pytest.mark.parametrize("target", ["numpy", "cpu:threads=1"])
def test_ten_steps_of_an_imported_backbone_under_a_new_head(frozen: tuple[str, ...], target: str) -> None:
    torch.manual_seed(3)
    module, head = Backbone(), nn.Linear(8, 2)
    graph = fp.from_torch(module, torch.zeros(4, 3, 9, 9))
    cut = next(node.inputs[0].name for node in graph.nodes if node.op.name == "matmul")
    backbone = graph.until(cut)
    assert not any(value.name.startswith("fc") for value in backbone.stored)

    def model(x: fp.Tensor) -> fp.Tensor:
        weights = {"weight_init": head.weight.detach().numpy(), "bias_init": head.bias.detach().numpy()}
        return fp.nn.linear(backbone(x), 2, name="head", **weights)

    step = fp.compile(
        fp.trace(model, fp.spec((4, 3, 9, 9))), fp.losses.mse, fp.optim.SGD(0.1), target=target, freeze=list(frozen)
    )
    session = step.bind()
    for name in frozen:
        getattr(module, name).requires_grad_(False)
    trained = [w for part in (module.stem, module.body, head) for w in part.parameters() if w.requires_grad]
    optimizer = torch.optim.SGD(trained, 0.1)
    rng = np.random.default_rng(0)
    for _ in range(10):
        x, y = rng.normal(size=(4, 3, 9, 9)).astype(np.float32), rng.normal(size=(4, 2)).astype(np.float32)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(head(module.features(torch.from_numpy(x))), torch.from_numpy(y))
        loss.backward()
        optimizer.step()
        assert session.step({"x": x, "target": y}).loss == pytest.approx(loss.item(), rel=1e-4)
    for name, weight in module.named_parameters():
        if not name.startswith("fc"):
            np.testing.assert_allclose(session.parameters[name], weight.detach().numpy(), rtol=1e-3, atol=1e-5)
