"""Training steps on the card in this machine beside PyTorch and JAX: time, and memory as nvidia-smi has it.

    python benchmarks/gpu.py [--peer PYTHON] [--only TEXT] [--contenders TEXT,TEXT] [--limit SECONDS] [--plans FOLDER]

Each contender is a process of its own, with the card to itself; `--peer` is the Python that has PyTorch and JAX, by
default this one. What is not installed, fails, does not train, or takes longer than the limit to be ready is said and
left out. Inputs lie on the card already, as they do for peers: a step of ours begins with copies of them within the
card, since it may use their own place for other tensors. What it takes with its inputs copied to the card and its loss
copied back stands beside. Memory is what the process added to the card's, those copies included. `--plans` names a
folder of plans that `--make` has made, which needs no card, so that nothing is planned beside it. Writes
`results/gpu-CARD.json` and a table, `results/gpu-CARD.md`, in which cases that were not run again stay.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).resolve().parent
CARD = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]  # in the order of buses, as nvidia-smi has it
sys.path.insert(0, str(FOLDER.parent))
MODELS = (
    "resnet50:batch=32",
    "resnet50:batch=256",
    "conv_chain",
    "gpt2_small:batch=16,seq=1024",
    "unet:batch=16,size=256",
    "mlp:width=4096,batch=1024",
)
# How ours is compiled, and the card's peak that it is held against.
PRECISIONS = {
    "float32": ("cuda", "float32", "float32"),
    "tf32": ("cuda:,tf32", "float32", "tensorfloat32"),
    "bf16": ("cuda", "bf16", "bfloat16"),
}
Steps = Callable[[int], float]  # runs a number of steps, waits for them, and returns the last one's loss
CONTENDERS = ("foreplan", "pytorch eager", "pytorch compile", "pytorch compile, graphs", "jax")
ROUNDS, ROUND = 7, 0.3  # how often is measured, and for how many seconds at least
HEAD = (
    "| training step | ms (with copies) | MiB (planned) | of peak | best peer | ms | MiB | ours to it: time | memory |",
    "|---|---|---|---|---|---|---|---|---|",
)


def results(what: str, card: str) -> Path:
    """Where results on a card lie."""
    slug = re.sub(r"[^a-z0-9]+", "-", card.lower()).strip("-")
    return FOLDER / "results" / f"{what}-{slug}.json"


def compiled(model: str, precision: str, target: str) -> Any:
    """A training step as all contenders run it."""
    import foreplan as fp
    from foreplan.frontend.losses import attach_loss

    graph = attach_loss(fp.models.build(model), fp.models.default_loss(model), [])
    optimizer = fp.optim.Nesterov(1e-4, momentum=0.9)
    return fp.compile(graph, optimizer=optimizer, target=target, precision=PRECISIONS[precision][1])


def plan_file(folder: str, model: str, precision: str) -> Path:
    """Where the plan of a case lies."""
    return Path(folder) / f"{re.sub('[^a-z0-9]+', '-', f'{model}-{precision}')}.plan"


def make(folder: str, device: str, only: str) -> None:
    """Plans of the cases, with machine code."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    for model in MODELS:
        for precision, (target, _, _) in PRECISIONS.items():
            if only in f"{model}, {precision}":
                options = target.partition(",")[2]
                step = compiled(model, precision, f"cuda:{device}" + f",{options}" * bool(options))
                step.save(plan_file(folder, model, precision), kernels=True)
                print(f"{model}, {precision}: {step.arena_bytes / 2**20:,.0f} MiB", flush=True)


def ours(model: str, precision: str, plans: str) -> tuple[Steps, dict[str, Any]]:
    """Our steps; and what else is known of them."""
    import foreplan as fp
    from foreplan.lower.outside import outside
    from foreplan.runtime.cuda.libraries.capture import captured
    from foreplan.runtime.cuda.libraries.driver import card
    from foreplan.runtime.inputs import check_inputs, made_up

    target, _, peak = PRECISIONS[precision]
    if plans:
        step = fp.load_plan(plan_file(plans, model, precision), trust_code=True)
    else:
        step = compiled(model, precision, target)
    session, data = step.bind(), made_up(step.program)
    for _ in range(3):
        session.step(data)
    started = time.perf_counter()
    for _ in range(5):
        session.step(data)
    with_copies = (time.perf_counter() - started) / 5
    half, copies = session._body, []
    half.write(check_inputs(session._inputs, data))
    for place in half._inputs.values():
        kept = card().allocate(place.nbytes)
        card().copying(kept.ptr, place.start, place.nbytes)()
        copies.append((card().copying(place.start, kept.ptr, place.nbytes), kept))
    slot = session.program.loss
    loss = np.empty(slot.operand.type.shape, slot.operand.type.dtype.numpy)

    def steps(count: int) -> float:
        for _ in range(count):
            for copy, _ in copies:
                copy()
            half.run()
        half.fetch(slot, loss)()
        return float(loss)

    planned = step.arena_bytes + sum(part.nbytes for part in outside(step.program, step.plan))
    planned += sum(place.nbytes for place in half._inputs.values())
    flops = step.estimate()["flops"]
    known = {"with_copies": with_copies, "arena": step.arena_bytes, "planned": planned, "flops": flops}
    return steps, known | {"peak_flops_per_second": captured().peak(peak)}


def stepper(contender: str, model: str, precision: str, plans: str) -> tuple[Steps, dict[str, Any]]:
    """A contender's steps."""
    if contender == "foreplan":
        return ours(model, precision, plans)
    if contender == "jax":
        import jax_gpu

        return jax_gpu.stepper(model, precision), {}
    import torch_gpu

    return torch_gpu.stepper(model, contender.removeprefix("pytorch "), precision), {}


def worker(contender: str, model: str, precision: str, plans: str) -> None:
    """Measures a contender, says what it found, and stays until its memory has been looked at."""
    started = time.perf_counter()
    try:
        steps, known = stepper(contender, model, precision, plans)
        first = steps(3)
        known["ready"] = time.perf_counter() - started
        before = time.perf_counter()
        steps(2)
        count = max(1, min(1000, math.ceil(2 * ROUND / (time.perf_counter() - before))))
        times = []
        for _ in range(ROUNDS):
            before = time.perf_counter()
            last = steps(count)
            times.append((time.perf_counter() - before) / count)
        if not last < first:
            raise ValueError(f"it does not train: its loss was {first} and is {last}")
    except Exception as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), "")
        print(json.dumps({"failed": f"{type(error).__name__}: {reason[:300]}"}), flush=True)
        return
    print(
        json.dumps(known | {"seconds": statistics.median(times), "least": min(times), "most": max(times)}), flush=True
    )
    sys.stdin.readline()


def asked(figure: str) -> str:
    """What nvidia-smi says of the card."""
    command = ["nvidia-smi", f"--id={CARD}", f"--query-gpu={figure}", "--format=csv,noheader,nounits"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def contend(python: str, contender: str, model: str, precision: str, limit: float, plans: str) -> dict[str, Any]:
    """A contender's figures, from a process of its own; or why it has none."""
    before = int(asked("memory.used"))
    command = [python, str(FOLDER / "gpu.py"), "--worker", contender, model, precision, plans]
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, cwd=FOLDER,
            env={**_environment(), "TORCHINDUCTOR_CACHE_DIR": folder},
        )  # fmt: skip
        assert process.stdout
        timer = threading.Timer(limit, process.kill)
        timer.start()
        lines = iter(process.stdout.readline, "")
        line = next((line for line in lines if line.startswith("{")), "")
        timer.cancel()
        found: dict[str, Any] = json.loads(line) if line else {}
        if "seconds" in found:
            found["mib"] = int(asked("memory.used")) - before
        process.kill()
        process.wait()
        if not found:
            log.seek(0)
            last = [line for line in log.read().splitlines() if line.strip()][-1:]
            found["failed"] = f"it ended, or was not ready in {limit:.0f} s: {' '.join(last)[:300]}"
    for _ in range(20):  # until the driver has taken its memory back
        if int(asked("memory.used")) <= before:
            break
        time.sleep(0.25)
    return found


def _environment() -> dict[str, str]:
    """One card; JAX takes memory as it needs it, like the others."""
    card = {"CUDA_VISIBLE_DEVICES": CARD, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    return {**os.environ, **card, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONUNBUFFERED": "1"}


def row_of(case: str, figures: dict[str, dict[str, Any]]) -> str:
    """A row of the table."""
    us, others = figures.get("foreplan", {}), {k: v for k, v in figures.items() if k != "foreplan" and "seconds" in v}
    cells = [case]
    if "seconds" in us:
        share = us["flops"] / us["seconds"] / us["peak_flops_per_second"]
        cells.append(f"{us['seconds'] * 1e3:,.2f} ({us['with_copies'] * 1e3:,.2f})")
        cells += [f"{us['mib']:,} ({us['planned'] / 2**20:,.0f})", f"{share:.0%}"]
    else:
        cells += [us.get("failed", "not run"), "", ""]
    best = min(others, key=lambda name: others[name]["seconds"], default=None)
    if best is None:
        return "| " + " | ".join([*cells, "", "", "", "", ""]) + " |"
    peer = others[best]
    cells += [best, f"{peer['seconds'] * 1e3:,.2f}", f"{peer['mib']:,}"]
    if "seconds" in us:
        cells += [f"{us['seconds'] / peer['seconds']:.2f}", f"{us['mib'] / max(peer['mib'], 1):.2f}"]
    else:
        cells += ["", ""]
    return "| " + " | ".join(cells) + " |"


def write(path: Path, about: dict[str, str], rows: dict[str, dict[str, dict[str, Any]]]) -> None:
    """Both files, whole after every case."""
    order = [f"{model}, {precision}" for model in MODELS for precision in PRECISIONS]
    sorted_rows = {case: rows[case] for case in order if case in rows}
    path.parent.mkdir(exist_ok=True)
    path.with_suffix(".json").write_text(json.dumps({**about, "cases": sorted_rows}, indent=1) + "\n")
    said = ", ".join(f"{key} {value}" for key, value in about.items())
    left_out = [
        f"- {case}: {who} is left out: {figure['failed']}"
        for case, figures in sorted_rows.items()
        for who, figure in figures.items()
        if "failed" in figure and who != "foreplan"
    ]
    table = [*HEAD, *(row_of(case, figures) for case, figures in sorted_rows.items())]
    path.with_suffix(".md").write_text(
        "\n".join([f"Measured by benchmarks/gpu.py: {said}.", "", *table, "", *left_out])
    )


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        worker(*sys.argv[2:6])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", metavar="PYTHON", default=sys.executable)
    parser.add_argument("--only", default="", help="cases whose name has this in it, such as 'resnet50:batch=32, bf16'")
    parser.add_argument("--contenders", default="", help="those whose name begins with one of these")
    parser.add_argument("--limit", type=float, default=300, help="seconds for each to be ready and measured")
    parser.add_argument("--plans", metavar="FOLDER", default="", help="plans of ours that --make has made")
    parser.add_argument("--make", metavar="FOLDER", help="make plans there, and measure nothing")
    parser.add_argument("--device", default="h100", help="that --make plans for")
    arguments = parser.parse_args()
    if arguments.make:
        make(arguments.make, arguments.device, arguments.only)
        return
    plans = str(Path(arguments.plans).resolve()) if arguments.plans else ""
    try:
        about = {"card": asked("name"), "driver": asked("driver_version")}
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(f"there is no card to measure: nvidia-smi cannot be asked ({error})") from None
    path = results("gpu", about["card"])
    rows: dict[str, Any] = json.loads(path.read_text())["cases"] if path.exists() else {}
    begin = tuple(arguments.contenders.split(","))
    for model in MODELS:
        for precision in PRECISIONS:
            case = f"{model}, {precision}"
            if arguments.only not in case:
                continue
            for contender in (name for name in CONTENDERS if name.startswith(begin)):
                python = sys.executable if contender == "foreplan" else arguments.peer
                found = contend(python, contender, model, precision, arguments.limit, plans)
                rows.setdefault(case, {})[contender] = found
                text = f"{found['seconds'] * 1e3:.2f} ms, {found['mib']} MiB" if "seconds" in found else found["failed"]
                print(f"{case}: {contender}: {text}", flush=True)
                write(path, about, rows)


if __name__ == "__main__":
    main()
