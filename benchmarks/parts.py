"""Steps in parts beside whole ones: arena in MiB, and time as a ratio; predicted, and measured on the cpu engine.

`python -m benchmarks.parts` prints the tables of docs/parts.md that are of parts of the batch, and of measured steps:
processor time of one thread, turns of both steps interleaved.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np

import foreplan as fp
from foreplan.base.units import parse_budget
from foreplan.compiler.compiled import Compiled
from tests.compiler.chains import chain

MIB = 1 << 20
TURNS = 4  # of which the first warms up
TARGET = "cpu:threads=1"
BATCHES = {
    "gpt2_small": "1906MiB",
    "bert_base": "1795MiB",
    "vit_b16": "2053MiB",
    "convnext_tiny": "1612MiB",
    "swin_t": "1459MiB",
    "mixer_b16": "1498MiB",
    "t5_small": "947MiB",
    "ddpm_unet": "629MiB",
}  # 15 % below what recomputation reaches at 5 % more time


def row(name: str, compile_with: Callable[..., Compiled], budget: str) -> str:
    """One line of the table."""
    whole, parts = compile_with(remat="off", fission="off"), compile_with(budget=budget)
    assert whole.graph is not None
    rng = np.random.default_rng(0)
    given = {
        x.name: rng.normal(size=x.shape).astype(x.dtype.numpy) if x.dtype.is_float else rng.integers(0, 1000, x.shape)
        for x in whole.graph.inputs
        if x.init is None
    }
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


def batch_row(name: str, budget: str) -> str:
    """One line of the table of parts of the batch: predicted, for numpy."""
    arguments = fp.models.build(name), fp.models.default_loss(name), fp.optim.Nesterov(0.1)
    whole = fp.compile(*arguments, remat="off", fission="off").estimate()["predicted_seconds"]
    free = fp.compile(*arguments).arena_bytes / MIB
    found = [fp.compile(*arguments, budget=budget, fission=fission) for fission in ("auto", "off")]
    times = [f"{step.estimate()['predicted_seconds'] / whole - 1:+.1%}".replace("%", " %") for step in found]
    allowed = f"{parse_budget(budget) / MIB:,.0f}"
    return " | ".join([f"| `{name}`", f"{free:,.0f}", allowed, f"{found[0].arena_bytes / MIB:,.0f}", *times]) + " |"


def main() -> None:
    print("| model | MiB, no budget | budget | MiB | added time | by recomputation alone |")
    print("|---|---|---|---|---|---|")
    for name, budget in BATCHES.items():
        print(batch_row(name, budget), flush=True)
    print()
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
    for name, budget in (("vit_b16:batch=16", "1500MiB"), ("convnext_tiny:batch=8", "620MiB")):
        arguments = fp.models.build(name), fp.models.default_loss(name), fp.optim.Nesterov(0.01)
        print(row(f"`{name}`, training", partial(fp.compile, *arguments, target=TARGET), budget), flush=True)
    for activation, budget in (("ReLU", "265MiB"), ("GELU", "295MiB"), ("batch norm and ReLU", "300MiB")):
        arguments = chain(activation, 512), fp.losses.mse, fp.optim.Nesterov(0.01)
        made = partial(fp.compile, *arguments, target=TARGET)
        print(row(f"chain with {activation}, 512 × 512, training", made, budget), flush=True)


if __name__ == "__main__":
    main()
