"""How planning time grows: each stage on ever deeper transformers, then ResNet-50 and GPT-2 as they are trained.

    python benchmarks/scale.py [--nodes N]

Each row is a process of its own, with the compiled code's cache filled before: seconds of wall clock (of processor) of
building and differentiating the graph, of lowering, of planning without a budget and within 0.6 of the arena that this
needed, and of verifying the plan again; and the process's highest resident set. `foreplan.compile` does the first three
or four of these and no others. Writes scale.json and scale.svg beside this file.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from loglog import loglog

FOLDER = Path(__file__).resolve().parent
SIZES = (100, 1_000, 10_000, 100_000)
SHARE = 0.6  # budget over the arena without one
# A block of the transformer becomes 57 nodes of the training graph, what stands around the blocks 17.
BLOCK, AROUND = 57, 17
STAGES = ("graph", "lower", "plan", "budget", "verify")
MODELS = ("resnet50:batch=32", "gpt2_small:batch=4,seq=1024")


def transformer(nodes: int) -> str:
    """A model's name: a deep transformer whose training graph has at least `nodes` nodes, small enough in width that
    activations, not parameters, fill the arena."""
    layers = max(1, math.ceil((nodes - AROUND) / BLOCK))
    return f"gpt2_small:batch=8,seq=128,layers={layers},width=128,heads=4,vocabulary=1000"


def measure(model: str) -> dict[str, Any]:
    """Every stage on one model, in this process."""
    import foreplan as fp
    from foreplan.planner import verify

    seconds: dict[str, float] = {}
    processor: dict[str, float] = {}

    def stage(name: str, run: Callable[[], Any]) -> Any:
        wall, used = time.perf_counter(), time.process_time()
        result = run()
        seconds[name], processor[name] = time.perf_counter() - wall, time.process_time() - used
        return result

    loss = getattr(fp.losses, fp.models.default_loss(model))
    graph = stage("graph", lambda: fp.differentiate(fp.models.build(model), loss, fp.optim.Nesterov(0.1)))
    program = stage("lower", lambda: fp.lower(graph))
    free = stage("plan", lambda: fp.plan(program))
    budget = int(SHARE * fp.plan(program, remat="off").arena_bytes)
    tight = stage("budget", lambda: fp.plan(program, budget=budget))
    stage("verify", lambda: verify(tight, program))
    return {
        "model": model,
        "nodes": len(graph.nodes),
        "actions": len(program.actions),
        "seconds": seconds,
        "processor": processor,
        "arenas": [free.arena_bytes, tight.arena_bytes],
        "gaps": [found.arena_bytes / found.lower_bound_bytes - 1 for found in (free, tight)],
        "rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def in_a_process(model: str) -> dict[str, Any]:
    """`measure` in a fresh one."""
    command = [sys.executable, str(Path(__file__).resolve()), "--measure", model]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def row(found: dict[str, Any]) -> str:
    """One line of the table; the sums are what `compile` does without a budget, and with one."""
    cells = [f"{found['seconds'][name]:.2f} ({found['processor'][name]:.2f})" for name in STAGES]
    for last in ("plan", "budget"):
        parts = ("graph", "lower", last)
        wall, used = (sum(found[kind][part] for part in parts) for kind in ("seconds", "processor"))
        cells.append(f"{wall:.2f} ({used:.2f})")
    cells += [f"{max(found['gaps']):.3%}", f"{found['rss'] / 2**30:.2f} GiB"]
    return f"| `{found['model']}` | {found['nodes']:,} | {found['actions']:,} | {' | '.join(cells)} |"


def main() -> None:
    """Print the table and write the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=SIZES[-1], help="of the largest graph")
    parser.add_argument("--measure", metavar="MODEL", help="measure one model and print JSON")
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure)))
        return
    for model in (transformer(SIZES[0]), *MODELS):
        in_a_process(model)
    heads = ["model", "nodes", "actions", *STAGES, "compiled", "compiled in a budget", "over the bound", "resident"]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    rows = []
    for model in (*MODELS, *(transformer(size) for size in SIZES if size <= options.nodes)):
        rows.append(in_a_process(model))
        print(row(rows[-1]), flush=True)
    (FOLDER / "scale.json").write_text(json.dumps(rows, indent=1) + "\n")
    deep = rows[len(MODELS) :]
    lines = {name: [(found["nodes"], found["processor"][name]) for found in deep] for name in STAGES}
    start = (deep[-1]["nodes"], deep[-1]["processor"]["plan"])
    title = "Planning deep transformers: seconds of processor, by stage"
    text = loglog(title, "nodes of the training graph", "seconds", lines, start)
    (FOLDER / "scale.svg").write_text(text)


if __name__ == "__main__":
    main()
