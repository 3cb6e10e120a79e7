"""The order in which a stage runs its micro-batches forward and backward."""

from __future__ import annotations

from typing import NamedTuple


class Unit(NamedTuple):
    """One micro-batch, through one stage.

    Attributes:
        forward: whether it goes forward; else back.
        number: of the micro-batch, from 0 on.
    """

    forward: bool
    number: int


def units_of(stage: int, stages: int, micro_batches: int) -> tuple[Unit, ...]:
    """One forward, one backward (1F1B): a stage runs as many micro-batches forward as there are stages from it on, and
    from then on one back and one forward in turn. So it keeps the activations of no more than these.

    Reference: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC
    2021, section 2.2; there as PipeDream-Flush.
    """
    ahead = min(stages - stage, micro_batches)
    found = [Unit(True, number) for number in range(ahead)]
    for number in range(micro_batches):
        found.append(Unit(False, number))
        if ahead + number < micro_batches:
            found.append(Unit(True, ahead + number))
    return tuple(found)
