"""What a process holds on the host beside the arena, stage by stage, and what `memory.peak` says of it.

    python benchmarks/resident.py [--only NAME] [--target numpy,cpu] [--threads 1] [--cold]

Each row is a process of its own, measured by what Linux says of it (/proc/self/smaps): one that compiles a step and
runs it, and one that loads the plan which the first has saved. The first process of a row makes the compiled code that
the cache lacks, and is not counted; with `--cold` it has an empty cache, and is the one row. Writes resident.json
beside this file, with every stage and what holds it, and a table into docs/memory.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from pages import MIB, put

FOLDER = Path(__file__).resolve().parent
HEAD = (
    "| step | threads | process | arena | outside, predicted | resident beside the arena | off |",
    "|---|---|---|---|---|---|---|",
)
CASES = {
    "mlp training, width 64": ("mlp:width=64,batch=16", True),
    "mlp training": ("mlp", True),
    "conv_chain training, 256": ("conv_chain:size=256", True),
    "resnet18 inference, batch 1": ("resnet18:batch=1", False),
    "resnet18 training, batch 8, 112": ("resnet18:batch=8,size=112", True),
    "unet training, 128": ("unet:batch=1,size=128", True),
    "gpt2 training, 4 layers, 128": ("gpt2_small:layers=4,batch=1,seq=128", True),
    "bert training, 4 layers, 128": ("bert_base:layers=4,batch=1,seq=128", True),
}
STEPS, LONGEST = 100, 5  # of a process; seconds after which no more steps are made
HOLDERS = {  # of mapped files, by a part of the name
    "LLVM": "llvmlite", "OpenBLAS": "openblas", "oneDNN": "libdnnl", "OpenMP": "libgomp",
    "NumPy": "/numpy/", "Python": "/python", "libstdc++": "libstdc++",
}  # fmt: skip


def holders() -> dict[str, int]:
    """Resident bytes of this process by what holds them: a library, the heap, stacks, code made here, other memory."""
    found: dict[str, int] = {}
    holder = ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            _, permissions, _, _, _, *rest = line.split(None, 5)
            name = rest[0] if rest else ""
            if name.startswith("/"):
                holder = next((holder for holder, part in HOLDERS.items() if part in name), "other files")
            elif name in ("[heap]", "[stack]"):
                holder = name.strip("[]")
            else:
                holder = "code made here" if "x" in permissions and not name else "other memory"
        elif line.startswith("Rss:"):
            found[holder] = found.get(holder, 0) + int(line.split()[1]) * 1024
    return {holder: nbytes for holder, nbytes in found.items() if nbytes}


def status(key: str) -> int:
    """A figure of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def worker(model: str, train: bool, target: str, plan: str, load: bool) -> dict[str, Any]:
    """All stages of one process."""
    stages: dict[str, Any] = {}

    def stage(name: str) -> None:
        stages[name] = {key: status(key) for key in ("VmRSS", "VmHWM", "RssAnon", "RssFile")} | {"holders": holders()}

    stage("python")
    import foreplan as fp

    stage("import")
    if load:
        step = fp.load_plan(plan)
    else:
        from foreplan.compiler import kept_plans
        from foreplan.frontend.losses import attach_loss

        kept_plans.in_use = False  # each process that compiles has to plan

        graph = fp.models.build(model)
        if train:
            graph = attach_loss(graph, fp.models.default_loss(model), [next(iter(graph.outputs))])
        step = fp.compile(graph, optimizer=fp.optim.Nesterov(1e-4, momentum=0.9) if train else None, target=target)
        step.save(plan)
    stage("load" if load else "compile")
    outside = [(part.name, part.nbytes, part.basis) for part in step.memory.outside]
    peak, actions, instructions = step.memory.peak, len(step.program.actions), len(step.plan.steps)
    session = step.bind()
    stage("bind")
    from foreplan.runtime.inputs import made_up

    inputs = made_up(step.program)
    result = session.step(inputs)
    stage("first step")
    started, count = time.monotonic(), 1
    while count < STEPS and time.monotonic() < started + LONGEST:
        result = session.step(inputs)
        count += 1
    stage("last step")
    del result
    return {
        "arena": step.arena_bytes,
        "inputs": sum(array.nbytes for array in inputs.values()),
        "peak": peak,
        "outside": outside,
        "actions": actions,
        "instructions": instructions,
        "steps": count,
        "stages": stages,
    }


def child(case: str, target: str, plan: str, load: bool, **environment: str) -> dict[str, Any]:
    """What a process of its own says."""
    model, train = CASES[case]
    command = [sys.executable, __file__, "--worker", json.dumps([model, train, target, plan, load])]
    done = subprocess.run(command, env=os.environ | environment, check=True, capture_output=True, text=True)
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    beside = row["stages"]["last step"]["VmHWM"] - row["arena"] - row["inputs"]
    return {"case": case, "target": target, "process": "load" if load else "compile"} | row | {"beside": beside}


def measure(case: str, engine: str, threads: int, cold: bool) -> list[dict[str, Any]]:
    """The rows of a case."""
    target = engine if engine == "numpy" else f"{engine}:threads={threads}"
    own = {"OMP_NUM_THREADS": str(threads), "OPENBLAS_NUM_THREADS": str(threads)}
    with tempfile.TemporaryDirectory() as folder:
        own["XDG_CONFIG_HOME"] = folder  # nothing that was calibrated on this machine
        plan = f"{folder}/step.plan"
        if cold:
            rows = [child(case, target, plan, False, FOREPLAN_CACHE_DIR=f"{folder}/cache", **own)]
        else:
            child(case, target, plan, False, **own)
            rows = [child(case, target, plan, load, **own) for load in (False, True)]
    return [row | {"threads": threads, "cold": cold} for row in rows]


def line(row: dict[str, Any]) -> str:
    """A row of the page's table."""
    predicted = row["peak"] - row["arena"]
    target = row["target"].partition(":")[0]
    cells = [f"{row['case']}, {target}", str(row["threads"]), row["process"]]
    cells += [f"{nbytes / MIB:,.1f}" for nbytes in (row["arena"], predicted, row["beside"])]
    return "| " + " | ".join([*cells, f"{(predicted - row['beside']) / MIB:+.1f}"]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", help="cases that hold this")
    parser.add_argument("--target", default="numpy,cpu")
    parser.add_argument("--threads", default="1", help="such as 1,2")
    parser.add_argument("--cold", action="store_true", help="with an empty cache")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        print(json.dumps(worker(*json.loads(arguments.worker))))
        return
    rows = []
    print("\n".join(HEAD))
    for case in CASES:
        if arguments.only is None or arguments.only in case:
            for engine in arguments.target.split(","):
                for threads in map(int, arguments.threads.split(",")):
                    for row in measure(case, engine, threads, arguments.cold):
                        rows.append(row)
                        print(line(row), flush=True)
    if arguments.only or arguments.cold:
        return
    (FOLDER / "resident.json").write_text(json.dumps(rows, indent=1) + "\n")
    text = "\n".join([*HEAD, *map(line, rows)])
    put("docs/memory.md", "resident", text)


if __name__ == "__main__":
    main()
