"""What kernels of the CPU engine reach, beside what this machine can do: a large product, and a stream copy.

    python benchmarks/roofline.py

A row a kernel of a training step, as `foreplan profile` measures it with one thread: its share of the step's time,
operations and bytes a second (the bytes that it must read and write, each once), and how near that comes to the
roofline of its own operations and bytes (Williams, Waterman and Patterson, 2009). Writes the tables into
benchmarks/results/cpu.md.
"""

from __future__ import annotations

from pages import put

import foreplan as fp
from foreplan.frontend.losses import attach_loss
from foreplan.runtime.cpu.machine import SIDE, this_machine
from foreplan.runtime.inputs import made_up

MODELS = ("resnet50:batch=8", "gpt2_small:layers=4,batch=2,seq=256")
LEAST = 0.005  # of the time: rows below it are left out


def table(model: str) -> list[str]:
    """The rows of one model, below what the machine did meanwhile."""
    graph = attach_loss(fp.models.build(model), fp.models.default_loss(model))
    session = fp.compile(graph, optimizer=fp.optim.Nesterov(1e-4), target="cpu:threads=1").bind()
    found = session.profile(made_up(session.program))
    whole, peak = found.seconds, found.peak
    lines = [
        f"A training step of `{model}` ({this_machine().instruction_set}), where a product of two matrices of {SIDE:,} "
        f"rows and columns reached {peak.flops_per_second / 1e9:.0f} GFLOP/s and a copy "
        f"{peak.bytes_per_second / 1e9:.1f} GB/s:",
        "",
        "| kernels | runs | time | predicted | GFLOP/s | GB/s | of the roofline |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in found.by_kernel():
        if each.seconds > LEAST * whole:
            shares = f"{each.seconds / whole:.1%} | {each.predicted_seconds / whole:.1%}"
            rates = f"{each.flops / each.seconds / 1e9:.0f} | {each.nbytes / each.seconds / 1e9:.1f}"
            lines.append(f"| `{each.name}` | {each.count} | {shares} | {rates} | {each.peak_ratio:.0%} |")
    return [*lines, ""]


def main() -> None:
    text = "\n".join(line for model in MODELS for line in table(model))
    print(text)
    put("benchmarks/results/cpu.md", "roofline", text)


if __name__ == "__main__":
    main()
