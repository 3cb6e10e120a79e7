"""Ranks that torchrun has started, by PyTorch's Gloo."""

from __future__ import annotations

import atexit
import os
import sys
from typing import Any

import numpy as np

from foreplan.runtime.kernel import Run
from foreplan.runtime.ranks.world import comes_true, place_in_group


def connected() -> Gloo:
    """The world of all processes of a job, as torchrun's environment has it.

    Raises:
        ImportError: there is no PyTorch.
        ValueError: the environment does not say where they meet.
        RuntimeError: they do not come together.
    """
    import torch.distributed as dist

    dist.init_process_group("gloo")
    atexit.register(dist.destroy_process_group)
    return Gloo(list(range(dist.get_world_size())))


class Gloo:
    """A world of processes that PyTorch connects.

    What it moves are bytes, and it computes nothing: the order of sums is foreplan's own. Calls do not block, and go on
    by threads of the library.
    """

    def __init__(self, ranks: list[int], group: Any = None, whole: Gloo | None = None) -> None:
        """
        Args:
            ranks: of the whole job, in the order of this world.
            group: PyTorch's; None: of all.
            whole: what a group is of.
        """
        import torch
        import torch.distributed as dist

        self._torch, self._dist = torch, dist
        self._all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # until 2.12
        self._ranks, self._group = ranks, group
        self.rank, self.size = ranks.index(dist.get_rank()), len(ranks)
        self.name = f"Gloo of PyTorch {torch.__version__}"
        self.neighbours = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        self._open: set[int] = set() if whole is None else whole._open
        self._ending = dist.new_group(ranks) if whole is None else None
        self._groups: dict[tuple[int, int], Gloo] = {}

    def begin(self, kind: str, peer: int, source: np.ndarray, into: np.ndarray) -> Run:
        """One call that does not block; a shift is two."""
        given, result = self._torch.from_numpy(source), self._torch.from_numpy(into)
        among: dict[str, Any] = {"group": self._group, "async_op": True}
        if kind == "all_gather":
            return self._waiting(self._all_gather(result, given, **among))
        if kind == "all_to_all":
            return self._waiting(self._dist.all_to_all_single(result, given, **among))
        if kind == "broadcast":
            if self.rank == peer:
                np.copyto(into, source)
            return self._waiting(self._dist.broadcast(result, self._ranks[peer], **among))
        if not peer % self.size:
            np.copyto(into, source)
            return self.poll
        before, behind = (self._ranks[(self.rank + by) % self.size] for by in (-peer, peer))
        receives = self._dist.irecv(result, before, group=self._group)
        return self._waiting(receives, self._dist.isend(given, behind, group=self._group))

    def send(self, rank: int, number: int, source: np.ndarray) -> Run:
        """Its number is the tag."""
        return self._waiting(self._dist.isend(self._torch.from_numpy(source), self._ranks[rank], self._group, number))

    def receive(self, rank: int, number: int, into: np.ndarray) -> Run:
        """Its number is the tag."""
        return self._waiting(self._dist.irecv(self._torch.from_numpy(into), self._ranks[rank], self._group, number))

    def _waiting(self, *works: Any) -> Run:
        """What waits for calls, which are under way until then."""
        self._open.update(map(id, works))

        def wait() -> None:
            for work in works:
                work.wait()
            self._open.difference_update(map(id, works))

        return wait

    def group(self, ranks: int, stride: int) -> Gloo:
        """A process group of its own, made when it is first asked for, by all ranks at the same time."""
        if (ranks, stride) == (self.size, 1):
            return self
        if (ranks, stride) not in self._groups:
            places = [place_in_group(rank, ranks, stride) for rank in range(self.size)]
            for first in sorted({first for first, _ in places}):  # every rank takes part in making each
                members = [first + stride * number for number in range(ranks)]
                made = self._dist.new_group(members)
                if self.rank in members:
                    self._groups[ranks, stride] = Gloo(members, made, self)
        return self._groups[ranks, stride]

    def poll(self) -> None:
        """The library has threads for it."""

    def gather(self, content: Any) -> list[Any]:
        """By pickling."""
        found: list[Any] = [None] * self.size
        self._dist.all_gather_object(found, content, group=self._group)
        return found

    def meet(self, note: bytes, seconds: float) -> list[bytes] | None:
        """In a group of its own."""
        if self._open:
            return None
        notes, own = (
            self._torch.empty(self.size * len(note), dtype=self._torch.uint8),
            self._torch.tensor(list(note), dtype=self._torch.uint8),
        )
        work = self._all_gather(notes, own, group=self._ending, async_op=True)
        if not comes_true(work.is_completed, seconds):
            return None
        return [each.tobytes() for each in np.split(notes.numpy(), self.size)]

    def abort(self, code: int) -> None:
        """The process ends at once; torchrun sees it, and ends the others."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
