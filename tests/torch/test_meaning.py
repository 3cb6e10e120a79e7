"""Modules by the graph of `torch.export`, beside PyTorch itself: losses of three steps, and what they leave."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make setup-torch")

from torch import nn  # noqa: E402

import foreplan as fp  # noqa: E402
from foreplan.base.errors import UnsupportedError  # noqa: E402
from foreplan.graph import Kind  # noqa: E402
from tests.profile import few  # noqa: E402
from tests.torch.beside import Squares, assert_trains_as_pytorch, feeds  # noqa: E402
from tests.torch.exports import example  # noqa: E402
from tests.torch.modules import MODULES  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def exporter() -> None:
    """PyTorch's exporter is imported, which takes seconds."""
    fp.from_torch(nn.Linear(2, 2), torch.randn(1, 2))


SOME = ("input normalization", "resnet, basic blocks", "gpt, tied", "lstm", "swin block", "mlp with spectral norm")


@pytest.mark.parametrize("name", few(list(MODULES), [i for i, name in enumerate(MODULES) if name in SOME]))
def test_modules_train_as_in_pytorch(name: str) -> None:
    made = example(name)
    assert_trains_as_pytorch(made.module, example(name).module, made.inputs)


class Detached(nn.Module):
    """Of one factor no gradient comes back, by `how`."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.a, self.b = how, nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Any) -> Any:
        """A product."""
        if self.how == "detach":
            return self.a(x) * self.b(x).detach()
        with torch.no_grad():
            other = self.b(x)
        return self.a(x) * other


class Lookup(nn.Module):
    """Words, by options of the table."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(6, 3, **options), nn.Linear(3, 2)

    def forward(self, ids: Any) -> Any:
        """Two numbers a word."""
        return self.head(self.table(ids))


class Turned(nn.Module):
    """Rotary places as Llama first had them: a product of complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(4, 4)
        self.register_buffer("turns", torch.polar(torch.ones(3, 2), torch.arange(6.0).reshape(3, 2)))

    def forward(self, x: Any) -> Any:
        """[2, 3, 4]."""
        pairs = torch.view_as_complex(self.project(x).reshape(2, 3, 2, 2))
        return torch.view_as_real(pairs * self.turns).flatten(2)


class Written(nn.Module):
    """Parts of a tensor written in place, through views of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: Any) -> Any:
        """Two numbers a row."""
        z = self.first(x)
        z[:, 1:3].mul_(2)
        z[:, ::2] += 1
        z.t()[5].copy_(x[:, 0])
        z.narrow(1, 3, 3).add_(1)
        z.view(-1, 2, 3)[:, 1, 1:].neg_()
        return self.second(z)


class Teacher(nn.Module):
    """An average of weights, which forward itself moves on."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(4, 3), nn.Linear(4, 3).requires_grad_(False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Any) -> Any:
        """How far the two are from each other."""
        if self.training:
            with torch.no_grad():
                self.seen += 1
                for own, theirs in zip(self.teacher.parameters(), self.student.parameters()):
                    own.mul_(0.9).add_(theirs, alpha=0.1)
        return self.student(x) - self.teacher(x)


class Twice(nn.Module):
    """One normalisation in two places, and tied convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)
        self.b = self.a

    def forward(self, x: Any) -> Any:
        """Images."""
        return self.b(self.norm(torch.tanh(self.norm(self.a(x)))))


class Unlearned(nn.Module):
    """A normalisation in a region of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a = nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3)

    def forward(self, x: Any) -> Any:
        """Images."""
        with torch.no_grad():
            x = torch.tanh(self.norm(x))
        return self.a(x)


class Deep(nn.Module):
    """A branch that training alone has."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.extra = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        """[8, 4]."""
        y = torch.tanh(self.body(x))
        return y + self.extra(x) if self.training else y * 2


class Reversed(torch.autograd.Function):
    """What domain adaptation trains through."""

    @staticmethod
    def forward(ctx: Any, x: Any, factor: float) -> Any:
        """As it is."""
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        """The other way."""
        return g.neg() * ctx.factor, None


class Steps(torch.autograd.Function):
    """Two results, of tensors that backward reads; a gradient of what was broadcast, and a result that has none."""

    @staticmethod
    def forward(x: Any, scale: Any) -> Any:
        """Rounded, the place of the largest, and squared."""
        return (x * scale).round(), x.argmax(1), x.square()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """What backward needs."""
        x, scale = inputs
        ctx.save_for_backward(x, scale)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, rounded: Any, _: Any, squared: Any) -> Any:
        """Not what differentiation gives: clipped."""
        x, scale = ctx.saved_tensors
        flow = (rounded * scale).clamp(-0.1, 0.1) + squared * 2 * x
        return flow, (rounded * x).sum(0, keepdim=True)


class Functions(nn.Module):
    """Calls both, one of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 3), nn.Linear(3, 3), nn.Linear(3, 2)
        self.scale = nn.Parameter(torch.tensor([[3.0, 4.0, 5.0]]))

    def forward(self, x: Any) -> Any:
        """Of both kinds of heads."""
        features = torch.tanh(self.a(x))
        rounded, place, squared = Steps.apply(features, self.scale)
        only, _, _ = Steps.apply(features * 0.5, self.scale)
        one_hot = nn.functional.one_hot(place, 3).float()
        return self.b(rounded + squared + only) + one_hot, self.c(Reversed.apply(features, 0.7))


WORDS = torch.tensor([[0, 1, 2], [0, 0, 3]])
MEANINGS: dict[str, tuple[Callable[[], Any], tuple[Any, ...]]] = {
    "detach": (lambda: Detached("detach"), (torch.randn(5, 4),)),
    "no_grad": (lambda: Detached("no_grad"), (torch.randn(5, 4),)),
    "padding_idx": (lambda: Lookup(padding_idx=0), (WORDS,)),
    "scale_grad_by_freq": (lambda: Lookup(scale_grad_by_freq=True), (WORDS,)),
    "complex numbers": (Turned, (torch.randn(2, 3, 4),)),
    "in place": (Written, (torch.randn(5, 4),)),
    "moving average": (Teacher, (torch.randn(5, 4),)),
    "batch norm": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), (torch.randn(4, 3, 6, 6) * 2 + 1,)),
    "batch norm, twice": (Twice, (torch.randn(4, 3, 6, 6) * 2 + 1,)),
    "batch norm without gradient": (Unlearned, (torch.randn(4, 3, 6, 6) * 2 + 1,)),
    "frozen batch norm": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4).requires_grad_(False)),
        (torch.randn(4, 3, 6, 6) * 2 + 1,),
    ),
    "instance norm": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, affine=True, track_running_stats=True)),
        (torch.randn(4, 3, 6, 6) * 2 + 1,),
    ),
    "spectral norm": (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)), (torch.randn(5, 4),)),
    "mean of all batches": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=None)),
        (torch.randn(4, 3, 6, 6) * 2 + 1,),
    ),
    "autograd functions": (Functions, (torch.randn(5, 4),)),
    "training alone": (Deep, (torch.randn(8, 4),)),
}


@pytest.mark.parametrize("what", MEANINGS)
def test_what_a_module_means_is_kept(what: str) -> None:
    """After training, the same module in evaluation mode gives what PyTorch's does."""
    make, args = MEANINGS[what]
    torch.manual_seed(0)
    ours = make()
    theirs = copy.deepcopy(ours)
    session = assert_trains_as_pytorch(ours, theirs, args)
    graph = fp.from_torch(Squares(ours), *args)
    (found,) = fp.compile(graph, target="numpy").bind(share=session).step(feeds(graph, args, {})).outputs.values()
    with torch.no_grad():
        assert found == pytest.approx(Squares(theirs).eval()(*args).item(), rel=1e-5)


class Shared(nn.Module):
    """Two parameters of the same bytes, which are not tied."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.weight = nn.Parameter(self.a.weight.data)

    def forward(self, x: Any) -> Any:
        """[N, 4]."""
        return self.b(self.a(x))


def test_nodes_have_the_paths_of_modules_and_the_lines_of_their_code() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 2)))
    graph = fp.from_torch(module, torch.randn(3, 4))
    scopes = {node.name.partition("/")[0] for node in graph.nodes}
    assert scopes == {"0", "1.0", "1.1"}
    assert all(node.source.startswith(("linear.py:", "activation.py:")) for node in graph.nodes)
    assert [value.name for value in graph.parameters] == ["0.weight", "0.bias", "1.1.weight", "1.1.bias"]


def test_weights_are_trained_as_one_chooses() -> None:
    module = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 2))
    kinds = {value.name: value.kind for value in fp.from_torch(module, torch.randn(3, 4), freeze=["1.bias"]).stored}
    frozen = {name for name, kind in kinds.items() if kind is Kind.FROZEN}
    assert frozen == {"0.weight", "0.bias", "1.bias"} and kinds["1.weight"] is Kind.PARAMETER


@pytest.mark.parametrize(
    "layer",
    [
        *(nn.Dropout(0.4), nn.Dropout(1.0), nn.Dropout(0.0), nn.Dropout1d(0.4), nn.Dropout2d(0.4), nn.Dropout3d(0.4)),
        *(nn.AlphaDropout(0.4), nn.FeatureAlphaDropout(0.4), nn.RReLU(0.1, 0.9)),
    ],
    ids=str,
)
def test_what_training_draws_is_pytorchs_on_average_and_nothing_in_inference(layer: Any) -> None:
    """Mean and spread of an element over many draws, beside PyTorch's."""
    x = torch.randn(4, 3, *[2] * (3 if "3d" in str(layer) else 2 if "2d" in str(layer) else 1))
    module, steps = nn.Sequential(layer, nn.Conv1d(3, 3, 1, bias=False)) if x.ndim == 3 else nn.Sequential(layer), 400
    if x.ndim == 3:  # something that can be trained, and changes nothing
        nn.init.dirac_(module[1].weight)
    graph = fp.from_torch(module, x)
    (found,) = fp.compile(graph, target="numpy").bind().step({"input": x.numpy()}).outputs.values()
    np.testing.assert_allclose(found, module.eval()(x).detach(), rtol=1e-5, atol=1e-6)
    if x.ndim != 3:
        return
    session = fp.compile(graph, fp.losses.mean, None, outputs=list(graph.outputs), target="numpy").bind(seed=1)
    ours = np.array([session.step({"input": x.numpy()}).outputs["output"] for _ in range(steps)], np.float64)
    torch.manual_seed(1)
    theirs = torch.stack([layer.train()(x) for _ in range(10 * steps)]).double().numpy()
    spread = theirs.std(0)
    assert (abs(ours.mean(0) - theirs.mean(0)) <= 6 * spread / steps**0.5 + 1e-4).all()
    assert (abs(ours.std(0) - spread) <= 0.3 * spread + 1e-4).all()
    if (spread > 1e-3).all():  # whether elements of a channel share a draw
        mine, wanted = (np.corrcoef(drawn.reshape(len(drawn), -1).T) for drawn in (ours, theirs))
        assert abs(mine - wanted).max() < 0.3


class Masked(nn.Module):
    """A shape that depends on data."""

    def forward(self, x: Any) -> Any:
        """Those above zero."""
        return x[x > 0]


class Doubled(torch.autograd.Function):
    """In place."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        """Twice x."""
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        """Twice."""
        return g * 2


class DoubledLayer(nn.Module):
    """Calls it."""

    def forward(self, x: Any) -> Any:
        """Twice x, plus one."""
        return Doubled.apply(x + 1)


def test_what_cannot_be_kept_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"Doubled, a torch\.autograd\.Function, writes its arguments"):
        fp.from_torch(DoubledLayer(), torch.randn(3))
    with pytest.raises(UnsupportedError, match=r"'b\.weight' has bytes of 'a\.weight'.*tie them"):
        fp.from_torch(Shared(), torch.randn(3, 4))
    with pytest.raises(UnsupportedError, match=r"ATen op .* \(0, test_meaning\.py:\d+\): .*depends on data"):
        fp.from_torch(nn.Sequential(Masked()), torch.randn(3))
