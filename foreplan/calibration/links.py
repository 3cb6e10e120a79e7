"""Measures how fast ranks on this machine exchange bytes: `foreplan devices --calibrate`.

Run as a program by a launcher, it is one of the ranks.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from foreplan.base.calibration import Calibration
from foreplan.base.errors import TargetError
from foreplan.base.processor import cores, model
from foreplan.lower.links import LINKS

if TYPE_CHECKING:
    from foreplan.runtime.ranks import World

MEMORY, GLOO = "memory", "gloo"  # links: by the MPI library of mpi4py, and by PyTorch's Gloo
SMALL, LARGE = 1 << 12, 1 << 24  # bytes of the tensors that are exchanged
TURNS = 15
MOST = 16  # ranks
_NEEDS = {MEMORY: ("mpi4py", "foreplan[mpi]"), GLOO: ("torch", "foreplan[torch]")}


def calibrate_link(link: str) -> Calibration:
    """Measure exchanges of two ranks on this machine, and of as many ranks as there are cores, 16 at most.

    Nothing else should use the machine meanwhile.

    Args:
        link: `memory` or `gloo`.

    Raises:
        TargetError: what the ranks need is not installed, or they fail.
    """
    package, extra = _NEEDS[link]
    if importlib.util.find_spec(package) is None:
        raise TargetError(f"{package} is not installed: pip install '{extra}'")
    many, two = min(cores(), MOST), _job(link, 2)
    rate, hop = _rate(two), max(1, round(two["seconds"][str(SMALL)] * 1e9))
    node = 2 * rate if many <= 2 else many * _rate(_job(link, many))
    figures = dict(zip(LINKS.always, (rate, max(rate, node), hop), strict=True))
    versions = {"library": two["library"], "processor": model()}
    return Calibration(LINKS, link, MappingProxyType(versions), MappingProxyType(figures))


def _rate(found: Mapping[str, Any]) -> int:
    """Bytes a second that each rank of a job sends, without the time of a message's way."""
    sent = LARGE * (found["ranks"] - 1) / found["ranks"]
    small, large = (found["seconds"][str(nbytes)] for nbytes in (SMALL, LARGE))
    return max(1, round(sent / max(large - small, large / 2)))


def _job(link: str, ranks: int) -> dict[str, Any]:
    """What the first of some ranks has found."""
    path = os.pathsep.join(each for each in sys.path if each)
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    words = [*start(link, ranks), "-m", "foreplan.calibration.links"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if any(map(str.isalpha, line))]  # launchers draw frames
        last = (said or [f"they ended with {done.returncode}"])[-1].strip()
        raise TargetError(f"{ranks} ranks could not be measured: {last}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def start(link: str, ranks: int) -> list[str]:
    """The words that start ranks, before those of a Python program.

    Raises:
        TargetError: there is no launcher.
    """
    if link == GLOO:
        return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    path = os.pathsep.join((os.path.dirname(sys.executable), os.environ.get("PATH", "")))
    launcher = shutil.which("mpiexec", path=path)
    if launcher is None:
        raise TargetError("there is no mpiexec, which starts ranks: pip install 'foreplan[mpi]'")
    return [launcher, "-n", str(ranks), sys.executable]


def alone(world: World, kind: str, source: np.ndarray, into: np.ndarray) -> float:
    """Seconds of one exchange with nothing else under way, of the slowest rank."""
    world.gather(None)
    started = time.perf_counter()
    world.begin(kind, 0, source, into)()
    seconds: list[float] = world.gather(time.perf_counter() - started)
    return max(seconds)


def _measured(world: World) -> dict[str, Any]:
    """The least time of the two exchanges that training needs most, for each size of the whole tensor."""
    seconds = {}
    for nbytes in (SMALL, LARGE):
        whole, into = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
        part = whole[: nbytes // world.size]
        into = into[: part.size * world.size]
        times = [
            (alone(world, "all_gather", part, into), alone(world, "all_to_all", whole[: into.size], into))
            for _ in range(TURNS)
        ]
        seconds[nbytes] = statistics.mean(map(min, zip(*times)))
    return {"library": world.name, "ranks": world.size, "seconds": seconds}


if __name__ == "__main__":
    from foreplan.runtime.ranks import current

    told = _measured(current())
    if current().rank == 0:
        print(json.dumps(told))
