"""What each process of a job does, which has a card of its own: `tests/gpu/test_on_cards.py` starts it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

import foreplan as fp
from foreplan.runtime.ranks import World, current
from tests.gpu.exchanges import given, kinds, of_one
from tests.ranks.threads import run
from tests.ranks.training import Batch, batches_for, own_part

STEPS, MICRO_BATCHES = 5, 4
STAGED = "mlp:width=512,layers=3,batch=8"


def wrong_collectives(world: World) -> list[str]:
    """The collectives, by name, that give something else than ranks give that are threads on the host: none."""
    wrong = []
    for shape in ((6 * world.size, 5), (1000 * world.size, 300)):
        inputs = given(world.size, shape)
        for name, op in kinds(world.size).items():
            host, card = (fp.compile(of_one(op, shape), target=target) for target in ("numpy", "cuda"))
            found = outputs(card, inputs, world)
            for one, other in zip(run(world.size, partial(outputs, host, inputs))[world.rank], found):
                wrong += [f"{name} of {shape}" for key in one if one[key].tobytes() != other[key].tobytes()]
    return wrong


def outputs(step: fp.Compiled, inputs: Sequence[Mapping[str, np.ndarray]], world: World) -> list[dict[str, np.ndarray]]:
    """What a rank's session gives, of its own inputs and then of others': first call by call, and then as a graph."""
    session = step.bind()
    return [dict(session.step(inputs[(world.rank + turn) % world.size]).outputs) for turn in range(3)]


def trained(world: World, shard: str) -> dict[str, Any]:
    """Losses of a training step on cards: captured, captured again, call by call, and of a trace; and whether all
    ranks have the same weights.
    """
    step = fp.compile(
        fp.models.build("mlp:width=512,layers=3,batch=16"),
        fp.losses.cross_entropy,
        fp.optim.AdamW(0.001),
        target="cuda",
        ranks=world.size,
        shard=shard,
    )
    mine = [own_part(batch, world.rank, world.size) for batch in batches_for(step, 16 * world.size, STEPS)]
    ways: dict[str, dict[str, bool]] = {"captured": {}, "again": {}, "call by call": {"capture": False}}
    losses = {}
    for way, how in ways.items():
        session = step.bind(seed=1, **how)  # type: ignore[arg-type]
        losses[way] = [session.step(batch).loss for batch in mine]
        weights = {name: array.tobytes() for name, array in session.parameters.items()}
    traced = step.bind(seed=1)
    losses["traced"] = [traced.trace(batch)[0].loss for batch in mine]
    return {"losses": losses, "alike": len({tuple(sorted(each.items())) for each in world.gather(weights)}) == 1}


def in_stages(world: World) -> dict[str, list[float]]:
    """Losses of a step in stages, one on each card: captured, call by call, and of a trace."""
    step = fp.compile(
        fp.models.build(STAGED),
        fp.losses.cross_entropy,
        fp.optim.Momentum(0.01),
        target="cuda",
        accumulate=MICRO_BATCHES,
        ranks=world.size,
        stages=world.size,
        stage=world.rank,
    )
    names = [slot.name for slot in step.program.required_inputs]
    batches = [{name: batch[name] for name in names} for batch in micro_batches()]
    losses = {}
    for way, how in (("captured", {}), ("call by call", {"capture": False})):
        session = step.bind(seed=1, **how)  # type: ignore[arg-type]
        losses[way] = [session.step(batch).loss for batch in batches]
    traced = step.bind(seed=1)
    losses["traced"] = [traced.trace(batch)[0].loss for batch in batches]
    return losses  # type: ignore[return-value]


def micro_batches() -> list[Batch]:
    """What the steps in stages take, the same on all ranks and in one process."""
    step = fp.compile(fp.models.build(STAGED), fp.losses.cross_entropy, fp.optim.SGD(0.01), target="numpy")
    samples = MICRO_BATCHES * step.program.required_inputs[0].operand.type.shape[0]
    return [own_part(batch, 0, 1, MICRO_BATCHES) for batch in batches_for(step, samples, STEPS)]


TASKS: dict[str, Callable[..., Any]] = {"collectives": wrong_collectives, "training": trained, "stages": in_stages}


def main(task: str, *words: str) -> None:
    """Do it, and let rank 0 print what each has found."""
    world = current()
    told = world.gather(TASKS[task](world, *words))
    if world.rank == 0:
        print(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
