"""What kernels of the CPU engine reach, beside what this machine can do: a large product, and a stream copy.

    python benchmarks/roofline.py

A row a class of kernels of a training step: its share of the step's time, operations and bytes a second (the bytes that
it must read and write, each once), and how near that comes to the roofline of its own operations and bytes (Williams,
Waterman and Patterson, 2009). One thread; each instruction's least time of several steps. The machine is measured
before and after every model, and its best counts. Writes the tables into docs/cpu.md.
"""

from __future__ import annotations

from collections import defaultdict

from pages import put

import foreplan as fp
from foreplan.frontend.losses import attach_loss
from foreplan.runtime.cpu.machine import SIDE, measured
from foreplan.runtime.inputs import made_up

MODELS = ("resnet50:batch=8", "gpt2_small:layers=4,batch=2,seq=256")
STEPS = 5


def rows(model: str) -> tuple[list[str], tuple[float, float]]:
    """The table of one model, and what the machine did meanwhile."""
    before = measured(1)
    graph = attach_loss(fp.models.build(model), fp.models.default_loss(model))
    step = fp.compile(graph, optimizer=fp.optim.Nesterov(1e-4), target="cpu:threads=1")
    session = step.bind()
    data = made_up(session.program)
    session.step(data)
    steps = [session.trace(data)[1] for _ in range(STEPS)]
    least = [min(runs, key=lambda timing: timing.seconds) for runs in zip(*steps)]
    flops, stream = (max(pair) for pair in zip(before, measured(1)))
    seconds, operations, moved, bound, count = (defaultdict[str, float](float) for _ in range(5))
    for timing in least:
        seconds[timing.op] += timing.seconds
        operations[timing.op] += timing.flops
        moved[timing.op] += timing.nbytes
        bound[timing.op] += max(timing.flops / flops, timing.nbytes / stream)
        count[timing.op] += 1
    whole = sum(seconds.values())
    lines = [
        f"| `{op}` | {count[op]:.0f} | {found / whole:.1%} | {operations[op] / found / 1e9:.0f} | "
        f"{moved[op] / found / 1e9:.1f} | {bound[op] / found:.0%} |"
        for op, found in sorted(seconds.items(), key=lambda pair: -pair[1])
        if found > 0.002 * whole
    ]
    total = f"| all | {len(least)} | 100 % | {sum(operations.values()) / whole / 1e9:.0f} | "
    total += f"{sum(moved.values()) / whole / 1e9:.1f} | {sum(bound.values()) / whole:.0%} |"
    return [*lines, total], (flops, stream)


def main() -> None:
    text = []
    for model in MODELS:
        lines, (flops, stream) = rows(model)
        text += [
            f"A training step of `{model}`, where a product of two matrices of {SIDE:,} rows and columns reached "
            f"{flops / 1e9:.0f} GFLOP/s and a copy {stream / 1e9:.1f} GB/s:",
            "",
            "| kernels | runs | time | GFLOP/s | GB/s | of the roofline |",
            "|---|---|---|---|---|---|",
            *lines,
            "",
        ]
    table = "\n".join(text)
    print(table)
    put("docs/cpu.md", "roofline", table)


if __name__ == "__main__":
    main()
