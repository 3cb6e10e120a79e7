"""What passes are told: what is asked for, and of which target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from foreplan.base.patterns import AS_THE_MODEL, Selection
from foreplan.graph import DType, Graph
from foreplan.graph.types import FLOAT32
from foreplan.passes.autodiff import Consume
from foreplan.passes.decompose import Machine
from foreplan.passes.micro_batches import Accumulation
from foreplan.passes.ranks import ALONE, WHOLE, Beside, Ranks, Sharding, Storage, always
from foreplan.passes.split_samples import is_to_loss


class Fission(StrEnum):
    """What of a training step runs in parts without being named."""

    OFF = "off"  # nothing
    CHANNELS = "channels"  # dominant activations between convolutions (`split_channels`)
    PIECES = "pieces"  # all large activations between convolutions (`split_pieces`)
    FEW = "few"  # layers up to the loss, and back from it (`split_few`)
    SAMPLES = "samples"  # the same, in as many parts as help (`split_samples`)
    ROWS = "rows"  # these, and large logits (`split_logits`)
    BANDS = "bands"  # rows of images up to the loss, and back from it (`split_bands`)


@dataclass(frozen=True)
class Settings:
    """The settings of the passes.

    Attributes:
        outputs: what a step returns beside the loss; None: all of the model's.
        attach: adds the loss to the forward graph; None: it has one, or none is wanted.
        trains: whether the graph becomes a training step.
        consume: what becomes of the gradients; None: the step returns them.
        accumulation: of micro-batches, for one of which the graph runs.
        dtype: the element type of computations that may be narrow.
        machine: the target, for passes of its stage.
        selection: the weights that the user wants trained, or frozen.
        gradients: the inputs whose gradients a step returns.
        narrow_weights: whether parameters stay narrow where the model has them so.
        frozen_statistics: whether all batch normalisation keeps and uses its running statistics.
        shared_statistics: whether batch normalisation takes the statistics of all ranks' batches.
        loops: whether the target has loops.
        split: segments that run in parts: scopes, and the number of parts of each.
        fission: what else of a training step runs in parts.
        bands: in how many, if it is bands of images.
        ranks: that train together.
        sharding: what they hold parts of; None: nothing.
        storage: how inference has its weights.
        stage: makes the step of one stage of the forward graph: where it trains, in place of `differentiate`.
        beside: whether an exchange goes on while the target computes.
    """

    outputs: tuple[str, ...] | None = None
    attach: Callable[[Graph], Graph] | None = None
    trains: bool = False
    consume: Consume | None = None
    accumulation: Accumulation | None = None
    dtype: DType = FLOAT32
    machine: Machine | None = None
    selection: Selection = AS_THE_MODEL
    gradients: tuple[str, ...] = ()
    narrow_weights: bool = False
    frozen_statistics: bool = False
    shared_statistics: bool = False
    loops: bool = True
    split: tuple[tuple[str, int], ...] = ()
    fission: Fission = Fission.OFF
    bands: int = 0
    ranks: Ranks = ALONE
    sharding: Sharding | None = None
    storage: Storage = WHOLE
    stage: Callable[[Graph], Graph] | None = None
    beside: Beside = always

    @property
    def to_loss(self) -> dict[str, int]:
        """What of `split` ends in the loss."""
        return {entry: count for entry, count in self.split if self.trains and is_to_loss(entry)}

    @property
    def segments(self) -> dict[str, int]:
        """The rest of `split`."""
        return {entry: count for entry, count in self.split if entry not in self.to_loss}
