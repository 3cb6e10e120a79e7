"""Methods whose gradients do not go where code alone suggests: losses and weights of twenty steps are PyTorch's."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make setup-torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.nn.utils.parametrizations import spectral_norm  # noqa: E402

import foreplan as fp  # noqa: E402

STEPS = 20


class SimSiam(nn.Module):
    """Two views of an image are to predict each other, one of them detached (Chen and He 2021, arXiv:2011.10566)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
        self.predictor = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 8))

    def forward(self, one: Any, two: Any) -> Any:
        """The negative cosine of what is predicted and what is there."""
        y, z = self.encoder(one), self.encoder(two)
        ways = ((self.predictor(y), z.detach()), (self.predictor(z), y.detach()))
        return -sum(F.cosine_similarity(p, q).mean() for p, q in ways) / 2


class Quantizer(nn.Module):
    """An autoencoder whose codes are the nearest of a book, straight through (van den Oord et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode, self.book = nn.Linear(12, 4), nn.Linear(4, 12), nn.Embedding(7, 4)

    def forward(self, x: Any) -> Any:
        """Reconstruction, book and commitment."""
        z = self.encode(x)
        q = self.book(torch.cdist(z, self.book.weight).argmin(1))
        through = z + (q - z).detach()
        return F.mse_loss(self.decode(through), x) + F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(z, q.detach())


class Reverse(torch.autograd.Function):
    """Domain adaptation's (Ganin and Lempitsky 2015, arXiv:1409.7495)."""

    @staticmethod
    def forward(ctx: Any, x: Any, strength: float) -> Any:
        """As it is."""
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        """The other way."""
        return -ctx.strength * g, None


class Adapted(nn.Module):
    """Classes are told from features of which the domain is not to be told."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.classes, self.domain = nn.Linear(12, 8), nn.Linear(8, 3), nn.Linear(8, 2)

    def forward(self, x: Any, labels: Any, domains: Any) -> Any:
        """Both losses."""
        y = torch.tanh(self.features(x))
        return F.cross_entropy(self.classes(y), labels) + F.cross_entropy(self.domain(Reverse.apply(y, 0.3)), domains)


class Tagger(nn.Module):
    """A bidirectional LSTM over padded sentences, whose mean and loss leave the padding out."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 6, padding_idx=0)
        self.lstm, self.tags = nn.LSTM(6, 5, 2, bidirectional=True, batch_first=True), nn.Linear(10, 4)

    def forward(self, ids: Any, tags: Any) -> Any:
        """Of all words, and of each sentence as a whole."""
        y, _ = self.lstm(self.words(ids))
        mask = (ids != 0).unsqueeze(-1)
        mean = (y * mask).sum(1) / mask.sum(1)
        scores = self.tags(y + mean.unsqueeze(1))
        return F.cross_entropy(scores.transpose(1, 2), tags.masked_fill(ids == 0, -100))


class Distilled(nn.Module):
    """A student, and its average, which moves on within forward (Grill et al. 2020, arXiv:2006.07733)."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.head = nn.Linear(12, 6), nn.Linear(6, 6)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, one: Any, two: Any) -> Any:
        """How far a prediction from one view is from what the teacher says of the other."""
        with torch.no_grad():
            for old, new in zip(self.teacher.parameters(), self.student.parameters()):
                old.mul_(0.95).add_(new, alpha=0.05)
            wanted = F.normalize(self.teacher(two))
        return F.mse_loss(F.normalize(self.head(torch.tanh(self.student(one)))), wanted)


def two_views(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    x = rng.normal(size=(16, 12))
    return tuple((x + 0.1 * rng.normal(size=x.shape)).astype(np.float32) for _ in range(2))


def sentences(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    ids = rng.integers(1, 11, (5, 7))
    for row, length in zip(ids, rng.integers(2, 8, 5)):
        row[length:] = 0
    return ids, rng.integers(0, 4, (5, 7))


def labelled(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    return rng.normal(size=(16, 12)).astype(np.float32), rng.integers(0, 3, 16), rng.integers(0, 2, 16)


METHODS: dict[str, tuple[Any, Any]] = {
    "SimSiam": (SimSiam, two_views),
    "VQ-VAE": (Quantizer, lambda rng: (rng.normal(size=(16, 12)).astype(np.float32),)),
    "DANN": (Adapted, labelled),
    "padded BiLSTM": (Tagger, sentences),
    "teacher": (Distilled, two_views),
}


def assert_same_state(session: Any, theirs: Any) -> None:
    state = session.state_dict()
    for name, tensor in theirs.state_dict().items():
        np.testing.assert_allclose(state[name], tensor.numpy(), rtol=1e-3, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("target", ["numpy", pytest.param("cpu:threads=1", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("name", METHODS)
def test_twenty_steps(name: str, target: str) -> None:
    make, draw = METHODS[name]
    torch.manual_seed(0)
    theirs = make()
    rng = np.random.default_rng(0)
    batches = [draw(rng) for _ in range(STEPS)]
    graph = fp.from_torch(copy.deepcopy(theirs), *map(torch.from_numpy, batches[0]))
    session = fp.compile(graph, lambda output: output, fp.optim.Momentum(0.05, 0.9), target=target).bind()
    optimizer = torch.optim.SGD([p for p in theirs.parameters() if p.requires_grad], 0.05, momentum=0.9)
    names = [value.name for value in graph.inputs]
    for batch in batches:
        loss = theirs(*map(torch.from_numpy, batch))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert session.step(dict(zip(names, batch))).loss == pytest.approx(loss.item(), rel=1e-4, abs=1e-6)
    assert_same_state(session, theirs)


class Adversaries(nn.Module):
    """A generator, and a discriminator with spectral norm (Miyato et al. 2018, arXiv:1802.05957), by turns."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 12))
        self.discriminator = nn.Sequential(
            spectral_norm(nn.Linear(12, 8)), nn.LeakyReLU(0.2), spectral_norm(nn.Linear(8, 1))
        )
        self.turn = "discriminator"

    def forward(self, real: Any, noise: Any) -> Any:
        """The hinge loss of the one whose turn it is."""
        made = self.generator(noise)
        if self.turn == "generator":
            return -self.discriminator(made).mean() + 0 * real.mean()
        told = self.discriminator(torch.cat([real, made.detach()]))
        return F.relu(1 - told[: len(real)]).mean() + F.relu(1 + told[len(real) :]).mean()


def test_two_networks_take_turns() -> None:
    """Two steps of one module share all that they keep; each trains its own."""
    torch.manual_seed(0)
    theirs, rng = Adversaries(), np.random.default_rng(0)
    batches = [
        (rng.normal(size=(8, 12)).astype(np.float32), rng.normal(size=(8, 4)).astype(np.float32)) for _ in range(STEPS)
    ]
    sessions: dict[str, Any] = {}
    for turn, other in (("discriminator", "generator"), ("generator", "discriminator")):
        ours = copy.deepcopy(theirs)
        ours.turn = turn
        graph = fp.from_torch(ours, *map(torch.from_numpy, batches[0]), freeze=[other])
        step = fp.compile(graph, lambda output: output, fp.optim.SGD(0.05), target="numpy")
        sessions[turn] = step.bind(share=sessions.get(other))
    optimizers = {turn: torch.optim.SGD(getattr(theirs, turn).parameters(), 0.05) for turn in sessions}
    for batch in batches:
        for turn, session in sessions.items():
            theirs.turn = turn
            loss = theirs(*map(torch.from_numpy, batch))
            theirs.zero_grad()
            loss.backward()
            optimizers[turn].step()
            found = session.step(dict(zip(("real", "noise"), batch)))
            assert found.loss == pytest.approx(loss.item(), rel=1e-4, abs=1e-6)
    for session in sessions.values():
        assert_same_state(session, theirs)
