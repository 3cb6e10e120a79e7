"""The CPU engine beside PyTorch and ONNX Runtime: time and memory of a step of each net of `nets.py`, taken in turns.

    python benchmarks/cpu.py [--only TEXT] [--instructions own|AVX-512|AVX2] [--threads N] [--rounds N] [--forms F,F]

It needs PyTorch, torchvision, transformers, and for inference onnxruntime. `--forms` are PyTorch's: eager,
channels_last (images alone), compile and compile_channels_last. The latter two are torch.compile of the whole step and
need a C++ compiler, g++ by name or in CXX. `--instructions` holds foreplan, oneDNN, PyTorch and MKL to an older set;
ONNX Runtime knows no such limit: beside AVX2 it is measured, and not compared.

Each contender is a process of its own; they step in turns, so that what else the machine does meets all of them alike.
Only the ratios count: on shared cores the processor time of one thread is the steadiest. Before its time counts, a
contender must do the same work as the others: its first loss must be theirs, its loss must fall, and every trained
weight must change; in inference the outputs must be as large. What does not is said and left out, as is what a form
cannot do. Steps are timed, and memory is watched, once everything is compiled; how long that takes is told.

Writes cpu.json beside this file, and a table into benchmarks/results/cpu.md; with `--precision bf16`, which adds our
own step so computed, neither.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pages import put

FOLDER = Path(__file__).resolve().parent
HEAD = (
    "| step | processor, instructions | ms of processor | MiB resident | best peer | ms | MiB | time | goal | memory |",
    "|---|---|---|---|---|---|---|---|---|---|",
)
FORMS = "eager,channels_last,compile,compile_channels_last"
SETS = {
    "own": {},
    "AVX-512": {
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "ATEN_CPU_CAPABILITY": "avx512", "MKL_ENABLE_INSTRUCTIONS": "AVX512",
    },
    "AVX2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
}  # fmt: skip
SHORT = 0.05  # seconds: shorter steps are run several times a turn
PAUSE = 0.3  # seconds before a turn: threads of the last one may spin for a while
ENOUGH = 12  # training steps, after which the loss must have fallen
SAME = 2e-3  # of a loss, between contenders


def worker(contender: str, name: str, folder: str, threads: int) -> None:
    """Steps when told to on standard input, and says how long each took; in the end, whether it trained."""
    from contenders import running

    started = time.perf_counter()
    try:
        run = running(contender, name, Path(folder), threads)
        before = run.sums()
        first = run.number(run.step())
        run.step()  # what is compiled for later steps than the first
    except Exception as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), "")
        print(json.dumps({"failed": f"{type(error).__name__}: {reason}"}), flush=True)
        return
    ready = time.perf_counter() - started
    forget_peak()
    begun = time.perf_counter()
    run.step()
    count = max(1, int(SHORT / (time.perf_counter() - begun)))
    resident = most_memory()
    print(json.dumps({"ready": ready, "resident": resident, "first": first}), flush=True)
    steps = 3
    for line in sys.stdin:
        if line.strip() == "end":
            break
        wall, processor = time.perf_counter(), time.process_time()
        for _ in range(count):
            run.step()
        wall, processor = time.perf_counter() - wall, time.process_time() - processor
        steps += count
        print(json.dumps([wall / count, processor / count]), flush=True)
    for _ in range(ENOUGH - steps if before else 0):
        run.step()
    last, after = run.number(run.step()), run.sums()
    still = [weight for weight, number in before.items() if after[weight] == number]
    print(json.dumps({"last": last, "still": still}), flush=True)


def forget_peak() -> None:
    """Let the most memory that this process had count from now on, where the system can (Linux: proc(5))."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def most_memory() -> int:
    """Bytes that this process had at most since then. (What getrusage tells begins with those of the parent.)"""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("/proc/self/status does not say VmHWM: memory is measured on Linux alone")


class Contender:
    """A worker's process."""

    def __init__(self, contender: str, name: str, folder: str, threads: int, limits: Mapping[str, str]) -> None:
        command = [sys.executable, str(FOLDER / "cpu.py"), "--worker", contender, name, folder, str(threads)]
        self.folder = tempfile.TemporaryDirectory()  # torch.compile's own: what it takes is measured, not remembered
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=FOLDER,
            env={**os.environ, **limits, "TORCHINDUCTOR_CACHE_DIR": self.folder.name},
        )  # fmt: skip
        self.times: list[list[float]] = []

    def read(self) -> Any:
        assert self.process.stdout
        lines = iter(self.process.stdout.readline, "")
        return json.loads(next((line for line in lines if line[0] in "{["), '{"failed": "it ended without a word"}'))

    def told(self, word: str) -> Any:
        """Its answer."""
        assert self.process.stdin
        with contextlib.suppress(BrokenPipeError):
            print(word, file=self.process.stdin, flush=True)
        return self.read()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.folder.cleanup()


def asked(train: bool, images: bool, forms: list[str], precision: str) -> list[str]:
    """The contenders for a net."""
    of_pytorch = [f"pytorch {form}" for form in forms if images or not form.endswith("channels_last")]
    more = [f"foreplan {precision}"] if precision else []
    return ["foreplan", *more, *of_pytorch, *([] if train else ["onnxruntime"])]


def measure(name: str, arguments: argparse.Namespace, folder: str) -> dict[str, Any]:
    """All contenders at a net, in turns."""
    from nets import NETS

    net, limits, figures, running = NETS[name], SETS[arguments.instructions], {}, dict[str, Contender]()
    for key in asked(net.train, net.images, arguments.forms.split(","), arguments.precision):
        each = Contender(key, name, folder, arguments.threads, limits)
        figures[key] = each.read()
        if "failed" in figures[key]:
            each.end()
        else:
            running[key] = each
    for _ in range(arguments.rounds):
        for each in running.values():
            time.sleep(PAUSE)
            each.times.append(each.told("step"))
    for key, each in running.items():
        figures[key] |= each.told("end")
        each.end()
        if "failed" not in figures[key]:
            wall, processor = (sorted(column) for column in zip(*each.times))
            figures[key] |= {
                "wall": statistics.median(wall), "wall_least": wall[0],
                "processor": statistics.median(processor), "processor_least": processor[0],
                "processor_most": processor[-1],
            }  # fmt: skip
    judge(net.train, figures)
    return {
        "name": name, "threads": arguments.threads, "instructions": arguments.instructions, "goal": net.goal,
        "processor": processor_name(), "contenders": figures,
    }  # fmt: skip


def judge(train: bool, figures: dict[str, dict[str, Any]]) -> None:
    """Mark what does not do the work of the step as failed. Weights that nobody changes count for nobody: gradients may
    be too small for them, as behind ConvNeXt's scales of 1e-6.
    """
    firsts = sorted(figure["first"] for key, figure in figures.items() if "first" in figure)
    all_still = [set(figure["still"]) for figure in figures.values() if "failed" not in figure]
    by_nobody = set.intersection(*all_still) if len(all_still) > 1 else set()
    for key, figure in figures.items():
        if "failed" in figure:
            continue
        usual, allowed = firsts[len(firsts) // 2], 10 * SAME if " bf16" in key else SAME
        if not math.isclose(figure["first"], usual, rel_tol=allowed):
            figure["failed"] = f"it computes something else: {figure['first']:.6g} where others have {usual:.6g}"
        elif train and not figure["last"] < figure["first"]:
            figure["failed"] = f"its loss does not fall: {figure['first']:.6g}, then {figure['last']:.6g}"
        elif still := sorted(set(figure["still"]) - by_nobody):
            figure["failed"] = f"it does not train {len(still)} weights, {still[0]} among them"


def processor_name() -> str:
    """As the system has it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def short(processor: str) -> str:
    """Its maker and family: the first two words."""
    return " ".join(processor.replace("(R)", "").split()[:2])


def best(row: Mapping[str, Any]) -> str | None:
    """The fastest peer. ONNX Runtime is none where the others are held to AVX2."""
    free = ("foreplan", "onnxruntime") if row["instructions"] == "AVX2" else ("foreplan",)
    able = {k: v for k, v in row["contenders"].items() if not k.startswith(free) and "failed" not in v}
    return min(able, key=lambda key: able[key]["processor"], default=None)


def told(row: Mapping[str, Any]) -> None:
    """Print a row."""
    peer, ours = best(row), row["contenders"]["foreplan"]
    beside = ""
    if peer and "failed" not in ours:
        ratio = ours["processor"] / row["contenders"][peer]["processor"]
        beside = f": {ratio:.2f} x {peer} (goal {row['goal']})"
    print(f"{row['name']}, {row['instructions']}, {row['threads']} threads{beside}", flush=True)
    for key, figure in row["contenders"].items():
        if "failed" in figure:
            print(f"    {key:30s} is left out: {figure['failed']}", flush=True)
            continue
        print(
            f"    {key:30s} {figure['processor'] * 1e3:9.2f} ms of processor ({figure['processor_least'] * 1e3:.2f} to "
            f"{figure['processor_most'] * 1e3:.2f}), {figure['wall'] * 1e3:9.2f} ms, "
            f"{figure['resident'] / 2**20:7.0f} MiB, ready in {figure['ready']:.1f} s; {figure['first']:.5g} to "
            f"{figure['last']:.5g}",
            flush=True,
        )


def line(row: Mapping[str, Any]) -> str:
    """A row of the page's table."""
    ours, peer = row["contenders"]["foreplan"], best(row)
    on = f"{short(row['processor'])}, {row['instructions']}" + f", {row['threads']} threads" * (row["threads"] > 1)
    cells = [row["name"], on]
    if "failed" in ours:
        return "| " + " | ".join([*cells, ours["failed"], "", "", "", "", "", "", ""]) + " |"
    cells += [times(ours, row["threads"]), f"{ours['resident'] / 2**20:,.0f}"]
    if peer is None:
        return "| " + " | ".join([*cells, "none", "", "", "", "", ""]) + " |"
    theirs = row["contenders"][peer]
    time_ratio, memory = ours["processor"] / theirs["processor"], ours["resident"] / theirs["resident"]
    cells += [peer, times(theirs, row["threads"]), f"{theirs['resident'] / 2**20:,.0f}"]
    shown = f"{time_ratio:.2f}" if time_ratio <= row["goal"] else f"**{time_ratio:.2f}**"
    return "| " + " | ".join([*cells, shown, f"{row['goal']}", f"{memory:.2f}"]) + " |"


def times(figure: Mapping[str, float], threads: int) -> str:
    """The median of the processor's time, and the least and the most; of several threads the time that passed."""
    median = figure["processor"] * 1e3
    digits = 2 if median < 10 else 1
    if threads > 1:
        return f"{median:,.{digits}f} / {figure['wall'] * 1e3:,.{digits}f}"
    least, most = figure["processor_least"] * 1e3, figure["processor_most"] * 1e3
    return f"{median:,.{digits}f} ({least:,.{digits}f} to {most:,.{digits}f})"


Key = tuple[str, str, str, int]  # net, processor, instructions, threads


def key_of(row: Mapping[str, Any]) -> Key:
    """What a row of the table is about."""
    return row["name"], row["processor"], row["instructions"], row["threads"]


def write(path: Path, rows: dict[Key, dict[str, Any]]) -> None:
    """The file and the page, whole after every net."""
    from nets import NETS

    places = [list(NETS), sorted({key[1] for key in rows}, reverse=True), list(SETS), [1, 2, 4]]
    order = sorted(rows, key=lambda key: [place.index(x) for place, x in zip(places, key)][::-1])
    path.write_text(json.dumps([rows[key] for key in order], indent=1) + "\n")
    put("benchmarks/results/cpu.md", "peers", "\n".join([*HEAD, *(line(rows[key]) for key in order)]))


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        worker(*sys.argv[2:5], int(sys.argv[5]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="nets whose names have this in them")
    parser.add_argument("--instructions", choices=SETS, default="own")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--forms", default=FORMS)
    parser.add_argument("--precision", default="")
    arguments = parser.parse_args()
    from contenders import prepare
    from nets import NETS

    path = FOLDER / "cpu.json"
    found = json.loads(path.read_text()) if path.exists() else []
    rows = {key_of(row): row for row in found}
    for name in (name for name in NETS if arguments.only in name):
        with tempfile.TemporaryDirectory() as folder:
            prepare(name, Path(folder))
            row = measure(name, arguments, folder)
        told(row)
        if not arguments.precision:
            rows[key_of(row)] = row
            write(path, rows)


if __name__ == "__main__":
    main()
