"""Losses (`foreplan.losses`): by themselves with their defaults, or made with others, as `CrossEntropy(axis=1)`.

loss        what a loss is
classes     of scores for classes: cross-entropy, negative log-likelihood
elements    means over all elements: squared error, binary cross-entropy, …
embeddings  of distances between vectors
ctc         of labels without places in time
results     of outputs that are losses themselves
final       a softmax or sigmoid that ends a model, taken into the loss
attach      adds a loss to a model
"""

from foreplan.frontend.losses.attach import attach_loss as attach_loss
from foreplan.frontend.losses.classes import CrossEntropy, NegativeLogLikelihood
from foreplan.frontend.losses.ctc import CTC
from foreplan.frontend.losses.elements import (
    BinaryCrossEntropy,
    Huber,
    KLDivergence,
    MeanAbsoluteError,
    MeanSquaredError,
)
from foreplan.frontend.losses.embeddings import CosineEmbedding, TripletMargin
from foreplan.frontend.losses.loss import Loss as Loss
from foreplan.frontend.losses.named import (
    LOSSES as LOSSES,
)
from foreplan.frontend.losses.named import (
    binary_cross_entropy,
    cosine_embedding,
    cross_entropy,
    huber,
    kl_div,
    l1,
    mean,
    mse,
    nll,
    sum,
    triplet_margin,
)
from foreplan.frontend.losses.results import Mean, Sum

__all__ = [
    "CTC",
    "BinaryCrossEntropy",
    "CosineEmbedding",
    "CrossEntropy",
    "Huber",
    "KLDivergence",
    "Mean",
    "MeanAbsoluteError",
    "MeanSquaredError",
    "NegativeLogLikelihood",
    "Sum",
    "TripletMargin",
    "binary_cross_entropy",
    "cosine_embedding",
    "cross_entropy",
    "huber",
    "kl_div",
    "l1",
    "mean",
    "mse",
    "nll",
    "sum",
    "triplet_margin",
]


def __dir__() -> list[str]:
    return sorted(__all__)
