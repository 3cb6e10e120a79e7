"""The CPU engine beside PyTorch and ONNX Runtime: time and memory of a step, in one run, taken in turns.

    python benchmarks/cpu.py [--peer PYTHON] [--threads N] [--rounds N] [--only NAME] [--forms eager,compile]

`--peer` is a Python in which PyTorch (and for inference ONNX Runtime) is installed; without it only ours is measured.
Each contender is a process of its own; they step in turns, so that what else the machine does meets all of them alike.
Only the ratios count: on shared cores the processor time of one thread is the steadiest. Writes cpu.json beside this
file, and a table into docs/cpu.md.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
PAGE = FOLDER.parent / "docs" / "cpu.md"
HEAD = (
    "| step | threads | ms of processor / wall | MiB resident | best peer | ms | MiB | ratio |",
    "|---|---|---|---|---|---|---|---|",
)
CASES = {  # what is run, whether it trains, and the goal beside the best of PyTorch's forms
    "resnet50 training, batch 8": ("resnet50:batch=8", True, 0.75),
    "conv_chain training, 256": ("conv_chain:size=256", True, 0.8),
    "gpt2 training, 4 layers, 2 x 256": ("gpt2_small:layers=4,batch=2,seq=256", True, 0.65),
    "mlp training, batch 256": ("mlp:batch=256", True, 0.6),
    "mlp training, width 64, batch 16": ("mlp:width=64,batch=16", True, 0.2),
    "resnet50 inference, batch 1": ("resnet50:batch=1", False, 1.0),
    "resnet50 inference, batch 8": ("resnet50:batch=8", False, 1.0),
}
SHORT = 0.05  # seconds: shorter steps are run several times a turn
PAUSE = 0.5  # seconds before a turn: threads of the last one may spin for a while


def ours(model: str, train: bool, target: str) -> Callable[[], object]:
    import foreplan as fp
    from foreplan.cli_data import made_up
    from foreplan.frontend.losses import attach_loss

    graph = fp.models.build(model)
    if train:
        graph = attach_loss(graph, fp.models.default_loss(model), [next(iter(graph.outputs))])
    optimizer = fp.optim.Nesterov(1e-4, momentum=0.9) if train else None
    session = fp.compile(graph, optimizer=optimizer, target=target).bind()
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


def worker(contender: str, model: str, train: bool, threads: int) -> None:
    """Steps when told to on standard input, and says how long each took."""
    started = time.perf_counter()
    if contender == "foreplan":
        step = ours(model, train, f"cpu:threads={threads}")
    elif contender == "onnxruntime":
        step = onnxruntime(model, threads)
    else:
        import torch
        from torch_models import stepper

        torch.set_num_threads(threads)
        step = stepper(model, contender, train)
    step()
    ready, count = time.perf_counter() - started, 1
    step()
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


class Contender:
    """A worker's process."""

    def __init__(self, python: str, *arguments: object) -> None:
        command = [python, str(FOLDER / "cpu.py"), "--worker", *map(str, arguments)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=FOLDER)
        self.times: list[list[float]] = []

    def read(self) -> Any:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"a contender died: {' '.join(map(str, self.process.args))}")  # type: ignore[arg-type]
        return json.loads(line)

    def turn(self) -> None:
        assert self.process.stdin
        print(file=self.process.stdin, flush=True)
        self.times.append(self.read())


def measure(name: str, peer: str | None, threads: int, rounds: int, forms: list[str]) -> dict[str, Any]:
    model, train, goal = CASES[name]
    forms = [form for form in forms if form != "channels_last" or model.startswith(("resnet", "conv"))]
    contenders = {"foreplan": Contender(sys.executable, "foreplan", model, int(train), threads)}
    if peer:
        contenders |= {f"pytorch {form}": Contender(peer, form, model, int(train), threads) for form in forms}
        if not train:
            contenders["onnxruntime"] = Contender(peer, "onnxruntime", model, 0, threads)
    first = {key: each.read() for key, each in contenders.items()}
    for _ in range(rounds):
        for each in contenders.values():
            time.sleep(PAUSE)
            each.turn()
    figures: dict[str, Any] = {}
    for key, each in contenders.items():
        each.process.kill()
        wall, processor = (sorted(column) for column in zip(*each.times))
        figures[key] = first[key] | {
            "wall": statistics.median(wall), "wall_least": wall[0],
            "processor": statistics.median(processor), "processor_least": processor[0],
        }  # fmt: skip
    others = [figure["processor"] for key, figure in figures.items() if key != "foreplan"]
    ratio = figures["foreplan"]["processor"] / min(others) if others else None
    return {"name": name, "threads": threads, "goal": goal, "ratio": ratio, "contenders": figures}


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2], sys.argv[3], sys.argv[4] == "1", int(sys.argv[5]))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", metavar="PYTHON")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="")
    parser.add_argument("--forms", default="eager,channels_last")
    arguments = parser.parse_args()
    path = FOLDER / "cpu.json"
    rows = {(row["name"], row["threads"]): row for row in json.loads(path.read_text())} if path.exists() else {}
    for name in (name for name in CASES if arguments.only in name):
        row = measure(name, arguments.peer, arguments.threads, arguments.rounds, arguments.forms.split(","))
        rows[name, arguments.threads] = row
        beside = "" if row["ratio"] is None else f"  {row['ratio']:.2f} x the best peer (goal {row['goal']})"
        print(f"{name}, {arguments.threads} threads{beside}")
        for key, figure in row["contenders"].items():
            print(
                f"    {key:22s} {figure['processor'] * 1e3:9.1f} ms of processor, {figure['wall'] * 1e3:9.1f} ms, "
                f"{figure['resident'] / 2**20:7.0f} MiB, ready in {figure['ready']:.1f} s",
                flush=True,
            )
    order = sorted(rows, key=lambda key: (key[1], list(CASES).index(key[0])))
    path.write_text(json.dumps([rows[key] for key in order], indent=1) + "\n")
    text = "\n".join([*HEAD, *(line(rows[key]) for key in order)])
    pattern = r"(<!-- peers -->\n).*?(<!-- /peers -->)"
    PAGE.write_text(re.sub(pattern, lambda found: f"{found[1]}{text}\n{found[2]}", PAGE.read_text(), flags=re.S))


def line(row: dict[str, Any]) -> str:
    """A row of the page's table."""
    ours, others = row["contenders"]["foreplan"], {k: v for k, v in row["contenders"].items() if k != "foreplan"}
    best = min(others, key=lambda name: others[name]["processor"], default=None)
    cells = [row["name"], str(row["threads"]), f"{ours['processor'] * 1e3:,.1f} / {ours['wall'] * 1e3:,.1f}"]
    cells += [f"{ours['resident'] / 2**20:,.0f}"]
    if best is None:
        return "| " + " | ".join([*cells, "", "", "", ""]) + " |"
    peer = others[best]
    cells += [best, f"{peer['processor'] * 1e3:,.1f} / {peer['wall'] * 1e3:,.1f}", f"{peer['resident'] / 2**20:,.0f}"]
    return "| " + " | ".join([*cells, f"{row['ratio']:.2f}"]) + " |"


if __name__ == "__main__":
    main()
