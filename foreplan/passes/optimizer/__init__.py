"""Optimizers (`foreplan.optim`): a state and a formula each, their learning rates, and how updates get into a graph.

rule        what an optimizer states; what all of them can do: clipping, groups, averages of weights
descent     SGD, Momentum, Nesterov, Lion
adaptive    Adagrad, RMSprop, Adam, AdamW, NAdam
adafactor, lamb, muon
            those that need more of a tensor than one element
sparse_adam Adam of the rows of tables that are read
schedule    learning rates as functions of the number of updates
site        the place of one update in a graph
rows        gradients of tables that are rows alone
norms       sums of squares
updater     adds the updates of all parameters
"""

from foreplan.passes.optimizer.adafactor import Adafactor
from foreplan.passes.optimizer.adaptive import Adagrad, Adam, AdamW, NAdam, RMSprop
from foreplan.passes.optimizer.descent import SGD, Lion, Momentum, Nesterov
from foreplan.passes.optimizer.lamb import LAMB
from foreplan.passes.optimizer.muon import Muon
from foreplan.passes.optimizer.rule import Group, Optimizer
from foreplan.passes.optimizer.schedule import (
    Schedule,
    constant,
    cosine,
    inverse_sqrt,
    joined,
    linear,
    one_cycle,
    polynomial,
    staircase,
)
from foreplan.passes.optimizer.sparse_adam import SparseAdam

__all__ = [
    "LAMB",
    "SGD",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Group",
    "Lion",
    "Momentum",
    "Muon",
    "NAdam",
    "Nesterov",
    "Optimizer",
    "RMSprop",
    "Schedule",
    "SparseAdam",
    "constant",
    "cosine",
    "inverse_sqrt",
    "joined",
    "linear",
    "one_cycle",
    "polynomial",
    "staircase",
]


def __dir__() -> list[str]:
    return sorted(__all__)
