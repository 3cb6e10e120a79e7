"""Training mode and evaluation mode: one export serves both where nothing else differs, and two where anything does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make setup-torch")
from torch import nn  # noqa: E402

import foreplan as fp  # noqa: E402
from foreplan.frontend.torch import exporting  # noqa: E402
from foreplan.frontend.torch.modes import askers, has_one_form, in_mode, same_but_mode  # noqa: E402
from tests.profile import few  # noqa: E402
from tests.torch.modules import MODULES  # noqa: E402


class Asking(nn.Module):
    """Adds something in training mode alone, which it learns in some way."""

    def __init__(self, ask: Callable[[Any], bool], *parts: nn.Module) -> None:
        super().__init__()
        self.ask, self.inner, self.parts = ask, nn.Linear(4, 4), nn.ModuleList(parts)

    def forward(self, x: Any) -> Any:
        """[8, 4]."""
        for part in self.parts:
            x = part(x)
        return self.inner(x) + 1 if self.ask(self) else self.inner(x)


class Told(nn.Linear):
    """Keeps what its own `train` is told."""

    told = True

    def train(self, mode: bool = True) -> Any:
        """As a layer that merges its weights for inference does."""
        self.told = mode
        return super().train(mode)

    def forward(self, x: Any) -> Any:
        """[8, 4]."""
        return super().forward(x) * (2 if self.told else 1)


class Hidden(Asking):
    """Has its mode under the same name, in a place of its own."""

    _mode = True
    training = property(lambda self: self._mode, lambda self, mode: setattr(self, "_mode", mode))


class Counting(nn.Module):
    """Reads what counts batches."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Any) -> Any:
        """[8, 4]."""
        y = self.norm(self.inner(x))
        return y * (1 + self.norm.num_batches_tracked)


def without_statistics() -> nn.Module:
    """A normalisation that no longer keeps statistics, and has them."""
    norm = nn.BatchNorm1d(4)
    norm.running_mean.fill_(0.5)
    norm.track_running_stats = False
    return nn.Sequential(nn.Linear(4, 4), norm)


def hooked() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 4))
    module.register_forward_hook(lambda module, args, y: y * 2 if module.training else y)
    return module


TWO: dict[str, Callable[[], nn.Module]] = {
    "its own mode": lambda: Asking(lambda module: module.training),
    "by name": lambda: Asking(lambda module: getattr(module, "train" + "ing")),
    "of a part": lambda: Asking(lambda module: module.parts[0].training, nn.Dropout(0.0)),
    "of a copy": lambda: Asking(lambda module: copy.copy(module).training),
    "what train was told": lambda: nn.Sequential(Told(4, 4)),
    "a property": lambda: Hidden(lambda module: module.training),
    "a count": Counting,
    "statistics that are not kept": without_statistics,
    "a hook": hooked,
}


@pytest.mark.parametrize("what", TWO)
def test_whatever_differs_has_two_forms(what: str) -> None:
    torch.manual_seed(0)
    module, x = TWO[what](), torch.randn(8, 4)
    graph = fp.from_torch(module, x)
    expected = {mode: copy.deepcopy(module).train(mode)(x).detach().numpy() for mode in (True, False)}
    assert abs(expected[True] - expected[False]).max() > 0.01
    (found,) = (
        fp.compile(graph, target="numpy")
        .bind()
        .step({value.name: x.numpy() for value in graph.inputs})
        .outputs.values()
    )
    np.testing.assert_allclose(found, expected[False], rtol=1e-5, atol=1e-6)
    step = fp.compile(graph, fp.losses.mean, None, outputs=list(graph.outputs), target="numpy").bind()
    (found,) = step.step({value.name: x.numpy() for value in graph.inputs}).outputs.values()
    np.testing.assert_allclose(found, expected[True], rtol=1e-5, atol=1e-6)


class Dropping(nn.Linear):
    """Drops in any mode, beside a layer that drops in training."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Any) -> Any:
        """[8, 4]."""
        return self.drop(nn.functional.dropout(super().forward(x), 0.3, True))


def with_a_hook() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2))
    module[1].register_forward_hook(lambda module, args, y: nn.functional.dropout(y, 0.3, True))
    return module


def with_another_forward() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2))
    module[1].forward = lambda x: nn.functional.dropout(x, 0.3, True)
    return module


@pytest.mark.parametrize("make", [lambda: Dropping(4), with_a_hook, with_another_forward])
def test_what_drops_in_any_mode_has_two_forms(make: Callable[[], nn.Module]) -> None:
    assert list(exporting.programs(make(), (torch.randn(8, 4),), {})[0]) == [True, False]


ONE: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "dropout": (lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3), nn.AlphaDropout(0.3)), (8, 4)),
    "batch norm": (lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), (8, 4)),
    "without statistics": (lambda: nn.Sequential(nn.BatchNorm2d(3, track_running_stats=False)), (2, 3, 4, 4)),
    "LSTM": (lambda: nn.LSTM(4, 3, 2, dropout=0.3), (5, 2, 4)),
    "none": (lambda: nn.Sequential(nn.Linear(4, 4), nn.GELU()), (8, 4)),
}


@pytest.mark.parametrize("what", ONE)
def test_layers_of_pytorch_alone_are_exported_once(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if what == "LSTM" and torch.__version__ < "2.10":
        pytest.skip("PyTorch 2.9 cannot export an LSTM that is no part of a module")
    make, shape = ONE[what]
    exported, count = exporting._exported, list[bool]()
    monkeypatch.setattr(exporting, "_exported", lambda *args: count.append(True) or exported(*args))
    assert list(exporting.programs(make(), (torch.randn(shape),), {})[0]) == [True] and count == [True]


@pytest.mark.parametrize("name", few(list(MODULES), (0, 1, 2)))
def test_where_one_export_is_enough_the_other_is_the_same(name: str) -> None:
    module, args = MODULES[name]()
    with in_mode(module, True), askers(module) as asked:
        training = exporting._exported(module, args, {})
    if has_one_form(module, asked, training):
        with in_mode(module, False):
            assert same_but_mode(training, exporting._exported(module, args, {}))
    assert "training" not in vars(nn.Module)


def test_what_dropout_is_told_in_evaluation_mode_is_nothing() -> None:
    """As in Hugging Face's attention, which gives it p=0.0 then."""

    class Layer(nn.Linear):
        def forward(self, x: Any) -> Any:
            return nn.functional.dropout(super().forward(x), 0.3 if self.training else 0.0, self.training)

    assert list(exporting.programs(Layer(4, 4), (torch.randn(8, 4),), {})[0]) == [True]
