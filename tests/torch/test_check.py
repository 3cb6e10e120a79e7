"""Modules are held against PyTorch while they are imported: what is right passes, and what is wrong is named."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make setup-torch")

from torch import nn  # noqa: E402

import foreplan as fp  # noqa: E402
from foreplan.compiler import modules  # noqa: E402
from foreplan.frontend.torch import table  # noqa: E402
from tests.profile import few  # noqa: E402
from tests.torch.modules import MODULES  # noqa: E402

SOME = ("resnet, basic blocks", "gpt, tied", "lstm", "mlp with selu", "mlp with spectral norm", "autoencoder", "clip")


@pytest.mark.parametrize("name", few(list(MODULES), [i for i, name in enumerate(MODULES) if name in SOME]))
def test_modules_as_they_are_made_pass(name: str) -> None:
    torch.manual_seed(0)
    module, inputs = MODULES[name]()
    before = {key: tensor.clone() for key, tensor in module.state_dict().items()}
    fp.from_torch(module, *inputs, check=True)
    assert all(torch.equal(tensor, before[key]) for key, tensor in module.state_dict().items())
    assert all(weight.grad is None for weight in module.parameters())


class Net(nn.Module):
    """Two outputs, one of whole numbers; dropout where it is wanted."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.a, self.drop, self.b = nn.Linear(4, 5), nn.Dropout(p), nn.Linear(5, 3)

    def forward(self, x: Any) -> Any:
        """Scores, and the best class."""
        scores = self.b(self.drop(torch.tanh(self.a(x))))
        return {"scores": scores, "best": scores.argmax(1)}


def with_entry(monkeypatch: pytest.MonkeyPatch, name: str, handler: Any) -> None:
    entry = table.table()[name]
    monkeypatch.setitem(table._TABLE, name, dataclasses.replace(entry, handler=handler))


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_an_output_that_is_wrong_is_named(monkeypatch: pytest.MonkeyPatch, p: float) -> None:
    right = table.table()["tanh"].handler
    with_entry(monkeypatch, "tanh", lambda c, x: right(c, x) * 1.02)
    mode = "evaluation" if p else "training"
    message = rf"Net: the output 'scores' is off PyTorch's by [0-3]\.\d+% of its largest number, .* in {mode} mode"
    with pytest.raises(fp.ModelError, match=message):
        fp.from_torch(Net(p), torch.randn(6, 4), check=True)
    fp.from_torch(Net(p), torch.randn(6, 4), check=False)


def test_a_gradient_that_is_wrong_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    right = table.table()["tanh"].handler
    with_entry(monkeypatch, "tanh", lambda c, x: fp.stop_gradient(right(c, x)))
    with pytest.raises(fp.ModelError, match=r"the gradient of 'a\.weight' is off PyTorch's by 100\.00%"):
        fp.from_torch(Net(), torch.randn(6, 4), check=True)


def test_what_is_checked_where_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    monkeypatch.setattr(modules, "check_beside_torch", lambda *args: found.append(args))
    fp.from_torch(Net(), torch.randn(6, 4))
    assert not found
    monkeypatch.setattr(modules, "MOST_CHECKED", 44)
    fp.from_torch(Net(), torch.randn(6, 4))
    fp.from_torch(nn.Linear(5, 8), torch.randn(6, 5))
    assert len(found) == 1
    with pytest.raises(fp.UsageError, match="check"):
        fp.from_torch(Net(), torch.randn(6, 4), check="yes")  # type: ignore[arg-type]


class Bumpy(nn.Module):
    """A small difference of its weight decides on everything: rounding alone makes other gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a = nn.BatchNorm1d(64), nn.Linear(64, 64)

    def forward(self, x: Any) -> Any:
        """Of two samples, whose normalised difference is a sign."""
        for _ in range(4):
            x = self.norm(self.a(x))
        return x * 1000


def test_what_rounding_makes_of_a_module_is_let_pass() -> None:
    torch.manual_seed(0)
    fp.from_torch(Bumpy(), torch.randn(2, 64), check=True)


def test_a_module_that_is_not_checked_for_its_size_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for most, said in ((44, []), (43, ["not held against PyTorch, since it has 43 numbers: check=True does so"])):
        monkeypatch.setattr(modules, "MOST_CHECKED", most)
        graph = fp.from_torch(Net(), torch.randn(6, 4))
        assert list(graph.notes) == said
        assert all(note in fp.compile(graph, target="numpy").program.notes for note in said)
    assert not fp.from_torch(Net(), torch.randn(6, 4), check=False).notes
