"""Checkpoints of several ranks, each a thread: where a call of the first, which writes, fails, all of them say so."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import foreplan as fp
from foreplan.compiler.compiled import Compiled
from tests.ranks.threads import Thread, run

RANKS = 2
MODEL = "mlp:batch=4,width=64,layers=2,inputs=6,classes=3"


def in_parts() -> list[Compiled]:
    """A step whose parameters are in parts, for each rank."""
    options: dict[str, Any] = {"target": "numpy", "ranks": RANKS, "shard": "parameters"}
    return [fp.compile(fp.models.build(MODEL), fp.losses.cross_entropy, fp.optim.AdamW(0.1), **options)] * RANKS


def in_stages() -> list[Compiled]:
    """The stages of a step."""
    options: dict[str, Any] = {"target": "numpy", "ranks": RANKS, "stages": RANKS, "accumulate": 2}
    model, loss, optimizer = fp.models.build(MODEL), fp.losses.cross_entropy, fp.optim.AdamW(0.1)
    return [fp.compile(model, loss, optimizer, stage=stage, **options) for stage in range(RANKS)]


class RanksSave:
    """A checkpoint of several ranks takes the place of an older one."""

    def __init__(self, folder: Path, steps: Sequence[Compiled]) -> None:
        """Writes the older one."""
        self.folder, self.path, self.steps = folder, folder / "file", steps
        self.happened = False
        self._write(1)
        self.old, self.new = self.path.read_bytes(), b""

    def run(self) -> None:
        """Write the newer one; nothing fails."""
        self._write(2)
        self.new = self.path.read_bytes()

    def attempt(self, arm: Callable[[], object], disarm: Callable[[], int]) -> bool:
        """Write it while a call fails; whether one did."""
        self.happened = False
        self._write(2, arm, disarm)
        return self.happened

    def _write(self, count: int, arm: Callable[[], object] = int, disarm: Callable[[], int] = int) -> None:
        def job(world: Thread) -> BaseException | None:
            step = self.steps[world.rank]
            session = step.bind(seed=1)
            for _ in range(count):
                session.step(batch(step))
            try:
                if world.rank == 0:
                    arm()
                session.save(self.path)
            except (fp.ForeplanError, MemoryError) as error:
                return error
            finally:
                if world.rank == 0:
                    self.happened = bool(disarm())
            return None

        errors = [error for error in run(RANKS, job) if error is not None]
        assert len(errors) in (0, RANKS), f"some ranks take it for written: {errors}"
        if errors:
            raise errors[0]

    def check(self, done: bool) -> None:
        """The file is the old one or the new one, and nothing lies beside it."""
        assert os.listdir(self.folder) == ["file"], os.listdir(self.folder)
        assert self.path.read_bytes() in ((self.new,) if done else (self.old, self.new))
        self.path.write_bytes(self.old)


def batch(step: Compiled) -> dict[str, np.ndarray]:
    """What a rank reads of a batch; of stages, of two micro-batches."""
    rng, several = np.random.default_rng(0), (2,) if step.program.is_stage else ()
    every = {"x": rng.standard_normal((*several, 4, 6), np.float32), "target": rng.integers(0, 3, (*several, 4))}
    return {slot.name: every[slot.name] for slot in step.program.required_inputs}
