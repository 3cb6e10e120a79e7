"""What an export passes over in silence, beside PyTorch: hooks, memory behind gradients, what forward sets."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make setup-torch")

from torch import nn  # noqa: E402

import foreplan as fp  # noqa: E402
from tests.torch.beside import assert_trains_as_pytorch  # noqa: E402
from tests.torch.two import Cases, Two, X, assert_is_refused, assert_stays_as_it_is  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
CASES = Cases()


# Hooks of gradients.


@CASES.case
class Hook(Two):
    def between(self, y: Any) -> Any:
        y.register_hook(lambda g: g * 3)
        return y


@CASES.case
class HookAfterAWrite(Two):
    def between(self, y: Any) -> Any:
        y.mul_(2)
        y.register_hook(lambda g: g.clamp(-0.01, 0.01))
        return y


@CASES.case
class HookOfAView(Two):
    def between(self, y: Any) -> Any:
        part = y[:, 1:]
        part.register_hook(lambda g: g * 3)
        return y + part.sum(1, keepdim=True)


@CASES.case
class HookThatLooks(Two):
    def between(self, y: Any) -> Any:
        y.register_hook(lambda g: None)
        return y


@CASES.case
class HooksOfWeights(Two):
    def begin(self) -> None:
        rows = torch.tensor([[1.0], [0.0], [1.0]])
        self.first.weight.register_hook(lambda g: g * rows)
        self.first.weight.register_hook(lambda g: g.clamp(-0.01, 0.01))
        self.second.bias.register_hook(lambda g: None)

    def between(self, y: Any) -> Any:
        return torch.sin(self.first(y))


@CASES.wrong("after aten.tanh.default has read it")
class HookTooLate(Two):
    def between(self, y: Any) -> Any:
        z = torch.tanh(y)
        y.register_hook(lambda g: g * 3)
        return y * z


@CASES.wrong("two hooks")
class TwoHooks(Two):
    def between(self, y: Any) -> Any:
        y.register_hook(lambda g: g * 3)
        y.register_hook(lambda g: g + 1)
        return y


@CASES.wrong("removes a hook")
class HookRemoved(Two):
    def between(self, y: Any) -> Any:
        y.register_hook(lambda g: g * 3).remove()
        return y


@CASES.wrong("a view has a hook")
class HookedThenWritten(Two):
    def between(self, y: Any) -> Any:
        part = y[:, 1:]
        part.register_hook(lambda g: g * 3)
        y.mul_(2)
        return y + part.sum(1, keepdim=True)


@CASES.wrong("first has a backward hook")
class HookOfAModule(Two):
    def begin(self) -> None:
        self.first.register_full_backward_hook(lambda m, gi, go: None)


@CASES.wrong("second.bias' has a hook that PyTorch runs when its gradient is there")
class HookAfterAccumulation(Two):
    def begin(self) -> None:
        self.second.bias.register_post_accumulate_grad_hook(lambda p: None)


# Memory that gradients do not see.


@CASES.case
class WrittenWithoutGradient(Two):
    def between(self, y: Any) -> Any:
        with torch.no_grad():
            y.mul_(2)
            y[0].add_(1)
            z = y * 2
        return y + z


@CASES.case
class WrittenBehindDetach(Two):
    def between(self, y: Any) -> Any:
        y.detach()[1:].mul_(2)
        return y * y


@CASES.case
class WrittenAsData(Two):
    def between(self, y: Any) -> Any:
        y.data.mul_(2)
        y.data[0] = 1
        return y - y.data.mean(0)


@CASES.case
class DataAssigned(Two):
    def begin(self) -> None:
        self.register_buffer("mean", torch.zeros(3))

    def between(self, y: Any) -> Any:
        self.mean.data = 0.9 * self.mean.data + y.detach().mean(0)
        return y - self.mean


@CASES.case
class GivenBackWithoutGradient(Two):
    def between(self, y: Any) -> Any:
        with torch.no_grad():
            z = y
            w = y * 2
        return z * w


@CASES.case
class InferenceMode(Two):
    def between(self, y: Any) -> Any:
        with torch.inference_mode():
            scale = y.abs().mean()
        return y * scale.clone()


@CASES.case
class ComplexWithoutGradient(Two):
    def between(self, y: Any) -> Any:
        with torch.no_grad():
            z = torch.view_as_complex(torch.stack([y, y * 2], -1)) * 1j
        return y + torch.view_as_real(z).sum(-1)


@CASES.case
class Branches(Two):
    """Of which each reads weights."""

    def between(self, y: Any) -> Any:
        """One of two layers, by data."""
        return torch.cond(y.sum() > 0, lambda x: self.first(x), lambda x: torch.tanh(self.first(x)), (y,))


# What forward sets.


@CASES.wrong("requires_grad of .*first.weight")
class FreezesItself(Two):
    def between(self, y: Any) -> Any:
        self.first.weight.requires_grad_(False)
        return self.first(y)


@CASES.wrong("sets a parameter")
class SetsAParameter(Two):
    def between(self, y: Any) -> Any:
        self.first.weight = nn.Parameter(self.first.weight.detach() * 0.5)
        return self.first(y)


@CASES.wrong("saved_tensors_hooks")
class ChangesWhatIsSaved(Two):
    def between(self, y: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x * 0, lambda x: x):
            return torch.tanh(y)


@CASES.case
class SavedElsewhere(Two):
    def between(self, y: Any) -> Any:
        with torch.autograd.graph.save_on_cpu():
            return torch.tanh(y)


@CASES.wrong("torch.Generator")
class DrawsByAGenerator(Two):
    def begin(self) -> None:
        self.drawn = torch.Generator()

    def between(self, y: Any) -> Any:
        return y + torch.rand(3, generator=self.drawn)


@CASES.wrong("sets the seed")
class Seeded(Two):
    def between(self, y: Any) -> Any:
        torch.manual_seed(1)
        return y + torch.rand(3)


@pytest.mark.parametrize("name", CASES.right)
def test_it_trains_as_in_pytorch(name: str) -> None:
    assert_trains_as_pytorch(CASES.right[name](), CASES.right[name](), (X,))


@pytest.mark.parametrize("name", CASES.right)
def test_the_check_passes_it(name: str) -> None:
    fp.from_torch(CASES.right[name](), X, check=True)


@pytest.mark.parametrize("name", CASES.refused)
def test_it_is_refused(name: str) -> None:
    assert_is_refused(*CASES.refused[name])


@pytest.mark.parametrize("name", CASES.every)
def test_a_module_stays_as_it_is(name: str) -> None:
    assert_stays_as_it_is(CASES.every[name]())
