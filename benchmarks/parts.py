"""Steps in parts beside whole ones on the cpu engine: arena in MiB, and processor time of one thread as a ratio.

`python -m benchmarks.parts` prints the rows of the table in docs/parts.md. Turns of both steps are interleaved.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np

import foreplan as fp
from foreplan.compiled import Compiled
from tests.foreplan.chains import chain

MIB = 1 << 20
TURNS = 4  # of which the first warms up
TARGET = "cpu:threads=1"


def row(name: str, compile_with: Callable[..., Compiled], budget: str) -> str:
    """One line of the table."""
    whole, parts = compile_with(remat="off", fission="off"), compile_with(budget=budget)
    assert whole.graph is not None
    rng = np.random.default_rng(0)
    given = {x.name: rng.normal(size=x.shape).astype(x.dtype.numpy) for x in whole.graph.inputs if x.init is None}
    sessions = [step.bind(seed=1) for step in (whole, parts)]
    seconds: list[list[float]] = [[], []]
    for _ in range(TURNS):
        for session, own in zip(sessions, seconds):
            started = time.process_time()
            session.step(given)
            own.append(time.process_time() - started)
    one, other = (statistics.median(own[1:]) for own in seconds)
    predicted = [step.estimate()["predicted_seconds"] for step in (whole, parts)]
    arenas = [step.arena_bytes / MIB for step in (whole, parts)]
    ratios = [other / one, predicted[1] / predicted[0]]
    return " | ".join([f"| {name}", *(f"{x:,.0f}" for x in arenas), *(f"{x:.2f}" for x in ratios)]) + " |"


def main() -> None:
    print("| model | MiB, whole | MiB, in parts | time, measured | predicted |")
    print("|---|---|---|---|---|")
    for name, budget in (
        ("resnet50:batch=32", "220MiB"),
        ("vgg16:batch=8", "610MiB"),
        ("unet:batch=4,size=256", "200MiB"),
    ):
        print(
            row(f"`{name}`, inference", partial(fp.compile, fp.models.build(name), target=TARGET), budget), flush=True
        )
    for activation, budget in (("ReLU", "265MiB"), ("GELU", "295MiB"), ("batch norm and ReLU", "300MiB")):
        arguments = chain(activation, 512), fp.losses.mse, fp.optim.Nesterov(0.01)
        made = partial(fp.compile, *arguments, target=TARGET)
        print(row(f"chain with {activation}, 512 × 512, training", made, budget), flush=True)


if __name__ == "__main__":
    main()
