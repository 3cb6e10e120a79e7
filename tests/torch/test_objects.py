"""Python's own objects in a module, beside PyTorch: attributes, results and arguments, and tensors without numbers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make setup-torch")

from safetensors.numpy import save_file  # noqa: E402
from torch import nn  # noqa: E402

import foreplan as fp  # noqa: E402
from foreplan.base.errors import ForeplanError  # noqa: E402
from foreplan.graph import parse_graph  # noqa: E402
from tests.torch.beside import RATE, assert_trains_as_pytorch  # noqa: E402
from tests.torch.two import Cases, Two, X, assert_is_refused, assert_stays_as_it_is  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
CASES = Cases()
CLOSED_OVER = torch.ones(3)


@CASES.case
class TensorWritten(Two):
    def begin(self) -> None:
        self.scale = torch.ones(3)

    def between(self, y: Any) -> Any:
        self.scale.mul_(1.1)
        return y * self.scale


@CASES.case
class TensorInAListWritten(Two):
    def begin(self) -> None:
        self.scales = [torch.ones(3)]

    def between(self, y: Any) -> Any:
        self.scales[0][1:].mul_(1.1)
        return y * self.scales[0]


@CASES.case
class LiteralWritten(Two):
    def between(self, y: Any) -> Any:
        scale = torch.tensor([1.0, 2.0, 3.0])
        scale.mul_(2)
        return y * scale


@CASES.case
class Looked(Two):
    """Attributes that are set and not read."""

    def begin(self) -> None:
        self.seen, self.rows, self.each = None, 0, dict[str, Any]()

    def between(self, y: Any) -> Any:
        self.seen, self.rows, self.each["y"] = y, len(y), y
        return y


@CASES.case
class Collected(Two):
    """A list that each call begins anew, as losses of parts are."""

    def begin(self) -> None:
        self.losses: list[Any] = []

    def between(self, y: Any) -> Any:
        self.losses.clear()
        self.losses.append(y.mean())
        return y + sum(self.losses)


class Running(nn.Module):
    """Takes an average away that it sets, by `how`."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.layer = how, nn.Linear(3, 3)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: Any) -> Any:
        """[N, 3]."""
        y = self.layer(x)
        if self.how == "detached":
            self.mean = 0.9 * self.mean + y.detach().mean(0)
        elif self.how == "without gradient":
            with torch.no_grad():
                self.mean = 0.9 * self.mean + y.mean(0)
        elif self.how == "counted":
            self.count = self.count + 1
            self.mean = self.mean + self.count
        elif self.training:
            self.mean = 0.9 * self.mean + y.detach().mean(0)
        return y - self.mean


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("how", ["detached", "without gradient", "counted", "in training"])
def test_a_buffer_that_forward_sets_is_kept(how: str, twice: bool) -> None:
    def made() -> nn.Module:
        torch.manual_seed(0)
        module = Running(how)
        return nn.Sequential(module, module) if twice else nn.Sequential(module)

    assert_trains_as_pytorch(made(), made(), (X,))


class Cache(Two):
    """What is computed of a weight is kept in evaluation mode, for the device, until the mode changes: as the biases of
    attention in LeViT and EfficientFormer.
    """

    def begin(self) -> None:
        self.table, self.cache = nn.Parameter(torch.linspace(-1, 1, 5)), dict[str, Any]()
        self.register_buffer("index", torch.tensor([0, 2, 2]))

    def train(self, mode: bool = True) -> Any:
        """Forgets what it keeps."""
        if self.cache:
            self.cache = {}
        return super().train(mode)

    def between(self, y: Any) -> Any:
        if self.training:
            return y + self.table[self.index]
        if "cpu" not in self.cache:
            self.cache["cpu"] = self.table[self.index]
        return y + self.cache["cpu"]


def test_a_cache_of_weights_is_computed_in_each_step() -> None:
    assert_trains_as_pytorch(Cache(), Cache(), (X,))
    (note,) = fp.from_torch(Cache(), X, check=True).notes
    assert "self.cache" in note and "computes it anew" in note


@CASES.wrong("self.cache")
class CacheOfATrainedWeight(Cache):
    """Which a step changes, while the cache stays."""

    def between(self, y: Any) -> Any:
        if "cpu" not in self.cache:
            self.cache["cpu"] = self.table[self.index].detach()
        return y + self.cache["cpu"]


@CASES.wrong("self.cache")
class CacheOfAnInput(Cache):
    """In evaluation mode."""

    def between(self, y: Any) -> Any:
        if self.training:
            return y
        if "cpu" not in self.cache:
            self.cache["cpu"] = y.mean(0)
        return y + self.cache["cpu"]


@CASES.wrong("self.cache")
class CacheOfADraw(Cache):
    """The first call's."""

    def between(self, y: Any) -> Any:
        if self.training:
            return y
        if "cpu" not in self.cache:
            self.cache["cpu"] = torch.rand(3)
        return y + self.cache["cpu"]


@CASES.wrong("the buffer 'sum' another shape")
class BufferOfAnotherShape(Two):
    def begin(self) -> None:
        self.register_buffer("sum", torch.zeros(()))

    def between(self, y: Any) -> Any:
        self.sum = self.sum + y.detach().mean(0)
        return y - self.sum


@CASES.wrong(r"calls \(0 → 1\).*register_buffer")
class Counted(Two):
    def begin(self) -> None:
        self.calls = 0

    def between(self, y: Any) -> Any:
        self.calls += 1
        return y * self.calls


@CASES.wrong("changed itself in the call before: self.box")
class CountedInARecord(Two):
    def begin(self) -> None:
        self.box = SimpleNamespace(calls=0)

    def between(self, y: Any) -> Any:
        self.box.calls += 1
        return y * self.box.calls


@CASES.wrong("self.seen")
class CountedInAList(Two):
    def begin(self) -> None:
        self.seen: list[int] = []

    def between(self, y: Any) -> Any:
        self.seen.append(1)
        return y * len(self.seen)


@CASES.wrong(r"rate \(1.0 → 0.5\)")
class CountedAsALiteral(Two):
    def begin(self) -> None:
        self.rate = 1.0

    def between(self, y: Any) -> Any:
        self.rate *= 0.5
        return y * torch.tensor(self.rate)


@CASES.wrong("self.mean")
class TensorReplaced(Two):
    def begin(self) -> None:
        self.mean = torch.zeros(3)

    def between(self, y: Any) -> Any:
        self.mean = 0.9 * self.mean + y.detach().mean(0)
        return y - self.mean


@CASES.wrong("self.mean")
class MadeInTheFirstCall(Two):
    def begin(self) -> None:
        self.mean: Any = None

    def between(self, y: Any) -> Any:
        new = y.detach().mean(0)
        self.mean = new if self.mean is None else 0.9 * self.mean + new
        return y - self.mean


@CASES.wrong("no part of the module")
class WritesOutside(Two):
    def between(self, y: Any) -> Any:
        CLOSED_OVER.mul_(1.1)
        return y * CLOSED_OVER


@pytest.mark.parametrize("name", CASES.right)
def test_it_trains_as_in_pytorch(name: str) -> None:
    assert_trains_as_pytorch(CASES.right[name](), CASES.right[name](), (X,))


@pytest.mark.parametrize("name", CASES.right)
def test_the_check_passes_it(name: str) -> None:
    if name in ("Looked", "Collected") and torch.__version__ < "2.10":
        pytest.skip("PyTorch 2.9 cannot export a module that fills containers of its own")
    fp.from_torch(CASES.right[name](), X, check=True)


@pytest.mark.parametrize("name", CASES.refused)
def test_it_is_refused(name: str) -> None:
    assert_is_refused(*CASES.refused[name])


@pytest.mark.parametrize("name", CASES.every)
def test_a_module_stays_as_it_is(name: str) -> None:
    assert_stays_as_it_is(CASES.every[name]())


class Warming(Two):
    """A count that matters later."""

    def begin(self) -> None:
        self.calls = 0

    def between(self, y: Any) -> Any:
        self.calls += 1
        return y if self.calls < 100 else 2 * y


class NoTensor:
    """No tensor, and no container of some."""


class Cached(Two):
    """Gives such a thing too."""

    def forward(self, x: Any) -> Any:
        """By name."""
        return {"scores": super().forward(x), "cache": NoTensor()}


def test_what_is_guessed_or_left_out_is_said() -> None:
    (note,) = fp.from_torch(Warming(), X, check=True).notes
    assert "self.calls (1 → 2)" in note and "as in the first call" in note
    graph = fp.from_torch(Cached(), X, check=True)
    assert graph.notes == ("the result 'cache', a NoTensor, is left out",) and list(graph.outputs) == ["scores"]


class Outside(Two):
    """Counts where no graph and no attribute shows it."""

    def between(self, y: Any) -> Any:
        COUNTS.append(1)
        return y * len(COUNTS)


COUNTS: list[int] = []


def test_the_check_sees_what_one_call_leaves_for_the_next() -> None:
    with pytest.raises(ForeplanError, match=r"the output .* is another one at each call of PyTorch"):
        fp.from_torch(Outside(), X, check=True)


# Modules without numbers, results and arguments of other kinds.


class Indexed(Two):
    """Ties a layer, and has buffers that are and are not in its state_dict."""

    def begin(self) -> None:
        self.third = self.second
        self.register_buffer("shift", torch.arange(3.0))
        self.register_buffer("order", torch.tensor([1, 0, 2]), persistent=False)

    def between(self, y: Any) -> Any:
        return torch.tanh(y)[:, self.order] + self.shift


def test_a_module_on_meta_is_planned_and_loaded(tmp_path: Path) -> None:
    real = Indexed()
    with torch.device("meta"):
        module = Indexed()
    for example in (X, X.to("meta")):
        graph = fp.from_torch(module, example)
        assert str(parse_graph(str(graph))) == str(graph)
    assert all(p.is_meta for p in module.parameters()) and module.third is module.second
    step, theirs = (fp.compile(g, fp.losses.mean, fp.optim.SGD(RATE)) for g in (graph, fp.from_torch(real, X)))
    assert sum(step.plan.heights) == sum(theirs.plan.heights)  # a constant there is a buffer here
    session, batch = step.bind(), {"x": X.numpy()}
    save_file({name: x.numpy() for name, x in real.state_dict().items() if "third" not in name}, tmp_path / "w.st")
    for missing in (r"and 5 more tensors have no content.*device meta", "'order' has no content"):
        with pytest.raises(fp.SessionError, match=missing):
            session.step(batch)
        session.load(tmp_path / "w.st")
    session.stored["order"] = np.array([1, 0, 2])
    wanted = theirs.bind()
    for _ in range(2):
        assert session.step(batch).loss == wanted.step(batch).loss
    adapted = fp.compile(
        fp.lora(graph, rank=1, targets=["first"], dora=True), fp.losses.mean, fp.optim.SGD(RATE)
    ).bind()
    adapted.load(tmp_path / "w.st", strict=False)
    adapted.stored["order"] = np.array([1, 0, 2])
    assert adapted.step(batch).loss == pytest.approx(theirs.bind().step(batch).loss, rel=1e-6)
    with pytest.raises(fp.UsageError, match="no numbers to check"):
        fp.from_torch(module, X, check=True)


@dataclass
class Results:
    """What PyTorch does not know."""

    scores: Any
    inner: Any
    count: int = 3


class Given(Two):
    """Numbers as arguments, and a dataclass."""

    def forward(self, x: Any, scale: float, times: int = 2, wide: bool = True) -> Any:
        """Two results."""
        y = super().forward(x) * scale * times
        return Results(y, {"half": Results(y / 2, None)})


def test_results_of_a_dataclass_and_numbers_as_arguments() -> None:
    graph = fp.from_torch(Given(), X, 0.5, check=True)
    assert list(graph.outputs) == ["scores", "inner.half.scores"]
    assert [note.partition(" in every step")[0] for note in graph.notes] == ["the argument 'scale' is 0.5"]


def test_what_is_no_module_to_export_is_refused() -> None:
    with pytest.raises(fp.UsageError, match="TorchScript"):
        fp.from_torch(torch.jit.script(nn.Linear(3, 2)), X)
    assert list(fp.from_torch(torch.compile(Two()), X, check=True).outputs) == ["output"]


def test_a_newer_torch_than_tested_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "9.1.0a0")
    (note,) = fp.from_torch(Two(), X, check=True).notes
    assert note == "PyTorch 9.1.0a0 is newer than those that were tested, 2.9 to 2.13"
    with pytest.raises(fp.ModelError, match=r"cannot export Two.*9\.1\.0a0 is newer"):
        fp.from_torch(Two(), X[:, :2])


class WritesItsArgument(nn.Linear):
    """Twice as much of it at each call."""

    def forward(self, x: Any) -> Any:
        """Two numbers a row."""
        return super().forward(x.mul_(2))


def test_the_check_gives_each_call_the_example() -> None:
    x = X.clone()
    fp.from_torch(WritesItsArgument(3, 2), x, check=True)
    assert torch.equal(x, X)
