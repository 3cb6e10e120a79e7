"""What each rank gives to a step that all must give alike: told beside the step's exchanges, and compared behind."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from foreplan.graph import Kind
from foreplan.lower.program import Program, Slot
from foreplan.runtime.inputs import default_of
from foreplan.runtime.world.agreement import agree, refuse_differences
from foreplan.runtime.world.digests import checksum
from foreplan.runtime.world.world import World

_WORD = 8  # bytes
_WHAT = "what they give to a step"
_ADVICE = "give the ranks of a group, which compute parts of one model, the same samples"


class StepNotes:
    """Compares what the ranks of a job give to each step: inputs with a default, such as the learning rate, which all
    give alike; what was assigned to stored values; and samples, of which ranks that compute parts of one model take the
    same.

    Of samples, it compares a sum over all of their bytes.
    """

    def __init__(self, program: Program, inputs: Mapping[str, Slot], world: World) -> None:
        """
        Args:
            program: of the step, or its body.
            inputs: of the step, by name.
        """
        self.world = world
        self.steps = 0  # begun by this session
        self.in_use = world.size > 1 and program.loss is not None
        self._defaults = {name: default_of(slot) for name, slot in inputs.items() if slot.init is not None}
        self._alike, self._of_stage = program.tensor, program.of_stage
        self._buffers = {slot.name for slot in program.tensors if slot.kind is Kind.BUFFER}  # each rank has its own
        self.assigned: dict[str, str] = {}
        if self.in_use and program.is_stage:  # which differ in what they take
            told = world.gather((list(self._defaults), program.tensor), "the inputs of stages")
            common = set.intersection(*({*names} for names, _ in told if names)) if any(n for n, _ in told) else set()
            self._defaults = {name: array for name, array in self._defaults.items() if name in common}
            self._alike = max(tensor for _, tensor in told)

    def assign(self, name: str, array: np.ndarray) -> None:
        """Note what is assigned to a stored value, until another is read from a file."""
        if self.in_use and name not in self._buffers:
            self.assigned[name] = checksum(array)

    def read(self, names: Iterable[str]) -> None:
        """Forget what was assigned to values that were read from a file since."""
        for name in names:
            self.assigned.pop(name, None)

    def begin(self, batches: Sequence[Mapping[str, np.ndarray]]) -> Callable[[], None]:
        """Tell what this rank gives to a step, to each micro-batch; the returned call waits for what others tell.

        It raises:
            SessionError: another rank has given something else; with the same message on all of them.
        """
        self.steps += 1
        given = {name: _as(batches[0].get(name, first), first) for name, first in self._defaults.items()}
        samples = 0
        if self._alike > 1:
            for number, batch in enumerate(batches):
                for name, array in batch.items():
                    samples += (number + 1) * _sum(array) if name not in given else 0
        options = zlib.crc32(b"".join(array.tobytes() for array in given.values())) if given else None
        assigned = zlib.crc32(repr(sorted(self.assigned.items())).encode())
        words = (self.steps, 2**64 - 1 if options is None else options, assigned, samples)
        told = self.world.tell(b"".join((each % 2**64).to_bytes(_WORD, "little") for each in words), _WHAT)

        def compare() -> None:
            notes = [[note[i : i + _WORD] for i in range(0, 4 * _WORD, _WORD)] for note in told()]
            steps, options, writes, sums = zip(*notes)
            stages = [writes[first : first + self._of_stage] for first in range(0, len(writes), self._of_stage)]
            alike = all(len(set(stage)) == 1 for stage in stages)
            if len(set(steps)) > 1 or len({*options} - {b"\xff" * _WORD}) > 1 or not alike:
                facts: dict[str, object] = {"the number of steps that it has begun": self.steps}
                facts |= {f"the input {name!r}": _shown(each) for name, each in given.items()}
                facts |= {f"the checksum of what was assigned to {name!r}": x for name, x in self.assigned.items()}
                agree(self.world, _WHAT, facts)
            for first in range(0, len(sums), self._alike):
                group = range(first, first + self._alike)
                own = [int.from_bytes(each, "little") if rank in group else None for rank, each in enumerate(sums)]
                refuse_differences(_WHAT, [{"the sum over its samples": each} for each in own], _ADVICE)

        return compare


def _as(array: np.ndarray, like: np.ndarray) -> np.ndarray:
    """An input as the step takes it."""
    with np.errstate(all="ignore"):
        return np.asarray(array).astype(like.dtype)


def _shown(array: np.ndarray) -> str:
    """An input, for people."""
    return str(array.reshape(-1)[0]) if array.size == 1 else f"an array with the checksum {checksum(array)}"


def _sum(array: np.ndarray) -> int:
    """A sum over the bytes of an array, word by word."""
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    whole = flat.size // _WORD * _WORD
    rest = int.from_bytes(flat[whole:].tobytes(), "little")
    return int(np.add.reduce(flat[:whole].view(np.uint64), dtype=np.uint64)) + rest
