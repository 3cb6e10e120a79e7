"""Another batch size for a model that was exported with a fixed one.

The model is imported twice: as exported, which gives every tensor's shape, and with the new batch. An extent that
differs between the two carries the batch. So the second import knows at every Reshape which extent of a written shape
was the batch, and at every other node whether the batch arrived.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

from foreplan.base.errors import ShapeError
from foreplan.graph.types import Shape

_RESHAPES = ("Reshape", "Flatten", "Squeeze", "Unsqueeze")


class Rebatched(Protocol):
    """The part of an `OnnxNode` that the change of batch needs."""

    op_type: str
    source: str
    input_names: tuple[str, ...]

    @property
    def inputs(self) -> Sequence[object]:
        """Its inputs."""

    def has(self, index: int) -> bool:
        """Whether input `index` is given."""

    def shape(self, index: int) -> Shape:
        """Of input `index`, in the new batch."""


class Rebatch:
    """The change from batch `old` to batch `new`.

    Attributes:
        shapes: the shape of every tensor of the model as exported, by its unique name.
        notes: the rewritten shapes.
    """

    def __init__(self, old: int, new: int, shapes: Mapping[str, Shape]) -> None:
        self.old = old
        self.new = new
        self.shapes = shapes
        self.notes: list[str] = []
        self._inner: dict[tuple[str, int], int] = {}  # (tensor, axis) → entries of the axis from one item to the next

    def before(self, n: Rebatched, index: int) -> Shape:
        """The shape that input `index` has in the model as exported."""
        return self.shapes.get(n.input_names[index], n.shape(index))

    def carries(self, n: Rebatched, index: int, axis: int) -> bool:
        """Whether that axis of input `index` has another extent than as exported."""
        return self.before(n, index)[axis] != n.shape(index)[axis]

    def carries_any(self, n: Rebatched, index: int) -> bool:
        """Whether input `index` has the batch in any axis."""
        return self.before(n, index) != n.shape(index)

    def scaled(self, extent: int) -> int | None:
        """An extent with the new batch in place of the old one; None if it does not contain the batch."""
        whole, rest = divmod(extent * self.new, self.old)
        return None if rest else whole

    def reshaped(self, n: Rebatched, written: Shape) -> Shape:
        """The target of a Reshape of input 0 in the new batch.

        Args:
            n: the node.
            written: its target in the model as exported, every extent known.

        Raises:
            ShapeError: no extent of the target can hold the batch.
        """
        before, now = self.before(n, 0), n.shape(0)
        if before == now:
            return written
        # In C order one step of the batch spans `step` elements; the target's axis must begin and end on such borders.
        step = self._step(n, 0)
        fitting = []
        for i, extent in enumerate(written):
            stride = math.prod(written[i + 1 :])
            grown = self.scaled(extent)
            if stride and step % stride == 0 and stride * extent % (step * self.old) == 0 and grown is not None:
                fitting.append((extent != self.old, i, grown))
        if not fitting:
            raise self.fixed(n, f"its target shape {list(written)} has no extent that is the batch or a multiple of it")
        _, i, grown = min(fitting)
        return (*written[:i], grown, *written[i + 1 :])

    def _step(self, n: Rebatched, index: int) -> int:
        """Elements from one item of the batch to the next in input `index`, which is in C order."""
        before, now = self.before(n, index), n.shape(index)
        carrying = [i for i, (a, b) in enumerate(zip(before, now)) if a != b]
        if len(before) != len(now) or len(carrying) != 1:
            raise self.fixed(n, f"the batch is not in one axis of {list(before)}, which becomes {list(now)}")
        (axis,) = carrying
        step = self._entries(n.input_names[index], axis, before[axis]) * math.prod(before[axis + 1 :])
        if not step:
            raise self.fixed(n, f"{list(before)} has no elements, so the batch cannot be told from other axes")
        return step

    def _entries(self, name: str, axis: int, extent: int) -> int:
        """Entries of an axis from one item of the batch to the next; by default the batch is outermost in the axis."""
        return self._inner.get((name, axis), extent // self.old)

    def note_rewritten(self, n: Rebatched, old: Sequence[int], new: Sequence[int]) -> None:
        """Tell the user that a written shape was changed."""
        self.notes.append(
            f"{n.source}: batch {self.old} → {self.new}: the shape {list(old)} written in the model became {list(new)}"
        )

    def fixed(self, n: Rebatched, reason: str) -> ShapeError:
        """The error for a node that fixes the batch of the export."""
        return ShapeError(
            f"{n.source} fixes the batch at {self.old}, so the model cannot be imported with batch {self.new}: "
            f"{reason}; import it with batch {self.old}, or export it again with a symbolic batch"
        )

    def explain(self, error: ShapeError) -> str:
        """The message for shapes that fit as exported, but not with the new batch."""
        if "fixes the batch at" in str(error):
            return str(error)
        return (
            f"{error}. With the batch of the export, {self.old}, it fits: this node fixes the batch, so the model "
            f"cannot be imported with batch {self.new}; export it again with a symbolic batch"
        )

    def check(self, n: Rebatched, name: str, now: Shape) -> None:
        """Each extent of an output is as exported, or that times new/old.

        Raises:
            ShapeError: it is neither: a part of the batch was lost or something was added to it.
        """
        before = self.shapes.get(name)
        if before is None:
            return
        if len(before) != len(now):
            raise self.fixed(n, f"its output {name!r} is {list(before)} as exported and would be {list(now)}")
        for axis, (a, b) in enumerate(zip(before, now)):
            if a == b:
                continue
            if b * self.old != a * self.new:
                raise self.fixed(n, f"its output {name!r} is {list(before)} as exported and would be {list(now)}")
            self._follow(n, name, axis)

    def _follow(self, n: Rebatched, name: str, axis: int) -> None:
        """Note where in an axis of an output the batch lies; the axis may also hold heads or directions."""
        before = self.shapes[name]
        if n.op_type in _RESHAPES:
            self._inner[name, axis] = self._step(n, 0) // max(1, math.prod(before[axis + 1 :]))
            return
        for index in range(len(n.inputs)):
            if not n.has(index):
                continue
            for i, pair in enumerate(zip(self.before(n, index), n.shape(index))):
                if pair[0] == before[axis] and pair[0] != pair[1]:
                    self._inner[name, axis] = self._entries(n.input_names[index], i, before[axis])
                    return
