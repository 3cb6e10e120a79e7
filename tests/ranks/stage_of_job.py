"""One stage of a job: trains some steps, and prints what it came to as JSON.

mpiexec -n 3 python -m tests.ranks.stage_of_job
"""

from __future__ import annotations

import json

import numpy as np

import foreplan as fp
from foreplan.runtime.ranks import current

MODEL, MICRO_BATCHES, STEPS = "mlp:width=24,layers=3,batch=4", 5, 3


def batches() -> list[dict[str, np.ndarray]]:
    """The same on every rank."""
    rng = np.random.default_rng(7)
    shape = (MICRO_BATCHES, 4)
    return [
        {"x": rng.standard_normal((*shape, 784), np.float32), "target": rng.integers(0, 10, shape)}
        for _ in range(STEPS)
    ]


def main() -> None:
    """Train, and print losses and the sums of weights by name; the first rank prints those of all."""
    world = current()
    step = fp.compile(
        fp.models.build(MODEL),
        fp.losses.cross_entropy,
        fp.optim.AdamW(0.01, clip_norm=0.5),
        target="numpy",
        accumulate=MICRO_BATCHES,
        ranks=world.size,
        stages=world.size,
        stage=world.rank,
    )
    session = step.bind(seed=1)
    names = [slot.name for slot in step.program.required_inputs]
    losses = [session.step({name: batch[name] for name in names}).loss for batch in batches()]
    found = world.gather((losses, {name: float(np.abs(value).sum()) for name, value in session.parameters.items()}))
    if world.rank == 0:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
