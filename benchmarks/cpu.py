"""The CPU engine beside PyTorch and ONNX Runtime: time and memory of a step, in one run, taken in turns.

    python benchmarks/cpu.py [--peer PYTHON] [--threads N] [--rounds N] [--only NAME] [--forms eager,compile]

`--peer` is a Python in which PyTorch (and for inference ONNX Runtime and onnx) is installed; without it only ours is
measured. `--forms` are PyTorch's: eager, channels_last (images alone), compile and compile_channels_last. The latter
two are torch.compile of the whole step and need a C++ compiler, g++ by name or in CXX; what a form cannot do is said,
and the others go on. Each contender is a process of its own; they step in turns, so that what else the machine does
meets all of them alike. Steps are timed, and memory is watched, once everything is compiled; how long that takes is
told. Only the ratios count: on shared cores the processor time of one thread is the steadiest. Writes cpu.json beside
this file, and a table into docs/cpu.md; with `--precision bf16`, which adds our own step so computed, neither.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pages import put

FOLDER = Path(__file__).resolve().parent
HEAD = (
    "| step | threads | ms of processor | MiB resident | best peer | ms | MiB | ratio |",
    "|---|---|---|---|---|---|---|---|",
)
FORMS = "eager,channels_last,compile,compile_channels_last"


@dataclass(frozen=True)
class Case:
    """What is run: a model of the zoo.

    Attributes:
        goal: of the ratio of times, ours to the best peer's.
        budget: of ours, if any.
    """

    model: str
    train: bool
    goal: float
    budget: str | None = None


CASES = {
    "resnet50 training, batch 8": Case("resnet50:batch=8", True, 0.75),
    "resnet50 training, batch 8, in 460 MiB": Case("resnet50:batch=8", True, 0.8, "460MiB"),
    "conv_chain training, 256": Case("conv_chain:size=256", True, 0.8),
    "gpt2 training, 4 layers, 2 x 256": Case("gpt2_small:layers=4,batch=2,seq=256", True, 0.65),
    "mlp training, batch 256": Case("mlp:batch=256", True, 0.6),
    "mlp training, width 64, batch 16": Case("mlp:width=64,batch=16", True, 0.2),
    "resnet50 inference, batch 1": Case("resnet50:batch=1", False, 1.0),
    "resnet50 inference, batch 8": Case("resnet50:batch=8", False, 1.0),
}
SHORT = 0.05  # seconds: shorter steps are run several times a turn
PAUSE = 0.5  # seconds before a turn: threads of the last one may spin for a while


def ours(model: str, train: bool, target: str, budget: str | None, precision: str) -> Callable[[], object]:
    import foreplan as fp
    from foreplan.frontend.losses import attach_loss
    from foreplan.runtime.inputs import made_up

    graph = fp.models.build(model)
    if train:
        graph = attach_loss(graph, fp.models.default_loss(model), [next(iter(graph.outputs))])
    optimizer = fp.optim.Nesterov(1e-4, momentum=0.9) if train else None
    session = fp.compile(graph, optimizer=optimizer, target=target, budget=budget, precision=precision).bind()
    data = made_up(session.program)
    return lambda: session.step(data)


def onnxruntime(model: str, threads: int) -> Callable[[], object]:
    import io

    import numpy as np
    import onnxruntime as ort
    import torch
    from torch_models import build

    network, (x, _) = build(model)
    file = io.BytesIO()
    torch.onnx.export(network.eval(), (x,), file, dynamo=False, input_names=["x"])
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    session = ort.InferenceSession(file.getvalue(), options, providers=["CPUExecutionProvider"])
    array = np.asarray(x)
    return lambda: session.run(None, {"x": array})


def stepper(contender: str, case: Case, threads: int) -> Callable[[], object]:
    """A contender's step."""
    who, _, precision = contender.partition(" ")
    if who == "foreplan":
        return ours(case.model, case.train, f"cpu:threads={threads}", case.budget, precision or "float32")
    if contender == "onnxruntime":
        return onnxruntime(case.model, threads)
    import torch
    from torch_models import stepper

    torch.set_num_threads(threads)
    return stepper(case.model, contender, case.train)


def worker(contender: str, case: Case, threads: int) -> None:
    """Steps when told to on standard input, and says how long each took."""
    started = time.perf_counter()
    try:
        step = stepper(contender, case, threads)
        step()
        step()  # what is compiled for later steps than the first
    except Exception as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), "")
        print(json.dumps({"failed": f"{type(error).__name__}: {reason}"}), flush=True)
        return
    ready = time.perf_counter() - started
    forget_peak()
    before = time.perf_counter()
    step()
    count = max(1, int(SHORT / (time.perf_counter() - before)))
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"ready": ready, "resident": resident}), flush=True)
    for _ in sys.stdin:
        wall, processor = time.perf_counter(), time.process_time()
        for _ in range(count):
            step()
        wall, processor = time.perf_counter() - wall, time.process_time() - processor
        print(json.dumps([wall / count, processor / count]), flush=True)


def forget_peak() -> None:
    """Let the most memory that this process had count from now on, where the system can (Linux: proc(5))."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


class Contender:
    """A worker's process."""

    def __init__(self, python: str, contender: str, name: str, threads: int) -> None:
        command = [python, str(FOLDER / "cpu.py"), "--worker", contender, name, str(threads)]
        self.folder = tempfile.TemporaryDirectory()  # torch.compile's own: what it takes is measured, not remembered
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=FOLDER,
            env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": self.folder.name},
        )  # fmt: skip
        self.times: list[list[float]] = []

    def read(self) -> Any:
        assert self.process.stdout
        return json.loads(self.process.stdout.readline() or '{"failed": "it ended without a word"}')

    def turn(self) -> None:
        assert self.process.stdin
        print(file=self.process.stdin, flush=True)
        found = self.read()
        if "failed" in found:
            raise SystemExit(f"a contender died: {' '.join(map(str, self.process.args))}")  # type: ignore[arg-type]
        self.times.append(found)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.folder.cleanup()


def begin(
    name: str, peer: str | None, threads: int, forms: list[str], precision: str
) -> dict[str, tuple[Contender, Any]]:
    """Contenders that can do a step, and what they say of it; ours with another precision is one of them."""
    case = CASES[name]
    images = case.model.startswith(("resnet", "conv"))
    asked = {"foreplan": (sys.executable, "foreplan")}
    if precision:
        asked[f"foreplan {precision}"] = (sys.executable, f"foreplan {precision}")
    if peer:
        asked |= {f"pytorch {form}": (peer, form) for form in forms if images or not form.endswith("channels_last")}
        if not case.train:
            asked["onnxruntime"] = (peer, "onnxruntime")
    found = {}
    for key, (python, contender) in asked.items():
        each = Contender(python, contender, name, threads)
        first = each.read()
        if "failed" not in first:
            found[key] = each, first
            continue
        each.end()
        print(f"{name}: {key} is left out: {first['failed']}", flush=True)
        if key == "foreplan":
            raise SystemExit(1)
    return found


def measure(name: str, peer: str | None, threads: int, rounds: int, forms: list[str], precision: str) -> dict[str, Any]:
    contenders = begin(name, peer, threads, forms, precision)
    for _ in range(rounds):
        for each, _ in contenders.values():
            time.sleep(PAUSE)
            each.turn()
    figures: dict[str, Any] = {}
    for key, (each, first) in contenders.items():
        each.end()
        wall, processor = (sorted(column) for column in zip(*each.times))
        figures[key] = first | {
            "wall": statistics.median(wall), "wall_least": wall[0],
            "processor": statistics.median(processor), "processor_least": processor[0],
            "processor_most": processor[-1],
        }  # fmt: skip
    others = [figure["processor"] for key, figure in figures.items() if not key.startswith("foreplan")]
    ratio = figures["foreplan"]["processor"] / min(others) if others else None
    return {"name": name, "threads": threads, "goal": CASES[name].goal, "ratio": ratio, "contenders": figures}


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2], CASES[sys.argv[3]], int(sys.argv[4]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", metavar="PYTHON")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="")
    parser.add_argument("--forms", default=FORMS)
    parser.add_argument("--precision", default="")
    arguments = parser.parse_args()
    path = FOLDER / "cpu.json"
    rows = {(row["name"], row["threads"]): row for row in json.loads(path.read_text())} if path.exists() else {}
    for name in (name for name in CASES if arguments.only in name):
        forms = arguments.forms.split(",")
        row = measure(name, arguments.peer, arguments.threads, arguments.rounds, forms, arguments.precision)
        rows[name, arguments.threads] = row
        beside = "" if row["ratio"] is None else f"  {row['ratio']:.2f} x the best peer (goal {row['goal']})"
        print(f"{name}, {arguments.threads} threads{beside}")
        for key, figure in row["contenders"].items():
            print(
                f"    {key:30s} {figure['processor'] * 1e3:9.1f} ms of processor "
                f"({figure['processor_least'] * 1e3:.1f} to {figure['processor_most'] * 1e3:.1f}), "
                f"{figure['wall'] * 1e3:9.1f} ms, {figure['resident'] / 2**20:7.0f} MiB, "
                f"ready in {figure['ready']:.1f} s",
                flush=True,
            )
    if arguments.precision:
        return
    order = sorted(rows, key=lambda key: (key[1], list(CASES).index(key[0])))
    path.write_text(json.dumps([rows[key] for key in order], indent=1) + "\n")
    text = "\n".join([*HEAD, *(line(rows[key]) for key in order)])
    put("docs/cpu.md", "peers", text)


def line(row: dict[str, Any]) -> str:
    """A row of the page's table."""
    ours, others = row["contenders"]["foreplan"], {k: v for k, v in row["contenders"].items() if k != "foreplan"}
    best = min(others, key=lambda name: others[name]["processor"], default=None)
    cells = [row["name"], str(row["threads"]), times(ours, row["threads"]), f"{ours['resident'] / 2**20:,.0f}"]
    if best is None:
        return "| " + " | ".join([*cells, "", "", "", ""]) + " |"
    peer = others[best]
    cells += [best, times(peer, row["threads"]), f"{peer['resident'] / 2**20:,.0f}"]
    return "| " + " | ".join([*cells, f"{row['ratio']:.2f}"]) + " |"


def times(figure: dict[str, float], threads: int) -> str:
    """The median of the processor's time, and the least and the most; of several threads the time that passed."""
    median = figure["processor"] * 1e3
    digits = 2 if median < 1 else 1
    if threads > 1:
        return f"{median:,.{digits}f} / {figure['wall'] * 1e3:,.{digits}f}"
    least, most = figure["processor_least"] * 1e3, figure["processor_most"] * 1e3
    return f"{median:,.{digits}f} ({least:,.{digits}f} to {most:,.{digits}f})"


if __name__ == "__main__":
    main()
