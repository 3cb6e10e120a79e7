"""The losses that have a name, with their defaults."""

from __future__ import annotations

from foreplan.base.arguments import choice
from foreplan.frontend.losses.classes import CrossEntropy, NegativeLogLikelihood
from foreplan.frontend.losses.elements import (
    BinaryCrossEntropy,
    Huber,
    KLDivergence,
    MeanAbsoluteError,
    MeanSquaredError,
)
from foreplan.frontend.losses.embeddings import CosineEmbedding, TripletMargin
from foreplan.frontend.losses.loss import Loss
from foreplan.frontend.losses.results import Mean, Sum

cross_entropy = CrossEntropy()
nll = NegativeLogLikelihood()
binary_cross_entropy = BinaryCrossEntropy()
mse = MeanSquaredError()
l1 = MeanAbsoluteError()
huber = Huber()
kl_div = KLDivergence()
cosine_embedding = CosineEmbedding()
triplet_margin = TripletMargin()
mean = Mean()
sum = Sum()

_ALL: tuple[Loss, ...] = (
    cross_entropy,
    nll,
    binary_cross_entropy,
    mse,
    l1,
    huber,
    kl_div,
    cosine_embedding,
    triplet_margin,
    mean,
    sum,
)
LOSSES: dict[str, Loss] = {loss.name: loss for loss in _ALL}


def named(name: str) -> Loss:
    """The loss of that name, with its defaults.

    Raises:
        UsageError: there is none; lists those there are.
    """
    return LOSSES[choice("loss", name, LOSSES)]
