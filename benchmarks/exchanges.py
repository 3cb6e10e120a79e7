"""Exchanges between ranks on this machine: how long they take, beside predictions.

    python benchmarks/exchanges.py sizes   # by themselves, of several sizes, with 2 and 4 ranks, by MPI and by Gloo
    python benchmarks/exchanges.py steps   # within training steps of 2 ranks, and how much of them computing covers

Writes exchanges.json beside this file, and tables into docs/links.md. Every job measures each figure several times,
one after the other in turns, and takes the median: others may use the machine meanwhile.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
from pages import put
from ranks import NETS

import foreplan as fp
from foreplan.base.units import format_bytes, format_seconds
from foreplan.calibration.links import GLOO, MEMORY, alone, start
from foreplan.lower import target_named
from foreplan.lower.exchanges import Exchanges, cluster_from
from foreplan.lower.links import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, nanoseconds
from foreplan.ops.collective import Begin, Finish
from foreplan.runtime.kernel import Run
from foreplan.runtime.ranks import World, current, using

HERE = Path(__file__).resolve()
FILE = HERE.with_suffix(".json")
SIZES = (1 << 16, 1 << 20, 1 << 24, 1 << 26)  # bytes of the whole tensor
RANKS, SAMPLES, TURNS, WARM = (2, 4), 8, 15, 3
SHARDS = ("none", "state", "parameters")
LARGEST = 1 << 27  # bytes of an exchange in a step
TARGET = "cpu:threads=1"


class Timed:
    """A world that times all that its rank spends on exchanges, waiting included.

    Attributes:
        spent: seconds.
    """

    def __init__(self, inner: World) -> None:
        self.inner, self.spent = inner, 0.0
        self.rank, self.size, self.name, self.neighbours = inner.rank, inner.size, inner.name, inner.neighbours
        self.gather, self.meet, self.abort = inner.gather, inner.meet, inner.abort
        self.send, self.receive = inner.send, inner.receive

    def group(self, ranks: int, stride: int) -> World:
        """All ranks: no step here has others."""
        assert (ranks, stride) == (self.size, 1)
        return self

    def timed(self, call: Callable[..., Any], *given: Any) -> Any:
        """What a call gives."""
        started = time.perf_counter()
        found = call(*given)
        self.spent += time.perf_counter() - started
        return found

    def poll(self) -> None:
        """As the world does."""
        self.timed(self.inner.poll)

    def begin(self, kind: str, peer: int, source: np.ndarray, into: np.ndarray) -> Run:
        """As the world does."""
        wait = self.timed(self.inner.begin, kind, peer, source, into)
        return lambda: self.timed(wait)


def summed(world: World, array: np.ndarray, pieces: np.ndarray) -> float:
    """Seconds of an all_reduce of float32, as foreplan runs it: pieces are exchanged, added up and gathered."""
    world.gather(None)
    started = time.perf_counter()
    world.begin("all_to_all", 0, array.view(np.uint8), pieces.view(np.uint8))()
    part = pieces.reshape(world.size, -1).sum(0)
    world.begin("all_gather", 0, part.view(np.uint8), array.view(np.uint8))()
    return max(world.gather(time.perf_counter() - started))


def by_size() -> dict[str, Any]:
    """What one job finds of exchanges by themselves."""
    world, found = current(), dict[str, list[float]]()
    for _ in range(TURNS):
        for nbytes in SIZES:
            whole, other = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
            part, floats = whole[: nbytes // world.size], np.ones((2, nbytes // 4), np.float32)
            times = {
                ALL_GATHER: alone(world, "all_gather", part, other),
                REDUCE_SCATTER: alone(world, "all_to_all", whole, other),
                ALL_REDUCE: summed(world, floats[0], floats[1]),
            }
            for kind, seconds in times.items():
                found.setdefault(f"{kind}|{nbytes}", []).append(seconds)
    return {"library": world.name, "seconds": {key: statistics.median(times[WARM:]) for key, times in found.items()}}


def in_step(net: str, shard: str, link: str) -> dict[str, Any]:
    """What one job finds of a training step: medians over steps, and means of ranks."""
    world = Timed(current())
    with using(world):
        step = fp.compile(
            fp.models.build(NETS[net].format(batch=SAMPLES // world.size)),
            loss=fp.losses.cross_entropy,
            optimizer=fp.optim.AdamW(1e-3),
            target=TARGET,
            ranks=world.size,
            shard=shard,
            links=link,
        )
        session = step.bind(seed=0)
    calls = [step.program.calls[each.action] for each in step.plan.steps]
    begun = [(call.op.kind, call.inputs[0].type.nbytes) for call in calls if isinstance(call.op, Begin)]
    sent, arriving = np.ones(LARGEST, np.uint8), np.ones(LARGEST, np.uint8)
    rng, turns = np.random.default_rng(world.rank), list[tuple[float, float, float]]()
    for _ in range(TURNS):
        batch = {}
        for slot in step.program.required_inputs:
            type = slot.operand.type
            is_float = type.dtype.is_float
            batch[slot.name] = (
                rng.standard_normal(type.shape, np.float32) if is_float else rng.integers(0, 9, type.shape)
            )
        world.gather(None)
        world.spent = 0.0
        started = time.perf_counter()
        session.step(batch)
        whole, spent, by_itself = time.perf_counter() - started, world.spent, 0.0
        for kind, nbytes in begun:
            arrives = nbytes * world.size if kind == "all_gather" else nbytes
            by_itself += alone(world.inner, kind, sent[:nbytes], arriving[:arrives])
        mine = (whole, spent, by_itself)
        turns.append(tuple(statistics.mean(each) for each in zip(*world.gather(mine))))
    medians = [statistics.median(each) for each in zip(*turns[WARM:])]
    figures = Exchanges.of(step.program, step.plan)
    actions = [step.program.actions[each.action] for each in step.plan.steps]
    computing = sum(a.nanoseconds for a, c in zip(actions, calls) if not isinstance(c.op, Begin | Finish))
    return {
        "measured": dict(zip(("step", "spent", "alone"), medians)),
        "predicted": {
            "step": figures.step / 1e9,
            "computing": computing / 1e9,
            "alone": figures.nanoseconds / 1e9,
        },
    }


def job(link: str, ranks: int, *words: str) -> dict[str, Any]:
    """What the first rank of a job prints."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [*start(link, ranks), str(HERE), "rank", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def keep(part: str, rows: Any, text: str) -> None:
    """Write figures, and their table."""
    found = json.loads(FILE.read_text()) if FILE.exists() else {}
    FILE.write_text(json.dumps(found | {part: rows}, indent=1) + "\n")
    put("docs/links.md", part, text)


def predicted(kind: str, nbytes: int, ranks: int, link: str) -> float:
    """Seconds of an exchange, by the link as this machine was calibrated."""
    return nanoseconds(kind, nbytes, cluster_from(link, target_named("numpy").profile, ranks)) / 1e9


def sizes_table(rows: dict[str, Any]) -> str:
    """A row a size: times, and how many times as much was predicted."""
    lines = ["| tensor | ranks | exchange | MPI | predicted / measured | Gloo | predicted / measured |"]
    lines.append("|---|---|---|---|---|---|---|")
    for kind in (ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE):
        for ranks in RANKS:
            for nbytes in SIZES:
                cells = []
                for link in (MEMORY, GLOO):
                    seconds = rows[f"{link}|{ranks}"]["seconds"][f"{kind}|{nbytes}"]
                    ratio = predicted(kind, nbytes, ranks, link) / seconds
                    cells += [format_seconds(seconds), f"{ratio:.2f}"]
                lines.append(f"| {format_bytes(nbytes)} | {ranks} | {kind} | {' | '.join(cells)} |")
    return "\n".join(lines)


def steps_table(rows: dict[str, Any]) -> str:
    """A row a step: predicted times over measured ones, and the share of exchanges that computing covers."""
    lines = [
        "| net, 2 ranks | in parts | by | step | predicted / measured | exchanges by themselves | predicted / measured "
        "| covered, predicted | measured |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for key, row in rows.items():
        net, shard, link = key.split("|")
        found, told = row["measured"], row["predicted"]
        shares = [1 - (told["step"] - told["computing"]) / told["alone"], 1 - found["spent"] / found["alone"]]
        lines.append(
            f"| {net} | {shard} | {'MPI' if link == MEMORY else 'Gloo'} | {format_seconds(found['step'])} | "
            f"{told['step'] / found['step']:.2f} | {format_seconds(found['alone'])} | "
            f"{told['alone'] / found['alone']:.2f} | {' | '.join(f'{max(0.0, share):.0%}' for share in shares)} |"
        )
    return "\n".join(lines)


@click.group()
def main() -> None:
    """Exchanges between ranks."""


@main.command()
def sizes() -> None:
    """Measure exchanges by themselves."""
    rows = {}
    for ranks in RANKS:
        for link in (MEMORY, GLOO):
            rows[f"{link}|{ranks}"] = job(link, ranks)
            click.echo(f"{ranks} ranks by {rows[f'{link}|{ranks}']['library']}", err=True)
    keep("sizes", rows, sizes_table(rows))


@main.command()
def steps() -> None:
    """Measure them within training steps."""
    rows = {}
    for net in ("GPT, 4 layers of 256", "MLP, 4 × 1,024"):
        for shard in SHARDS:
            for link in (MEMORY, GLOO):
                rows[f"{net}|{shard}|{link}"] = job(link, 2, net, shard, link)
                click.echo(f"{net}, {shard}, {link}", err=True)
    keep("steps", rows, steps_table(rows))


@main.command()
@click.argument("words", nargs=-1)
def rank(words: tuple[str, ...]) -> None:
    """One rank of a job."""
    found = in_step(*words) if words else by_size()
    if current().rank == 0:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
