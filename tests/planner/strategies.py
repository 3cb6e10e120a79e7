"""Problems drawn by Hypothesis, so that what fails shrinks: everything that a problem can have, with joins."""

from __future__ import annotations

from hypothesis import strategies as st

from foreplan.planner import Category, Overwrite, Part, Problem, Role
from tests.planner.problems import Maker

SIZES = st.sampled_from([0, 4, 64, 100, 192, 256, 1024])
ALIGNMENTS = st.sampled_from([4, 64, 256])
SCRATCH = st.sampled_from([0, 0, 64, 500])
PRICES = st.sampled_from([0, 1, 10, 100])


class _Drawn:
    """A problem as it grows: what later actions may read."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.make = Maker()
        self.usable: list[int] = []
        self.waiting: list[int] = []  # stored values that have no next content yet

    def value(self, nbytes: int, region: int = 1, **more: object) -> int:
        name = f"v{len(self.make.values)}"
        return self.make.value(name, nbytes, region, **({"alignment": self.draw(ALIGNMENTS)} | more))

    def run(self, reads: list[int], writes: list[int], *pairs: Overwrite, **more: object) -> None:
        priced = {"nanoseconds": self.draw(PRICES), "workspace": self.draw(SCRATCH), "workspace_region": 1}
        self.make.action(f"a{len(self.make.actions)}", reads, writes, *pairs, **(priced | more))

    def some(self, most: int) -> list[int]:
        return self.draw(st.lists(st.sampled_from(self.usable), max_size=most, unique=True)) if self.usable else []

    def begin(self) -> None:
        for _ in range(self.draw(st.integers(0, 2))):
            self.waiting.append(self.value(self.draw(SIZES), 0, role=Role.STORED, category=Category.PARAMETERS))
        for _ in range(self.draw(st.integers(1, 2))):
            self.usable.append(self.value(self.draw(SIZES), role=Role.INPUT, category=Category.INPUTS))
        if self.draw(st.integers(0, 3)) == 3:
            self.value(self.draw(SIZES), role=Role.INPUT, category=Category.INPUTS)  # which nothing reads
        self.usable += self.waiting

    def compute(self) -> None:
        """An action with one to three results, perhaps in place, perhaps with other producers of the same."""
        reads = (
            list(dict.fromkeys([*self.usable[-1:], *self.some(2)])) if self.draw(st.integers(0, 7)) else self.some(3)
        )
        values = self.make.values
        taken = [v for v in reads if values[v].role is not Role.STORED]
        required = bool(taken) and self.draw(st.integers(0, 3)) == 3
        writes = []
        for k in range(self.draw(st.integers(1, 3))):
            nbytes, region = self.draw(SIZES), 2 if self.draw(st.integers(0, 15)) == 15 else 1
            if k == 0 and taken and (required or self.draw(st.booleans())):
                nbytes, region = values[taken[0]].nbytes, values[taken[0]].region
            output = not required and self.draw(st.integers(0, 7)) == 7
            writes.append(self.value(nbytes, region, role=Role.OUTPUT if output else Role.TRANSIENT))
        must = taken[0] if required and values[taken[0]].role is Role.TRANSIENT else -1
        pairs = [
            Overwrite(k, j, k == 0 and read == must)
            for k, write in enumerate(writes)
            for j, read in enumerate(reads)
            if values[read].region == values[write].region and values[read].nbytes >= values[write].nbytes
        ]
        required = any(pair.required for pair in pairs)
        effect = self.draw(st.integers(0, 15)) == 15
        self.run(reads, writes, *pairs, effect=effect)
        if not effect and not required:
            for _ in range(self.draw(st.sampled_from([0, 0, 0, 1, 2]))):  # the same from less, or with other scratch
                self.run(reads, writes[: self.draw(st.integers(1, len(writes)))])
        self.usable = [v for v in self.usable if not (required and v == must)] + writes

    def end(self) -> None:
        """What nobody reads is needed for an output, or some of it."""
        read = {v for action in self.make.actions for v in action.reads}
        unread = [v for v in self.usable if v not in read and self.make.values[v].role is Role.TRANSIENT]
        kept = [v for v in unread if self.draw(st.integers(0, 3))]
        if kept:
            self.run(kept, [self.value(64, role=Role.OUTPUT)])

    def join(self) -> None:
        """Parts one behind the other, made for it, or there already."""
        sizes = self.draw(st.lists(st.sampled_from([32, 64, 96]), min_size=2, max_size=3))
        parts = [self.value(nbytes, alignment=32) for nbytes in sizes]
        for part in parts:
            self.run(self.some(2), [part])
        table = self.value(sum(sizes) + self.draw(st.sampled_from([0, 0, 32])), alignment=64)
        where = [Part(0, k, sum(sizes[:k])) for k in range(len(sizes))]
        self.make.action(f"join{table}", parts, [table], parts=tuple(where))
        self.usable += [*(part for part in parts if self.draw(st.integers(0, 2)) == 0), table]

    def update(self) -> None:
        """The next content of a stored value, over the old one or beside its last reader."""
        if not self.waiting:
            return
        old = self.waiting.pop()
        nbytes = self.make.values[old].nbytes
        new = self.value(nbytes, 0, alignment=4, role=Role.OUTPUT, home=old)
        others = [v for v in self.some(2) if v != old]
        if self.draw(st.booleans()):
            self.run([old, *others], [new], Overwrite(0, 0, self.draw(st.booleans())), effect=self.draw(st.booleans()))
        else:
            self.run(others, [new], effect=True)
        self.usable = [v for v in self.usable if v != old] + [new]


@st.composite
def problems(draw: st.DrawFn, most: int = 14) -> Problem:
    """Problems of up to the given numbers of computations, joins and updates."""
    drawn = _Drawn(draw)
    drawn.begin()
    for what in draw(st.lists(st.sampled_from(["compute"] * 5 + ["join", "update"]), min_size=1, max_size=most)):
        getattr(drawn, what)()
    while drawn.waiting and draw(st.booleans()):
        drawn.update()
    drawn.end()
    return drawn.make.problem()
