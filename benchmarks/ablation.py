"""What each search of the planner brings: plans of ten models by the usual effort, and by it less one search each.

`python benchmarks/ablation.py [MODEL ...]` writes results/ablation.md and results/ablation.json. Budgets are
shares of the way from the least arena of the usual effort up to its arena without recomputation. Seconds are processor
time, of all threads together: without recomputation, with what is free, and the whole curve.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from pages import MIB, ROOT, change, put

import foreplan as fp
from foreplan.base.errors import DoesNotFitError
from foreplan.planner import Curve, plan, plan_curve
from foreplan.planner.effort import USUAL, WITHOUT, Effort

RESULTS = ROOT / "benchmarks" / "results" / "ablation.json"
MODELS = (
    "conv_chain:size=512",
    "mlp:batch=4096,width=256,layers=12",
    "vgg16:batch=16",
    "vit_b16:batch=8,layers=2",
    "gpt2_small:batch=4,layers=2",
    "bert_base:batch=8,layers=2",
    "resnet18:batch=16",
    "resnet50:batch=8",
    "mobilenet_v2:batch=8",
    "unet:batch=2",
)
SHARES = (0.75, 0.5, 0.25)


def measure(program: Any, effort: Effort, budgets: list[int] | None) -> tuple[dict[str, Any], list[int]]:
    """Bytes, predicted nanoseconds and seconds of one effort, and the budgets that were asked for."""
    started = time.process_time()
    off = plan(program, remat="off", effort=effort).arena_bytes
    free = plan(program, remat="auto", effort=effort).arena_bytes
    curve = plan_curve(program, effort=effort)
    seconds = time.process_time() - started
    least = min(curve.plan(index).arena_bytes for index in range(max(len(curve) - 3, 0), len(curve)))
    budgets = budgets or [round(least + share * (off - least)) for share in SHARES]
    times = [nanoseconds(program, curve, budget) for budget in budgets]
    found = {"off": off, "free": free, "least": least, "nanoseconds": times, "seconds": round(seconds, 2)}
    return found, budgets


def nanoseconds(program: Any, curve: Curve, budget: int) -> int | None:
    """Predicted for the plan within a budget; None where none is found."""
    try:
        return sum(program.actions[step.action].nanoseconds for step in curve.within(budget).steps)
    except DoesNotFitError:
        return None


def rows(name: str) -> dict[str, Any]:
    """One model by all efforts."""
    graph = fp.models.build(name)
    loss = getattr(fp.losses, fp.models.default_loss(name))
    program = fp.lower(fp.differentiate(graph, loss, fp.optim.Nesterov(0.1)))
    usual, budgets = measure(program, USUAL, None)
    efforts = {"usual": usual}
    efforts |= {f"no {switched}": measure(program, effort, budgets)[0] for switched, effort in WITHOUT.items()}
    return {"actions": len(program.actions), "budgets": budgets, "efforts": efforts}


def lines(name: str, found: dict[str, Any]) -> list[str]:
    """Of the table: what the usual effort finds, and by how much the others differ from it."""
    usual = found["efforts"]["usual"]
    made = []
    for effort, row in found["efforts"].items():
        if row is usual:
            cells = [f"{row[key] / MIB:,.1f} MiB" for key in ("off", "free", "least")]
            cells += [f"{time / 1e6:,.2f} ms" for time in row["nanoseconds"]]
        else:
            cells = [change(row[key], usual[key]) for key in ("off", "free", "least")]
            cells += [change(*pair) for pair in zip(row["nanoseconds"], usual["nanoseconds"])]
        head = [f"`{name}`, {found['actions']}" if row is usual else "", effort]
        made.append("| " + " | ".join([*head, *cells, f"{row['seconds']:.1f} s"]) + " |")
    return made


def write(results: dict[str, Any]) -> None:
    """Into the file of results, and as a table into the page."""
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    budgets = " | ".join(f"time at {share:.0%}" for share in SHARES)
    table = [f"| model, actions | effort | off | free | least | {budgets} | planned in |", "|---" * 9 + "|"]
    made = "\n".join(table + [line for name in MODELS if name in results for line in lines(name, results[name])])
    put("benchmarks/results/ablation.md", "ablation", made)


def main() -> None:
    """Measure the models that are named, or all; what is known of the others stays."""
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    plan_curve(fp.lower(fp.differentiate(fp.models.build("mlp"), fp.losses.cross_entropy)))  # loads what is compiled
    for name in sys.argv[1:] or MODELS:
        results[name] = rows(name)
        print("\n".join(lines(name, results[name])), flush=True)
        write(results)


if __name__ == "__main__":
    main()
