"""What becomes of gradients, on one rank and on several."""

from __future__ import annotations

from dataclasses import dataclass

from foreplan.passes.autodiff import Consume, MakeUpdater, updating
from foreplan.passes.optimizer import Optimizer
from foreplan.passes.ranks.buckets import summing
from foreplan.passes.ranks.setting import Ranks
from foreplan.passes.ranks.sharding import Sharding


@dataclass(frozen=True)
class GradientUses:
    """What uses the gradients of a step.

    Attributes:
        of_step: of one without micro-batches.
        of_micro_batch: of each micro-batch.
        of_sums: of the sums over micro-batches.
        sharding: what ranks hold parts of; None: nothing.
    """

    of_step: Consume
    of_micro_batch: Consume
    of_sums: Consume
    sharding: Sharding | None = None


def uses_of_gradients(
    optimizer: Optimizer, ranks: Ranks, add_up: Consume, update: MakeUpdater | None = None
) -> GradientUses:
    """How ranks use gradients: they sum up those of all micro-batches at once, unless each rank keeps only its part of
    the sums.

    Args:
        add_up: makes what adds up the gradients of micro-batches.
        update: makes what updates parameters; None: as the optimizer does.
    """
    update = updating(optimizer) if update is None else update
    if ranks.count == 1:
        return GradientUses(update, add_up, update)
    if ranks.shard == "none":
        use = summing(update, ranks)
        return GradientUses(use, add_up, use)
    sharding = Sharding(ranks, optimizer, update)
    use = sharding.reducing(sharding.updating)
    if ranks.shard == "state":
        return GradientUses(use, add_up, use, sharding)
    return GradientUses(use, sharding.reducing(add_up), sharding.updating, sharding)
