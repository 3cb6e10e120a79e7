"""Steps of several ranks, run and estimated.

    python benchmarks/ranks.py run        # on this machine, by MPI: 1, 2 and 4 ranks of one thread each
    python benchmarks/ranks.py estimate   # clusters that are not here: Llama's shapes, and ZeRO's table
    python benchmarks/ranks.py estimate-stages   # the same shapes in stages

Writes ranks.json beside this file, and tables into docs/ranks.md. Of a run it tells: the loss after some steps; bytes
that are planned, and allocated, on each rank; what a rank sends; how much of the time it stands still for others; and
the efficiency, the processor time of one process for all samples over that of all ranks together, without their
waiting, in which MPI's libraries turn in a loop.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
from pages import put

import foreplan as fp
from foreplan.base.units import format_bytes, format_count, format_seconds
from foreplan.compiler.staged import Staged
from foreplan.options import Options
from foreplan.runtime.kernel import Run
from foreplan.runtime.ranks import World, current, using

HERE = Path(__file__).resolve()
FILE = HERE.with_suffix(".json")
SAMPLES, STEPS, WARM = 8, 12, 3
NETS = {
    "ResNet-18, 64 × 64": "resnet18:size=64,classes=10,batch={batch}",
    "GPT, 4 layers of 256": "gpt2_small:layers=4,width=256,heads=4,seq=128,vocabulary=4000,batch={batch}",
    "MLP, 4 × 1,024": "mlp:width=1024,layers=4,batch={batch}",
}
# Adam's first steps have the sign of each gradient, and of one that is nearly zero, that of its rounding.
OPTIMIZERS = {"ResNet-18, 64 × 64": fp.optim.Momentum(0.001)}
RUNS = [(1, "none"), (2, "none"), (2, "state"), (2, "parameters"), (4, "none"), (4, "state"), (4, "parameters")]
GROUPS = [(2, "none", 2), (4, "none", 2), (4, "parameters", 2), (4, "none", 4)]  # and how many have parts of products


class Timed:
    """A world that times what waits for other ranks.

    Attributes:
        waited: processor seconds.
    """

    def __init__(self, inner: World, whole: Timed | None = None) -> None:
        self.inner, self.waited, self.whole = inner, 0.0, whole
        self.groups: dict[tuple[int, int], Timed] = {}
        self.rank, self.size, self.name, self.neighbours = inner.rank, inner.size, inner.name, inner.neighbours
        self.poll, self.gather, self.meet, self.abort = inner.poll, inner.gather, inner.meet, inner.abort
        self.send, self.receive = inner.send, inner.receive

    def group(self, ranks: int, stride: int) -> World:
        """Of the same ranks; what waits there counts here."""
        if (ranks, stride) == (self.size, 1):
            return self
        if (ranks, stride) not in self.groups:
            self.groups[ranks, stride] = Timed(self.inner.group(ranks, stride), self.whole or self)
        return self.groups[ranks, stride]

    def begin(self, kind: str, peer: int, source: np.ndarray, into: np.ndarray) -> Run:
        """As the world does."""
        wait = self.inner.begin(kind, peer, source, into)

        def timed() -> None:
            started = time.process_time()
            wait()
            (self.whole or self).waited += time.process_time() - started

        return timed


def job(net: str, ranks: int, shard: str, tensor: int) -> None:
    """One rank of a run; the first prints what all have found."""
    world = Timed(current())
    with using(world):
        step = fp.compile(
            fp.models.build(NETS[net].format(batch=SAMPLES * tensor // ranks)),
            loss=fp.losses.cross_entropy,
            optimizer=OPTIMIZERS.get(net, fp.optim.AdamW(1e-3)),
            target="cpu:threads=1",
            ranks=ranks,
            shard=shard,
            tensor=tensor,
            batch_norm="sync",
        )
        session = step.bind(seed=0)
        rng, losses, seconds, processor = np.random.default_rng(0), [], 0.0, 0.0
        for number in range(STEPS):
            batch = {}
            for slot in step.program.required_inputs:
                shape, is_float = (SAMPLES, *slot.operand.type.shape[1:]), slot.operand.type.dtype.is_float
                whole = rng.standard_normal(shape, np.float32) if is_float else rng.integers(0, 10, shape)
                batch[slot.name] = np.split(whole, ranks // tensor)[world.rank // tensor]
            if number == WARM:
                world.gather(None)
                seconds, processor, world.waited = -time.perf_counter(), -time.process_time(), 0.0
            losses.append(session.step(batch).loss)
        seconds, processor = seconds + time.perf_counter(), processor + time.process_time()
        found = {"processor": processor, "waited": world.waited, "allocated": session.allocated_bytes}
        every = world.gather(found)
        if world.rank == 0:
            figures = step.estimate()
            told = {name: figures[name] for name in ("arena_bytes", "sent_bytes", "exchanges", "categories")}
            print(json.dumps(told | {"losses": losses, "seconds": seconds / (STEPS - WARM), "by_rank": every}))


def measured(net: str, ranks: int, shard: str, tensor: int) -> dict[str, Any]:
    """One run."""
    launcher = shutil.which("mpiexec", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])))
    start = [] if ranks == 1 else [str(launcher), "-n", str(ranks)]
    words = [*start, sys.executable, str(HERE), "job", net, str(ranks), shard, str(tensor)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def run_table(rows: dict[str, Any]) -> str:
    """A row a run."""
    lines = [
        "| net | ranks | in parts | products in parts | loss after 12 steps | arena, planned and allocated "
        "| optimizer state | sent | waited for | efficiency |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for net in NETS:
        alone = rows[f"{net}|1|none|1"]["by_rank"][0]["processor"]
        for ranks, shard, tensor in runs_of(net):
            row = rows[f"{net}|{ranks}|{shard}|{tensor}"]
            assert {each["allocated"] for each in row["by_rank"]} == {row["arena_bytes"]}
            work = sum(each["processor"] - each["waited"] for each in row["by_rank"])
            waited = sum(each["waited"] for each in row["by_rank"]) / sum(each["processor"] for each in row["by_rank"])
            many = ranks > 1
            lines.append(
                f"| {net} | {ranks} | {shard if many else ''} | {tensor if tensor > 1 else ''} | "
                f"{row['losses'][-1]:.6f} | "
                f"{format_bytes(row['arena_bytes'])} | {format_bytes(row['categories']['optimizer_state'])} | "
                f"{format_bytes(row['sent_bytes']) if many else ''} | {f'{waited:.0%}' if many else ''} | "
                f"{f'{alone / work:.2f}' if many else ''} |"
            )
    return "\n".join(lines)


def runs_of(net: str) -> list[tuple[int, str, int]]:
    """Ranks, what is in parts, and how many ranks have parts of products, of which a convolution is none."""
    return [*((ranks, shard, 1) for ranks, shard in RUNS), *(GROUPS if not net.startswith("ResNet") else [])]


SHAPES = {
    "GPT, 36 × 4,096": "gpt2_small:layers=36,width=4096,heads=32,seq=1024",  # ZeRO's row has 7.5 B on 64 ranks
    "Llama 2 7B": "llama:layers=32,width=4096,heads=32,kv_heads=32,features=11008,vocabulary=32000,tied=False,seq=4096",
    "Llama 2 70B": "llama:layers=80,width=8192,heads=64,kv_heads=8,features=28672,vocabulary=32000,tied=False,seq=4096",
}
COUNTS = (1, 8, 64, 512)


def estimated(text: str, ranks: int, shard: str, target: str, tensor: int = 1) -> dict[str, Any]:
    """The figures of a step at one sample a rank, or a group of ranks that have parts of products."""
    step = fp.compile(
        fp.models.build(text + ",batch=1"),
        loss=fp.losses.cross_entropy,
        optimizer=fp.optim.AdamW(1e-4),
        target=target,
        precision="bf16",
        ranks=ranks,
        shard=shard,
        tensor=tensor,
    )
    figures = step.estimate()
    names = ("arena_bytes", "peak_bytes", "categories", "sent_bytes", "predicted_seconds", "exchange_seconds")
    told = {name: figures[name] for name in names}
    return told | {"numbers": figures["weights"]["trained"]["numbers"], "plan_seconds": figures["plan_seconds"]}


def estimate_table(rows: dict[str, Any]) -> str:
    """A row an estimate."""
    lines = [
        "| model | ranks | in parts | peak of a rank | parameters and state | activations | sent | exchanges | step |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for key, row in rows.items():
        model, ranks, shard = key.split("|")
        parts = shard if int(ranks) > 1 else ""
        lines.append(f"| {model}, {format_count(row['numbers'])} | {int(ranks):,} | {parts} | {cells(row)}")
    return "\n".join(lines)


def cells(row: dict[str, Any]) -> str:
    """The figures of an estimate, as both tables have them."""
    kept = row["categories"]["parameters"] + row["categories"]["optimizer_state"]
    return (
        f"{format_bytes(row['peak_bytes'])} | {format_bytes(kept)} | "
        f"{format_bytes(row['categories']['activations'])} | {format_bytes(row['sent_bytes'])} | "
        f"{format_seconds(row['exchange_seconds'])} | {format_seconds(row['predicted_seconds'])} |"
    )


def group_table(rows: dict[str, Any]) -> str:
    """A row an estimate of groups."""
    lines = [
        "| model | ranks | products in parts | in parts | peak of a rank | parameters and state | activations | sent "
        "| exchanges | step |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for key, row in rows.items():
        model, ranks, shard, tensor = key.split("|")
        lines.append(f"| {model} | {int(ranks):,} | {tensor} | {shard} | {cells(row)}")
    return "\n".join(lines)


class Cut(NamedTuple):
    """A step in stages, one sample a micro-batch of each group."""

    model: str
    stages: int
    micro_batches: int
    ranks: int
    tensor: int = 1
    shard: str = "none"

    @property
    def key(self) -> str:
        """Of its row."""
        return "|".join(map(str, self))


CUTS = (
    Cut("Llama 2 7B", 1, 8, 1),
    Cut("Llama 2 7B", 4, 8, 4),
    Cut("Llama 2 7B", 8, 8, 8),
    Cut("Llama 2 7B", 8, 16, 8),
    Cut("Llama 2 7B", 4, 16, 64, 8, "state"),
    Cut("Llama 2 70B", 8, 16, 8),
    Cut("Llama 2 70B", 8, 16, 512, 8, "state"),
)


def in_stages(cut: Cut, target: str) -> dict[str, Any]:
    """The figures of a step in stages."""
    options = Options(
        fp.losses.cross_entropy,
        fp.optim.AdamW(1e-4),
        target=target,
        precision="bf16",
        ranks=cut.ranks,
        stages=cut.stages,
        tensor=cut.tensor,
        shard=cut.shard,
        accumulate=cut.micro_batches,
    )
    model = fp.models.build(SHAPES[cut.model] + ",batch=1")
    if cut.stages == 1:
        figures = fp.compiler.api.compile_with(model, options).estimate()
        peaks, bubble = [figures["peak_bytes"]], 0.0
    else:
        figures = Staged.of(model, options).estimate()
        peaks, bubble = [row["peak_bytes"] for row in figures["by_stage"]], figures["bubble_ratio"]
    return {
        "peaks": peaks,
        "bubble": bubble,
        "predicted_seconds": figures["predicted_seconds"],
        "sent_bytes": max((row["sent_bytes"] for row in figures.get("by_stage", [])), default=0),
        "exchanged_bytes": max((row["exchanged_bytes"] for row in figures.get("by_stage", [])), default=0),
    }


def stages_table(rows: dict[str, Any]) -> str:
    """A row an estimate."""
    lines = [
        "| model | ranks | stages | products in parts | in parts | micro-batches | peak of the first | of the last "
        "| to other stages | within | stand still | (S − 1) / (M + S − 1) | step |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for cut in CUTS:
        if (row := rows.get(cut.key)) is None:
            continue
        s, m = cut.stages, cut.micro_batches
        lines.append(
            f"| {cut.model} | {cut.ranks} | {s} | {cut.tensor if cut.tensor > 1 else ''} | "
            f"{cut.shard if cut.ranks > s else ''} | {m} | "
            f"{format_bytes(row['peaks'][0])} | {format_bytes(row['peaks'][-1])} | {format_bytes(row['sent_bytes'])} | "
            f"{format_bytes(row['exchanged_bytes'])} | {row['bubble']:.1%} | {(s - 1) / (m + s - 1):.1%} | "
            f"{format_seconds(row['predicted_seconds'])} |"
        )
    return "\n".join(lines)


def kept() -> dict[str, Any]:
    """What was measured before."""
    found: dict[str, Any] = json.loads(FILE.read_text()) if FILE.exists() else {}
    return found


def keep(part: str, rows: dict[str, Any], table: Callable[[dict[str, Any]], str]) -> None:
    """Write figures, and their table."""
    FILE.write_text(json.dumps(kept() | {part: rows}, indent=1) + "\n")
    put("docs/ranks.md", part, table(rows))


@click.group()
def main() -> None:
    """Steps of several ranks."""


@main.command()
def run() -> None:
    """Run them on this machine."""
    rows = {}
    for net in NETS:
        for ranks, shard, tensor in runs_of(net):
            key = f"{net}|{ranks}|{shard}|{tensor}"
            rows[key] = measured(net, ranks, shard, tensor)
            click.echo(f"{key}: {rows[key]['losses'][-1]}", err=True)
    keep("runs", rows, run_table)


@main.command()
@click.option("--target", default="cuda:h100")
def estimate(target: str) -> None:
    """Estimate clusters."""
    rows = {}
    for model, text in SHAPES.items():
        for ranks in COUNTS if model.startswith("Llama") else (64,):
            for shard in ("none", "state", "parameters") if ranks > 1 else ("none",):
                rows[f"{model}|{ranks}|{shard}"] = estimated(text, ranks, shard, target)
                click.echo(f"{model}, {ranks} ranks, {shard}", err=True)
    keep("estimates", rows, estimate_table)


@main.command()
@click.option("--target", default="cuda:h100")
def groups(target: str) -> None:
    """Estimate clusters whose nodes of 8 have parts of the products."""
    rows = {}
    for model in ("Llama 2 7B", "Llama 2 70B"):
        for ranks, shard in ((8, "none"), (64, "none"), (64, "parameters"), (512, "parameters")):
            rows[f"{model}|{ranks}|{shard}|8"] = estimated(SHAPES[model], ranks, shard, target, tensor=8)
            click.echo(f"{model}, {ranks} ranks, {shard}", err=True)
    keep("groups", rows, group_table)


@main.command("estimate-stages")
@click.option("--target", default="cuda:h100")
@click.option("--only", type=click.Choice([cut.key for cut in CUTS]), multiple=True, help="Of these rows alone.")
def estimate_stages(target: str, only: tuple[str, ...]) -> None:
    """Estimate steps in stages."""
    rows = {key: row for key, row in kept().get("stages", {}).items() if key in {cut.key for cut in CUTS}}
    for cut in CUTS:
        if not only or cut.key in only:
            rows[cut.key] = in_stages(cut, target)
            click.echo(cut.key, err=True)
            keep("stages", rows, stages_table)


for _name in ("tensor", "shard", "ranks", "net"):
    job = click.argument(_name, type=int if _name in ("ranks", "tensor") else str)(job)
main.command("job")(job)

if __name__ == "__main__":
    main()
