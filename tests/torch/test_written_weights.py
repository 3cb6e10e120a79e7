"""Trained weights that forward writes, as embeddings of a largest norm and clamped weights do, beside PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make setup-torch")

from torch import nn  # noqa: E402

import foreplan as fp  # noqa: E402
from foreplan.base.errors import UnsupportedError  # noqa: E402
from tests.torch.beside import Squares, feeds  # noqa: E402
from tests.torch.two import Two, X  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


class Clamped(Two):
    """Within limits, as critics of Wasserstein GANs are (arXiv:1701.07875)."""

    def between(self, y: Any) -> Any:
        """The second layer's weights change after the first one's are read."""
        with torch.no_grad():
            self.second.weight.clamp_(-0.2, 0.2)
        return y


class Scaled(Two):
    """By its norm, and read before and after."""

    def forward(self, x: Any) -> Any:
        """Two numbers a row."""
        self.first.weight.data.div_(self.first.weight.data.norm())
        return self.second(self.first(torch.tanh(self.first(x))))


class Bounded(nn.Module):
    """Rows of a largest norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.table, self.head = nn.Embedding(5, 3, max_norm=0.7), nn.Linear(3, 2)

    def forward(self, x: Any) -> Any:
        """Words come from signs."""
        return self.head(self.table((x > 0).long().sum(1)))


OPTIMIZERS: dict[str, tuple[Any, Callable[..., Any]]] = {
    "sgd": (fp.optim.Momentum(0.1, 0.9), lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)),
    "adamw": (fp.optim.AdamW(0.05, weight_decay=0.1), lambda p: torch.optim.AdamW(p, 0.05, weight_decay=0.1)),
    "clipped": (fp.optim.SGD(0.1, clip_norm=0.05), lambda p: torch.optim.SGD(p, 0.1)),
}


@pytest.mark.parametrize("kind", [Clamped, Scaled, Bounded])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_trains_as_in_pytorch(name: str, kind: Any) -> None:
    ours, theirs = Squares(kind()), Squares(kind())
    mine, make = OPTIMIZERS[name]
    graph = fp.from_torch(ours, X, check=True)
    session = fp.compile(graph, lambda output: output, mine).bind()
    optimizer = make(theirs.parameters())
    for _ in range(4):
        loss = theirs(X)
        optimizer.zero_grad()
        loss.backward()
        if name == "clipped":
            nn.utils.clip_grad_norm_(theirs.parameters(), 0.05)
        optimizer.step()
        assert session.step(feeds(graph, (X,), {})).loss == pytest.approx(loss.item(), rel=2e-5)
    for key, weight in theirs.state_dict().items():
        torch.testing.assert_close(torch.from_numpy(session.state_dict()[key]), weight, rtol=1e-4, atol=1e-6)


def test_micro_batches_each_write_it() -> None:
    ours, theirs = Clamped(), Clamped()
    graph = fp.from_torch(Squares(ours), X)
    session = fp.compile(graph, lambda output: output, fp.optim.SGD(0.1), accumulate=2).bind()
    optimizer, halves = torch.optim.SGD(theirs.parameters(), 0.1), torch.stack([X, X * 2])
    for _ in range(3):
        optimizer.zero_grad()
        for each in halves:
            (theirs(each).square().mean() / 2).backward()
        optimizer.step()
        session.step({graph.inputs[0].name: halves.numpy()})
    for key, weight in theirs.state_dict().items():
        found = torch.from_numpy(session.state_dict()[f"inner.{key}"])
        torch.testing.assert_close(found, weight, rtol=1e-4, atol=1e-6)


def test_frozen_and_in_inference() -> None:
    module = Clamped()
    graph = fp.from_torch(module, X)
    for frozen in (fp.from_torch(module, X, freeze=["second"]), graph):
        session = fp.compile(frozen, fp.losses.mean, fp.optim.SGD(0.1), freeze=["second"]).bind()
        session.step({"x": X.numpy()})
        limited = torch.from_numpy(session.state_dict()["second.weight"])
        torch.testing.assert_close(limited, module.second.weight.detach().clamp(-0.2, 0.2))
    found = fp.compile(graph).bind().step({"x": X.numpy()}).outputs["output"]
    torch.testing.assert_close(torch.from_numpy(found), module.eval()(X).detach())


@pytest.mark.parametrize("options", [{"ranks": 2, "shard": "state"}, {"ranks": 2, "shard": "parameters"}])
def test_parts_of_it_are_refused(options: dict[str, Any]) -> None:
    graph = fp.from_torch(Clamped(), X)
    with pytest.raises(UnsupportedError, match=r"the forward pass writes 'second\.weight'"):
        fp.compile(graph, fp.losses.mean, fp.optim.SGD(0.1), **options)


def test_a_narrow_one_is_refused() -> None:
    graph = fp.from_torch(Clamped().bfloat16(), X.bfloat16())
    with pytest.raises(UnsupportedError, match=r"'second\.weight'.*keep it in float32"):
        fp.compile(graph, fp.losses.mean, fp.optim.SGD(0.1))
