"""What an export passes over in silence, beside PyTorch: hooks, memory behind gradients, Python's own objects."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make setup-torch")

from torch import nn  # noqa: E402

import foreplan as fp  # noqa: E402
from foreplan.errors import ForeplanError, UnsupportedError  # noqa: E402
from tests.torch.beside import Squares, assert_trains_as_pytorch  # noqa: E402

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore")
CASES: dict[str, type[nn.Module]] = {}
REFUSED: dict[str, tuple[type[nn.Module], str]] = {}
CLOSED_OVER = torch.ones(3)


class Two(nn.Module):
    """Two layers. Cases change what is between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 2)
        self.begin()

    def begin(self) -> None:
        """What the case has beside the layers."""

    def between(self, y: Any) -> Any:
        """What it does with the first one's result."""
        return y

    def forward(self, x: Any) -> Any:
        """Two numbers a row."""
        return self.second(self.between(self.first(x)))


Case = type[Two]


def case(kind: Case) -> Case:
    CASES[kind.__name__] = kind
    return kind


def refused(why: str) -> Callable[[Case], Case]:
    def add(kind: Case) -> Case:
        REFUSED[kind.__name__] = kind, why
        return kind

    return add


# Hooks of gradients.


@case
class Hook(Two):
    def between(self, y: Any) -> Any:
        y.register_hook(lambda g: g * 3)
        return y


@case
class HookAfterAWrite(Two):
    def between(self, y: Any) -> Any:
        y.mul_(2)
        y.register_hook(lambda g: g.clamp(-0.01, 0.01))
        return y


@case
class HookOfAView(Two):
    def between(self, y: Any) -> Any:
        part = y[:, 1:]
        part.register_hook(lambda g: g * 3)
        return y + part.sum(1, keepdim=True)


@case
class HookThatLooks(Two):
    def between(self, y: Any) -> Any:
        y.register_hook(lambda g: None)
        return y


@case
class HooksOfWeights(Two):
    def begin(self) -> None:
        rows = torch.tensor([[1.0], [0.0], [1.0]])
        self.first.weight.register_hook(lambda g: g * rows)
        self.first.weight.register_hook(lambda g: g.clamp(-0.01, 0.01))
        self.second.bias.register_hook(lambda g: None)

    def between(self, y: Any) -> Any:
        return torch.sin(self.first(y))


@refused("after aten.tanh.default has read it")
class HookTooLate(Two):
    def between(self, y: Any) -> Any:
        z = torch.tanh(y)
        y.register_hook(lambda g: g * 3)
        return y * z


@refused("two hooks")
class TwoHooks(Two):
    def between(self, y: Any) -> Any:
        y.register_hook(lambda g: g * 3)
        y.register_hook(lambda g: g + 1)
        return y


@refused("removes a hook")
class HookRemoved(Two):
    def between(self, y: Any) -> Any:
        y.register_hook(lambda g: g * 3).remove()
        return y


@refused("a view has a hook")
class HookedThenWritten(Two):
    def between(self, y: Any) -> Any:
        part = y[:, 1:]
        part.register_hook(lambda g: g * 3)
        y.mul_(2)
        return y + part.sum(1, keepdim=True)


@refused("first has a backward hook")
class HookOfAModule(Two):
    def begin(self) -> None:
        self.first.register_full_backward_hook(lambda m, gi, go: None)


@refused("second.bias' has a hook that PyTorch runs when its gradient is there")
class HookAfterAccumulation(Two):
    def begin(self) -> None:
        self.second.bias.register_post_accumulate_grad_hook(lambda p: None)


# Memory that gradients do not see.


@case
class WrittenWithoutGradient(Two):
    def between(self, y: Any) -> Any:
        with torch.no_grad():
            y.mul_(2)
            y[0].add_(1)
            z = y * 2
        return y + z


@case
class WrittenBehindDetach(Two):
    def between(self, y: Any) -> Any:
        y.detach()[1:].mul_(2)
        return y * y


@case
class WrittenAsData(Two):
    def between(self, y: Any) -> Any:
        y.data.mul_(2)
        y.data[0] = 1
        return y - y.data.mean(0)


@case
class DataAssigned(Two):
    def begin(self) -> None:
        self.register_buffer("mean", torch.zeros(3))

    def between(self, y: Any) -> Any:
        self.mean.data = 0.9 * self.mean.data + y.detach().mean(0)
        return y - self.mean


@case
class GivenBackWithoutGradient(Two):
    def between(self, y: Any) -> Any:
        with torch.no_grad():
            z = y
            w = y * 2
        return z * w


@case
class InferenceMode(Two):
    def between(self, y: Any) -> Any:
        with torch.inference_mode():
            scale = y.abs().mean()
        return y * scale.clone()


@case
class ComplexWithoutGradient(Two):
    def between(self, y: Any) -> Any:
        with torch.no_grad():
            z = torch.view_as_complex(torch.stack([y, y * 2], -1)) * 1j
        return y + torch.view_as_real(z).sum(-1)


# Python's objects.


@case
class TensorWritten(Two):
    def begin(self) -> None:
        self.scale = torch.ones(3)

    def between(self, y: Any) -> Any:
        self.scale.mul_(1.1)
        return y * self.scale


@case
class TensorInAListWritten(Two):
    def begin(self) -> None:
        self.scales = [torch.ones(3)]

    def between(self, y: Any) -> Any:
        self.scales[0][1:].mul_(1.1)
        return y * self.scales[0]


@case
class LiteralWritten(Two):
    def between(self, y: Any) -> Any:
        scale = torch.tensor([1.0, 2.0, 3.0])
        scale.mul_(2)
        return y * scale


@case
class Looked(Two):
    """Attributes that are set and not read."""

    def begin(self) -> None:
        self.seen, self.rows, self.each = None, 0, dict[str, Any]()

    def between(self, y: Any) -> Any:
        self.seen, self.rows, self.each["y"] = y, len(y), y
        return y


@case
class Collected(Two):
    """A list that each call begins anew, as losses of parts are."""

    def begin(self) -> None:
        self.losses: list[Any] = []

    def between(self, y: Any) -> Any:
        self.losses.clear()
        self.losses.append(y.mean())
        return y + sum(self.losses)


@refused(r"calls \(0 → 1\).*register_buffer")
class Counted(Two):
    def begin(self) -> None:
        self.calls = 0

    def between(self, y: Any) -> Any:
        self.calls += 1
        return y * self.calls


@refused("changed itself in the call before: self.box")
class CountedInARecord(Two):
    def begin(self) -> None:
        self.box = SimpleNamespace(calls=0)

    def between(self, y: Any) -> Any:
        self.box.calls += 1
        return y * self.box.calls


@refused("self.seen")
class CountedInAList(Two):
    def begin(self) -> None:
        self.seen: list[int] = []

    def between(self, y: Any) -> Any:
        self.seen.append(1)
        return y * len(self.seen)


@refused(r"rate \(1.0 → 0.5\)")
class CountedAsALiteral(Two):
    def begin(self) -> None:
        self.rate = 1.0

    def between(self, y: Any) -> Any:
        self.rate *= 0.5
        return y * torch.tensor(self.rate)


@refused("self.mean")
class TensorReplaced(Two):
    def begin(self) -> None:
        self.mean = torch.zeros(3)

    def between(self, y: Any) -> Any:
        self.mean = 0.9 * self.mean + y.detach().mean(0)
        return y - self.mean


@refused("self.mean")
class MadeInTheFirstCall(Two):
    def begin(self) -> None:
        self.mean: Any = None

    def between(self, y: Any) -> Any:
        new = y.detach().mean(0)
        self.mean = new if self.mean is None else 0.9 * self.mean + new
        return y - self.mean


@refused("no part of the module")
class WritesOutside(Two):
    def between(self, y: Any) -> Any:
        CLOSED_OVER.mul_(1.1)
        return y * CLOSED_OVER


@refused("requires_grad of .*first.weight")
class FreezesItself(Two):
    def between(self, y: Any) -> Any:
        self.first.weight.requires_grad_(False)
        return self.first(y)


@refused("sets the seed")
class Seeded(Two):
    def between(self, y: Any) -> Any:
        torch.manual_seed(1)
        return y + torch.rand(3)


X = torch.linspace(-1, 1, 12).reshape(4, 3)


@pytest.mark.parametrize("name", CASES)
def test_it_trains_as_in_pytorch(name: str) -> None:
    assert_trains_as_pytorch(CASES[name](), CASES[name](), (X,))


@pytest.mark.parametrize("name", CASES)
def test_the_check_passes_it(name: str) -> None:
    if name in ("Looked", "Collected") and torch.__version__ < "2.10":
        pytest.skip("PyTorch 2.9 cannot export a module that fills containers of its own")
    fp.from_torch(CASES[name](), X, check=True)


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused(name: str) -> None:
    kind, why = REFUSED[name]
    with pytest.raises(UnsupportedError, match=why):
        fp.from_torch(Squares(kind()), X, check=False)


@pytest.mark.parametrize("name", [*CASES, *REFUSED])
def test_a_module_stays_as_it_is(name: str) -> None:
    module = (CASES | {name: kind for name, (kind, _) in REFUSED.items()})[name]()
    attributes = {key: x for key, x in vars(module).items() if not key.startswith("_")}
    shown = repr(attributes)
    before = {key: x.clone() for key, x in module.state_dict().items()}
    with contextlib.suppress(ForeplanError):
        fp.from_torch(module, X)
    now = {key: x for key, x in vars(module).items() if not key.startswith("_")}
    assert repr(now) == shown and all(now[key] is x for key, x in attributes.items())
    assert all(torch.equal(module.state_dict()[key], x) and x.equal(before[key]) for key, x in before.items())
    assert all(p.requires_grad and type(p) is nn.Parameter for p in module.parameters())
    handles = (module._forward_hooks, module._forward_pre_hooks)
    assert not any(handles) and "register_hook" in vars(torch.Tensor) and "data" not in vars(torch.Tensor)


class Warming(Two):
    """A count that matters later."""

    def begin(self) -> None:
        self.calls = 0

    def between(self, y: Any) -> Any:
        self.calls += 1
        return y if self.calls < 100 else 2 * y


class Cache:
    """No tensor, and no container of some."""


class Cached(Two):
    """Gives such a thing too."""

    def forward(self, x: Any) -> Any:
        """By name."""
        return {"scores": super().forward(x), "cache": Cache()}


def test_what_is_guessed_or_left_out_is_said() -> None:
    (note,) = fp.from_torch(Warming(), X).notes
    assert "self.calls (1 → 2)" in note and "as in the first call" in note
    graph = fp.from_torch(Cached(), X)
    assert graph.notes == ("the result 'cache', a Cache, is left out",) and list(graph.outputs) == ["scores"]


class Outside(Two):
    """Counts where no graph and no attribute shows it."""

    def between(self, y: Any) -> Any:
        COUNTS.append(1)
        return y * len(COUNTS)


COUNTS: list[int] = []


def test_the_check_sees_what_one_call_leaves_for_the_next() -> None:
    with pytest.raises(ForeplanError, match=r"the output .* is another one at each call of PyTorch"):
        fp.from_torch(Outside(), X, check=True)
