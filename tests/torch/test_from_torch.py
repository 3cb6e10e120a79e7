"""PyTorch modules in and back: names, what is trained, twenty steps beside PyTorch's own, and the weights' way home."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make setup-torch")

from torch import nn  # noqa: E402

import foreplan as fp  # noqa: E402
from foreplan.graph import Kind  # noqa: E402
from tests.export.runtime import run  # noqa: E402
from tests.profile import pick  # noqa: E402
from tests.torch.exports import example  # noqa: E402
from tests.torch.modules import MODULES  # noqa: E402

SOME = (
    *("input normalization", "resnet, basic blocks", "gpt, tied", "lstm", "group norm net", "swin block", "lora"),
    *("clip", "translator", "bag of words"),
)


class Images(nn.Module):
    """Convolutions with batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, bias=False))
        self.norm, self.head = nn.BatchNorm2d(8), nn.Linear(8, 5)

    def forward(self, x: Any) -> Any:
        """Scores of five classes."""
        return self.head(torch.relu(self.norm(self.body(x))).mean((2, 3)))


class Words(nn.Module):
    """Two layers of attention, whose head is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(11, 16), nn.Parameter(torch.randn(6, 16) * 0.02)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Any) -> Any:
        """Scores of the words at each place."""
        return self.head(self.layers(self.embed(ids) + self.places))


def of_images(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    return rng.normal(size=(8, 3, 9, 9)).astype(np.float32), rng.integers(0, 5, 8)


def of_words(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    return rng.integers(0, 11, (4, 6)), rng.integers(0, 11, (4, 6))


@pytest.mark.parametrize("make, draw", [(Images, of_images), (Words, of_words)])
@pytest.mark.parametrize("target", ["numpy", "cpu:threads=1"])
def test_twenty_steps_have_the_losses_of_pytorch_and_the_weights_come_home(
    make: Callable[[], Any], draw: Callable[[np.random.Generator], tuple[np.ndarray, np.ndarray]], target: str
) -> None:
    torch.manual_seed(0)
    module = make()
    x, target_of = draw(np.random.default_rng(0))
    graph = fp.from_torch(module, torch.from_numpy(x))
    step = fp.compile(graph, fp.losses.cross_entropy, fp.optim.Momentum(0.05, 0.9), target=target)
    session = step.bind()
    names = [slot.name for slot in step.program.inputs if slot.init is None]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    module.train()
    for i in range(20):
        x, target_of = draw(np.random.default_rng(i))
        scores = module(torch.from_numpy(x))
        loss = nn.functional.cross_entropy(
            scores.reshape(-1, scores.shape[-1]), torch.from_numpy(target_of).reshape(-1)
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found = session.step(dict(zip(names, (x, target_of))))
        assert found.loss == pytest.approx(loss.item(), rel=2e-4)
    home = make()
    session.to_torch(home)
    for (name, ours), theirs in zip(home.state_dict().items(), module.state_dict().values()):
        np.testing.assert_allclose(ours, theirs, rtol=2e-3, atol=2e-4, err_msg=name)


class Pairs(nn.Module):
    """How well the means of two bags of words match; both are read in one table, whose gradient may be sparse."""

    def __init__(self, words: int, width: int, sparse: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(words, width, sparse=sparse), nn.Linear(width, 3)

    def forward(self, one: Any, two: Any) -> Any:
        """Scores of three classes."""
        return self.head(self.embed(one).mean(1) * self.embed(two).mean(1))


DESCENTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (fp.optim.SGD(0.3), {"lr": 0.3}),
    "momentum": (fp.optim.Momentum(0.1, 0.8), {"lr": 0.1, "momentum": 0.8}),
    "nesterov": (fp.optim.Nesterov(0.1, 0.8), {"lr": 0.1, "momentum": 0.8, "nesterov": True}),
}


@pytest.mark.parametrize("name", DESCENTS)
@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("seed", range(pick(1, 2, 6)))
@pytest.mark.parametrize("target", ["numpy", "cpu:threads=1"])
def test_tables_learn_by_rows_as_in_pytorch(target: str, seed: int, sparse: bool, name: str) -> None:
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    batch, *lengths = (int(n) for n in rng.integers(1, 5, 3))
    words = batch * sum(lengths) + int(rng.integers(1, 20))
    module, (ours, options) = Pairs(words, int(rng.integers(2, 20)), sparse), DESCENTS[name]
    some = rng.integers(0, words, 1 + words // 3)  # so that words occur more than once
    start = module.embed.weight.detach().numpy().copy()
    ids = [rng.choice(some, (batch, length)) for length in lengths]
    graph = fp.from_torch(module, *map(torch.from_numpy, ids))
    step = fp.compile(graph, fp.losses.cross_entropy, ours, target=target)
    session, names = step.bind(), [slot.name for slot in step.program.inputs if slot.init is None]
    optimizer = torch.optim.SGD(module.parameters(), **options)
    for _ in range(10):
        ids, wanted = [rng.choice(some, (batch, length)) for length in lengths], rng.integers(0, 3, batch)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(module(*map(torch.from_numpy, ids)), torch.from_numpy(wanted))
        loss.backward()
        optimizer.step()
        assert module.embed.weight.grad.is_sparse == sparse
        assert session.step(dict(zip(names, (*ids, wanted)))).loss == pytest.approx(loss.item(), rel=1e-4)
    after = module.embed.weight.detach().numpy()
    assert (after != start).any()
    np.testing.assert_allclose(session.parameters["embed.weight"], after, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", pick(SOME[:2], SOME, tuple(MODULES)))
def test_what_is_trained_is_what_the_module_trains(name: str) -> None:
    made = example(name)
    try:
        graph = fp.from_torch(made.module, *made.inputs)
    except fp.ModelError as error:
        assert "PyTorch cannot export" in str(error)
        pytest.skip(str(error))
    trained = {value.name for value in graph.parameters}
    named = dict(made.module.named_parameters(remove_duplicate=False))
    assert trained <= {each for each, weight in named.items() if weight.requires_grad}
    read = {value for node in graph.nodes for value in node.inputs} | set(graph.outputs.values())
    held = {value.name for value in graph.stored if value in read}
    assert all(each in trained for each, weight in named.items() if weight.requires_grad and each in held)


def test_a_module_says_what_is_frozen_and_patterns_have_the_last_word() -> None:
    module = Images()
    for weight in module.body.parameters():
        weight.requires_grad_(False)
    x = torch.zeros(2, 3, 9, 9)
    graph = fp.from_torch(module, x)
    kinds = {value.name: value.kind for value in graph.stored}
    assert kinds["body.0.weight"] is kinds["body.1.bias"] is Kind.FROZEN and kinds["norm.weight"] is Kind.PARAMETER
    assert [weight.name for weight in fp.from_torch(module, x, train=["body"], freeze=["*"]).parameters] == [
        *("body.0.weight", "body.0.bias", "body.1.weight", "body.1.bias", "body.3.weight")
    ]


def test_parts_in_evaluation_mode_stay_so_and_the_module_is_left_as_it_was() -> None:
    module = Images().train()
    module.norm.eval()
    before = {name: array.clone() for name, array in module.state_dict().items()}
    step = fp.compile(fp.from_torch(module, torch.zeros(2, 3, 9, 9)), fp.losses.mean, fp.optim.SGD(0.1))
    session = step.bind()
    session.step({step.program.inputs[0].name: np.random.default_rng(0).normal(size=(2, 3, 9, 9)).astype("f4")})
    state = session.state_dict()
    assert (state["norm.running_mean"] == 0).all() and (state["body.1.running_mean"] != 0).all()
    assert module.training and not module.norm.training
    assert all((before[name] == array).all() for name, array in module.state_dict().items())
    assert not Images().eval().training
    quiet = Images().eval()
    fp.from_torch(quiet, torch.zeros(2, 3, 9, 9))
    assert not any(part.training for part in quiet.modules())


def test_dropout_drops_in_training_alone() -> None:
    module = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5))
    graph = fp.from_torch(module, torch.zeros(3, 4))
    session = fp.compile(graph).bind()
    x = np.ones((3, 4), np.float32)
    (name,) = [slot.name for slot in session.program.inputs]
    (found,) = session.step({name: x}).outputs.values()
    np.testing.assert_allclose(found, module.eval()(torch.from_numpy(x)).detach(), rtol=1e-5, atol=1e-6)
    training = fp.compile(graph, fp.losses.mean, fp.optim.SGD(0.1), outputs=list(graph.outputs)).bind()
    (dropped,) = training.step({name: x}).outputs.values()
    assert 0.3 < (dropped == 0).mean() < 0.7


class Branching(nn.Module):
    """Not exportable: its shape depends on data."""

    def forward(self, x: Any) -> Any:
        """The positive numbers."""
        return x[x > 0].tolist()


class Deciding(nn.Module):
    """Not exportable either: it asks for a sum as a number."""

    def forward(self, x: Any) -> Any:
        """x, or the other way."""
        return x if x.sum() > 0 else -x


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: fp.from_torch(3), fp.UsageError, "takes a torch.nn.Module"),
        (lambda: fp.from_torch(Branching(), torch.zeros(3)), fp.ModelError, "PyTorch cannot export Branching"),
        (lambda: fp.from_torch(nn.Linear(2, 3), torch.zeros(4, 5)), fp.ModelError, "PyTorch cannot export Linear"),
        (
            lambda: fp.from_torch(nn.Sequential(Deciding()), torch.zeros(3)),
            fp.ModelError,
            r"data-dependent.* \(test_from_torch\.py:\d+: return x if x\.sum\(\) > 0 else -x\)\. What depends",
        ),
        (
            lambda: session_of(nn.Linear(2, 3)).to_torch(nn.Linear(2, 4)),
            fp.SessionError,
            r"'weight' has the shape \[4, 2\]",
        ),
        (lambda: session_of(nn.Linear(2, 3)).to_torch(Images()), fp.SessionError, "Images has no tensor 'weight'"),
        (lambda: session_of(nn.Linear(2, 3)).to_torch(3), fp.UsageError, "takes a torch.nn.Module"),
    ],
)
def test_what_cannot_be_is_told(call: Callable[[], Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        call()


def session_of(module: Any) -> Any:
    return fp.compile(fp.from_torch(module, torch.zeros(4, 2))).bind()


@pytest.mark.parametrize("make", [Images, Words])
def test_a_trained_module_leaves_as_its_exported_program(make: Callable[[], Any], tmp_path: Path) -> None:
    """ONNX Runtime gives what the module gives once it has the weights."""
    torch.manual_seed(2)
    module, rng = make(), np.random.default_rng(3)
    x, target = (of_images if make is Images else of_words)(rng)
    graph = fp.from_torch(module, torch.from_numpy(x))
    session = fp.compile(graph, fp.losses.cross_entropy, fp.optim.AdamW(1e-2)).bind()
    (name,) = (slot.name for slot in session.program.inputs if slot.name not in ("target", "learning_rate"))
    for _ in range(3):
        session.step({name: x, "target": target})
    session.to_torch(module)
    session.to_onnx(tmp_path / "module.onnx")
    session.to_onnx(tmp_path / "graph.onnx", "graph")
    with torch.no_grad():
        wanted = module.eval()(torch.from_numpy(x)).numpy()
    for file in ("module.onnx", "graph.onnx"):
        (found,) = run(tmp_path / file, {name: x}).values()
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("seed", range(pick(1, 2, 20)))
@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize("kind", ["Conv", "ConvTranspose"])
def test_drawn_convolutions_come_in(kind: str, axes: int, seed: int) -> None:
    """Each with its own strides, paddings, dilations, groups, and with a bias or without."""
    rng = np.random.default_rng([seed, axes, len(kind)])
    draw = lambda low, high: tuple(int(n) for n in rng.integers(low, high, axes))  # noqa: E731
    groups, bias = int(rng.integers(1, 3)), bool((seed + axes) % 2)
    options: dict[str, Any] = {"stride": draw(1, 3), "padding": draw(0, 2), "dilation": draw(1, 3), "groups": groups}
    layer = getattr(nn, f"{kind}{axes}d")(4, 6, draw(1, 4), bias=bias, **options)
    module = nn.Sequential(layer, nn.ReLU(), getattr(nn, f"BatchNorm{axes}d")(6)).eval()
    x = torch.randn(2, 4, *draw(6, 9))
    (found,) = fp.compile(fp.from_torch(module, x)).bind(seed=0).step({"input": x.numpy()}).outputs.values()
    np.testing.assert_allclose(found, module(x).detach().numpy(), rtol=1e-4, atol=1e-5)


class Noisy(nn.Module):
    """Dropout as the exporter writes it out: in place, of channels, and of whole items."""

    def __init__(self, always: bool = False) -> None:
        super().__init__()
        self.always = always
        self.body, self.channels, self.head = nn.Linear(8, 8), nn.Dropout1d(0.3), nn.Linear(8, 4)
        self.inplace = nn.Dropout(0.2, inplace=True)

    def forward(self, x: Any) -> Any:
        y = self.channels(self.inplace(torch.relu(self.body(x))))
        if self.training:
            y = y * torch.empty(len(x), 1, 1).bernoulli_(0.75).div_(0.75)
        return self.head(y) + (torch.rand_like(x[..., :4]) if self.always else 0)


@pytest.mark.parametrize("target", ["numpy", "cpu:threads=1"])
def test_noise_of_training_is_drawn_in_training_alone(target: str) -> None:
    module, x = Noisy().eval(), torch.randn(16, 3, 8)
    graph = fp.from_torch(module, x)
    (found,) = fp.compile(graph, target=target).bind().step({"x": x.numpy()}).outputs.values()
    np.testing.assert_allclose(found, module(x).detach().numpy(), rtol=1e-4, atol=1e-5)
    session = fp.compile(graph, loss="mean", target=target).bind(seed=1)
    losses = [session.step({"x": x.numpy()}).loss for _ in range(300)]
    assert len(set(losses)) > 290
    assert abs(np.mean(losses) - module(x).mean().item()) < 5 * np.std(losses) / len(losses) ** 0.5


def test_noise_of_every_step_stays() -> None:
    module, x = Noisy(always=True).eval(), torch.randn(4, 3, 8)
    session = fp.compile(fp.from_torch(module, x), target="numpy").bind()
    first, second = (next(iter(session.step({"x": x.numpy()}).outputs.values())) for _ in range(2))
    assert not np.array_equal(first, second)


def test_draws_that_are_read_twice_stay_the_same_draws() -> None:
    """A dropout in the place of one reader would draw others."""

    class Marked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: Any) -> Any:
            if not self.training:
                return x
            kept = torch.empty_like(x).bernoulli_(0.5)
            return self.scale * x * (kept / 0.5) + 10 * kept

    x = np.ones((16, 8), np.float32)
    graph = fp.from_torch(Marked(), torch.from_numpy(x))
    (found,) = fp.compile(graph, target="numpy").bind().step({"x": x}).outputs.values()
    assert (found == x).all()
    session = fp.compile(graph, fp.losses.mean, outputs=list(graph.outputs), target="numpy").bind()
    (found,) = session.step({"x": x}).outputs.values()
    assert set(np.unique(found)) == {0.0, 12.0}
