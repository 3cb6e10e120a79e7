"""`Session.evaluate` and smaller batches of `Session.step`, beside `eval()` and a training loop with a last batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make setup-torch")

import foreplan as fp  # noqa: E402
from tests.profile import values  # noqa: E402

F, tnn = torch.nn.functional, torch.nn
BATCH = 8


class Called(tnn.Module):
    """A module of a function and of modules that it calls."""

    def __init__(self, call: Callable[..., Any], *modules: Any) -> None:
        super().__init__()
        self.call, self.m = call, tnn.ModuleList(modules)

    def forward(self, x: Any) -> Any:
        return self.call(self, x)


class Tokens(tnn.Module):
    """A transformer with a token of its own before the others, expanded to the batch."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding, self.head = tnn.Embedding(20, 16), tnn.Linear(16, 3)
        self.first = tnn.Parameter(torch.randn(1, 1, 16))
        self.layer = tnn.TransformerEncoderLayer(16, 4, 32, dropout, batch_first=True)

    def forward(self, x: Any) -> Any:
        y = self.embedding(x)
        y = torch.cat([self.first.expand(y.shape[0], -1, -1), y], 1)
        return self.head(self.layer(y)[:, 0])


def images(count: int) -> Any:
    return torch.randn(count, 1, 8, 8)


def rows(count: int) -> Any:
    return torch.randn(count, 4, 6)


MODULES: dict[str, tuple[Callable[[], Any], Callable[[int], Any]]] = {
    "convolutions": (
        lambda: tnn.Sequential(
            *(tnn.Conv2d(1, 4, 3, padding=1, bias=False), tnn.BatchNorm2d(4), tnn.ReLU(), tnn.MaxPool2d(2)),
            *(tnn.Flatten(), tnn.Linear(64, 3)),
        ),
        images,
    ),
    "groups": (
        lambda: tnn.Sequential(
            *(tnn.Conv2d(1, 4, 3), tnn.GroupNorm(2, 4), tnn.SiLU(), tnn.ConvTranspose2d(4, 2, 2, 2)),
            *(tnn.AdaptiveAvgPool2d(1), tnn.Flatten(), tnn.Linear(2, 3)),
        ),
        images,
    ),
    "tokens": (Tokens, lambda count: torch.randint(0, 20, (count, 6))),
    "lstm": (
        lambda: Called(lambda s, x: s.m[1](s.m[0](x)[0][:, -1]), tnn.LSTM(6, 8, 2, batch_first=True), tnn.Linear(8, 3)),
        rows,
    ),
    "lstm, tokens first": (
        lambda: Called(lambda s, x: s.m[1](s.m[0](x)[0][-1]), tnn.LSTM(6, 8), tnn.Linear(8, 3)),
        lambda count: torch.randn(4, count, 6),
    ),
    "sizes": (lambda: Called(lambda s, x: s.m[0](x.view(x.size(0), -1)), tnn.Linear(24, 3)), rows),
}


def made(name: str) -> tuple[Any, Any, str, Callable[[int], Any]]:
    """A module in training mode, its graph, its input's name, and what draws inputs."""
    torch.manual_seed(0)
    make, draw = MODULES[name]
    module = make().train()
    graph = fp.from_torch(module, draw(BATCH))
    return module, graph, graph.inputs[0].name, draw


@pytest.mark.parametrize("name", values(MODULES))
def test_a_loop_with_a_smaller_last_batch(name: str) -> None:
    module, graph, x, draw = made(name)
    session = fp.compile(graph, fp.losses.cross_entropy, fp.optim.AdamW(1e-2, weight_decay=0.01), target="numpy").bind()
    optimizer = torch.optim.AdamW(module.parameters(), 1e-2, weight_decay=0.01)
    for count in (BATCH, BATCH, 5, BATCH, 3):
        given, target = draw(count), torch.randint(0, 3, (count,))
        loss = F.cross_entropy(module(given), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert session.step({x: given, "target": target}).loss == pytest.approx(loss.item(), rel=2e-3, abs=1e-4)


@pytest.mark.parametrize(("name", "target"), values(MODULES, ["numpy", "cpu:threads=1"]))
def test_it_is_what_eval_gives(name: str, target: str) -> None:
    module, graph, x, draw = made(name)
    session = fp.compile(graph, fp.losses.cross_entropy, fp.optim.SGD(0.1), target=target).bind()
    session.step({x: draw(BATCH), "target": torch.randint(0, 3, (BATCH,))})
    session.to_torch(module)
    module.eval()
    for count in (BATCH, 3, 1):
        given, labels = draw(count), torch.randint(0, 3, (count,))
        labels[:1] = -100 if count > 1 else labels[:1]
        with torch.no_grad():
            scores = module(given)
        result = session.evaluate({x: given, "target": labels}, metrics=["accuracy"])
        (output,) = result.outputs.values()
        np.testing.assert_allclose(output, scores.numpy(), rtol=1e-3, atol=1e-4)
        assert result.loss == pytest.approx(F.cross_entropy(scores, labels).item(), rel=1e-3)
        counted = labels != -100
        right = (scores.argmax(1) == labels)[counted].float().mean().item()
        assert result.metrics["accuracy"] == pytest.approx(right, abs=1e-6)


def test_dropout_is_off_and_training_keeps_it() -> None:
    torch.manual_seed(0)
    module = Tokens(dropout=0.5).train()
    graph = fp.from_torch(module, torch.randint(0, 20, (BATCH, 6)))
    session = fp.compile(graph, fp.losses.cross_entropy, fp.optim.SGD(0.0), target="numpy").bind()
    given, labels = torch.randint(0, 20, (BATCH, 6)), torch.randint(0, 3, (BATCH,))
    batch = {graph.inputs[0].name: given, "target": labels}
    losses = {session.step(batch).loss for _ in range(4)}
    module.eval()
    with torch.no_grad():
        expected = F.cross_entropy(module(given), labels).item()
    assert session.evaluate(batch).loss == pytest.approx(expected, rel=1e-4)
    assert len(losses) == 4 and expected not in losses
