"""Values made again: what the backward pass reads of some values is computed or copied once more for it.

The planner sees another value with the same content. So the first one dies behind its last use in the forward pass, in
every plan, and all searches may move, drop and recompute the other one as they like. What makes it reads the loss as
well: it runs behind the forward pass. And what makes the loss reads the copies on the host: they are made before it.
What else is computed from the first one can be computed from the other one, too.

References: Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174, for recomputing by hand;
Rhu et al., "vDNN", MICRO 2016, for copying to the host.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from foreplan.graph.names import Names
from foreplan.lower.offload import copy_action
from foreplan.lower.program import HOST, WITH_HOST, Call, Operand, Program
from foreplan.lower.segments import actions_behind, backward_actions, results_of
from foreplan.lower.target import Target
from foreplan.ops.map import COPY
from foreplan.planner.problem import Action, Role, Value
from foreplan.planner.recompute.arrays import may_run_again

_NEVER = "what computes it changes what is stored, or takes the bytes of what it reads, so it cannot run twice"
_KEPT = "what computes it gives {!r} as well, which is kept"


@dataclass(frozen=True)
class SelectiveRemat:
    """A program with some values made again.

    Attributes:
        program: in which they are.
        recomputed, copied: those that are.
        refused: why others, which the backward pass reads, cannot be.
    """

    program: Program
    recomputed: frozenset[int]
    copied: frozenset[int]
    refused: Mapping[int, str]


def late_actions(program: Program) -> frozenset[int]:
    """Actions that run for the backward pass: those that neither the loss, nor an output, nor an update without
    gradients depends on. Masks, which no gradient goes into, are among them.
    """
    backward = backward_actions(program)
    results = results_of(program)
    for index, action in enumerate(program.actions):
        if index not in backward:
            results += [v for v in action.writes if program.values[v].home >= 0 or action.effect]
    return frozenset(range(len(program.actions))) - actions_behind(program, results)


def with_selective_remat(
    program: Program, target: Target, recompute: Collection[int], to_host: Collection[int]
) -> SelectiveRemat:
    """The program in which actions of the backward pass read another value in place of some: one that is computed
    again, or copied back from the host.

    Args:
        program: a training step.
        recompute, to_host: values of the forward pass. Those that the backward pass does not read stay as they are.
    """
    made = _Rewrite(program, target, frozenset(recompute), frozenset(to_host))
    return (
        made.run()
        if made.twins or made.delayed or made.refused
        else SelectiveRemat(program, frozenset(), frozenset(), {})
    )


@dataclass
class _Item:
    """An action with its call, and where it is listed: before the action that has this number."""

    place: float
    action: Action
    call: Call
    reads_loss: bool = field(default=False)


class _Rewrite:
    """One making: which values have twins, and the actions that make them.

    Attributes:
        late: actions for the backward pass; see `late_actions`.
        refused: values that cannot be made again, with the reason.
        twins: by value, the number of its twin.
    """

    def __init__(self, program: Program, target: Target, recompute: frozenset[int], to_host: frozenset[int]) -> None:
        self.program, self.target = program, target
        self.late = late_actions(program)
        self.refused: dict[int, str] = {}
        self.wanted = recompute
        self.values = list(program.values)
        self.names = Names(value.name for value in program.values)
        self.twins: dict[int, int] = {}
        self.copied = sorted(v for v in to_host if self._is_read_late(v))
        self.recomputed = self._closed(sorted(v for v in recompute if self._is_read_late(v)))
        for v in (*self.copied, *sorted(self.recomputed)):
            self.twins[v] = self._new(v, "again")
        # What only the backward pass needs and no gradient goes into: it is computed once, behind the forward pass.
        idle = self.late - backward_actions(program)
        self.delayed = {v for v in recompute if idle.issuperset(program.producers[v]) and program.readers[v]}

    def _is_read_late(self, v: int) -> bool:
        """Whether the forward pass makes a value that the backward pass reads."""
        return not self.late.isdisjoint(self.program.readers[v]) and not self.late.issuperset(self.program.producers[v])

    def _new(self, v: int, word: str, region: int | None = None) -> int:
        old = self.values[v]
        name = self.names.claim(f"{old.name}/{word}")
        region = old.region if region is None else region
        self.values.append(Value(name, old.nbytes, old.alignment, region, old.category, Role.TRANSIENT, copy_of=v))
        return len(self.values) - 1

    def _makers(self, v: int) -> list[int]:
        """Actions that can make a value once more, if what they take the bytes of is made once more as well."""
        found = []
        for index in self.program.producers[v]:
            action = self.program.actions[index]
            taken = [action.reads[pair.read] for pair in action.overwrites if pair.required]
            pure = replace(action, overwrites=tuple(pair for pair in action.overwrites if not pair.required))
            if may_run_again(self.program, pure) and all(self.program.producers[x] for x in taken):
                found.append(index)
        alone = [index for index in found if not any(pair.required for pair in self.program.actions[index].overwrites)]
        return alone or found

    def _closed(self, values: list[int]) -> set[int]:
        """Of some values those that can be made again, with all others of `wanted` that this needs, and with what has
        to be there to be overwritten.
        """
        found: set[int] = set()
        for v in values:
            needed, stack = {v}, [v]
            while stack:
                w = stack.pop()
                makers = self._makers(w)
                if not makers:
                    made = (x for index in self.program.producers[w] for x in self.program.actions[index].writes)
                    kept = [self.program.values[x].name for x in made if self.program.values[x].kept]
                    self.refused[v] = _KEPT.format(kept[0]) if kept else _NEVER
                    break
                for index in makers:
                    action = self.program.actions[index]
                    taken = {action.reads[pair.read] for pair in action.overwrites if pair.required}
                    more = {u for u in action.reads if u in taken or u in self.wanted} - needed - set(self.copied)
                    more = {u for u in more if not self.late.issuperset(self.program.producers[u])}
                    needed |= more
                    stack += sorted(more)
            else:
                found |= needed
        return found

    def run(self) -> SelectiveRemat:
        again = {index for v in self.recomputed for index in self._makers(v)}
        items = [_Item(i, a, c) for i, (a, c) in enumerate(zip(self.program.actions, self.program.calls))]
        made = [self._repeated(index) for index in sorted(again)]
        for i in sorted(self.late):
            items[i] = self._with_twins(items[i])
        fetched = [item for v in self.copied for item in self._round_trip(v)]
        for i in {index for v in self.delayed for index in self.program.producers[v]}:
            items[i].reads_loss = True
        others = [self._other_way(index) for index in sorted(set(range(len(items))) - self.late - again)]
        every = self._listed([*items, *made, *fetched, *(item for item in others if item is not None)])
        program = replace(
            self.program,
            values=tuple(self.values),
            actions=tuple(item.action for item in every),
            calls=tuple(item.call for item in every),
            regions=WITH_HOST if self.copied else self.program.regions,
        )
        return SelectiveRemat(program, frozenset(self.recomputed | self.delayed), frozenset(self.copied), self.refused)

    def _with_twins(self, item: _Item) -> _Item:
        """An action that reads twins."""
        twins = self.twins
        reads = tuple(twins.get(v, v) for v in item.action.reads)
        inputs = tuple(replace(x, value=twins.get(x.value, x.value)) for x in item.call.inputs)
        return replace(item, action=replace(item.action, reads=reads), call=replace(item.call, inputs=inputs))

    def _repeated(self, index: int) -> _Item:
        """An action that makes twins, of twins where there are any."""
        action, call = self.program.actions[index], self.program.calls[index]
        item = self._with_twins(_Item(float("inf"), action, call))
        new = {v: self.twins[v] if v in self.twins else self._new(v, "again") for v in action.writes}
        outputs = tuple(replace(y, value=new[y.value]) for y in call.outputs)
        name = f"{action.name}/again"
        again = replace(item.action, name=name, writes=tuple(new[v] for v in action.writes))
        return replace(item, action=again, call=replace(item.call, outputs=outputs, node=name), reads_loss=True)

    def _other_way(self, index: int) -> _Item | None:
        """An action of the forward pass on twins, by which the planner may make again what the action makes: it never
        runs the action itself again. It is listed last, so that no plan has to run it.
        """
        action, call = self.program.actions[index], self.program.calls[index]
        if self.twins.keys().isdisjoint(action.reads) or not may_run_again(self.program, action):
            return None
        item = self._with_twins(_Item(len(self.program.actions) + 1, action, call))
        return replace(item, action=replace(item.action, name=f"{action.name}/again"))

    def _round_trip(self, v: int) -> tuple[_Item, _Item]:
        """The copy of a value to the host, and the copy back."""
        maker = self.program.producers[v][0]
        here = next(x for x in self.program.calls[maker].outputs if x.value == v)
        there, back = replace(here, value=self._new(v, "host", HOST)), replace(here, value=self.twins[v])
        return self._copy(v, "offload", here, there, maker + 0.5), self._copy(v, "fetch", there, back, float("inf"))

    def _copy(self, v: int, word: str, source: Operand, result: Operand, place: float) -> _Item:
        name = f"{self.program.values[v].name}/{word}"
        kernel = self.target.kernels(COPY, [source.window], [result.window])[0]
        action = copy_action(name, source, result, kernel, self.target)
        call = Call(COPY, kernel.name, (source,), (result,), name)
        return _Item(place, action, call, reads_loss=word == "fetch")

    def _listed(self, items: list[_Item]) -> list[_Item]:
        """The actions in an order in which they can run: those that make twins, and those of the backward pass that no
        gradient goes into, stand right ahead of their first reader.
        """
        first: dict[int, float] = {}  # by value, the place of its first reader
        idle = self.late - backward_actions(self.program)
        moved = {*self.twins.values(), *self.delayed}
        for item in items:
            is_idle = isinstance(item.place, int) and item.place in idle
            if is_idle and not moved.isdisjoint(item.action.reads):
                moved.update(item.action.writes)
        for item in reversed(items):
            if item.place != float("inf") and moved.isdisjoint(item.action.writes):
                for v in item.action.reads:
                    first[v] = min(first.get(v, item.place), item.place)
        later = [item for item in items if item.place == float("inf") or not moved.isdisjoint(item.action.writes)]
        later = _topological(later)
        for item in reversed(later):
            item.place = min((first[v] for v in item.action.writes if v in first), default=len(self.program.actions))
            for v in item.action.reads:
                first[v] = min(first.get(v, item.place), item.place)
        waits = self._after_forward(min((item.place for item in later), default=0))
        self._wait_for_copies(items, waits)
        for item in later:
            if item.reads_loss and waits not in item.action.reads:
                item.action = replace(item.action, reads=(*item.action.reads, waits))
        ahead = {id(item): number for number, item in enumerate(later)}
        # Of equal place, what is made again stands ahead, in the order in which one needs the other.
        return sorted(items, key=lambda item: (item.place, ahead.get(id(item), len(items))))

    def _wait_for_copies(self, items: list[_Item], value: int) -> None:
        """What makes a value reads all copies on the host that are listed before it."""
        last = max(self.program.producers[value], default=-1)
        away = [v for x in items if x.place < last for v in x.action.writes if self.values[v].region == HOST]
        for item in items:
            if item.place == last and away:
                item.action = replace(item.action, reads=(*item.action.reads, *away))

    def _after_forward(self, place: float) -> int:
        """The loss or, where that is listed behind a place, what it is made of."""
        assert self.program.loss is not None
        value = self.program.loss.operand.value
        while makers := self.program.producers[value]:
            if max(makers) < place or not self.program.actions[makers[0]].reads:
                break
            value = self.program.actions[makers[0]].reads[0]
        return value


def _topological(items: list[_Item]) -> list[_Item]:
    """Actions in an order in which each stands behind what makes its reads, as listed otherwise."""
    makers = {v: item for item in items for v in item.action.writes}
    found: list[_Item] = []
    seen: set[int] = set()
    for start in items:
        stack = [start]
        while stack:
            item = stack[-1]
            missing = [makers[v] for v in item.action.reads if v in makers and id(makers[v]) not in seen]
            if missing:
                stack.append(missing[0])
                continue
            stack.pop()
            if id(item) not in seen:
                seen.add(id(item))
                found.append(item)
    return found
