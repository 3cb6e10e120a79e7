"""A program: a planner's Problem, with the kernel that each action runs. The planner sees the Problem only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Generic

from foreplan.graph import DType, Initializer, TensorType, Window
from foreplan.graph.blocks import Blocks
from foreplan.graph.flat import Flat
from foreplan.graph.op import Asked, OpT
from foreplan.graph.shard import Shard, Sharded
from foreplan.graph.value import Kind
from foreplan.lower.target import DeviceProfile
from foreplan.ops.collective import Collective, Group
from foreplan.ops.point_to_point import BeginMessage
from foreplan.planner import Plan, Totals, totals
from foreplan.planner.problem import Category, Problem, Region

# The regions that every program has. The first holds what programs of one model share, at the same offsets in each;
# the second what a program keeps for itself from step to step; the third everything that lives within a step. A program
# that may copy activations to host memory has that as a fourth.
PARAMETERS, STATE, ARENA, HOST = 0, 1, 2, 3
REGIONS = (Region("parameters"), Region("state"), Region("arena"))
WITH_HOST = (*REGIONS, Region("host", on_device=False))
CATEGORIES = {
    Kind.INPUT: Category.INPUTS,
    Kind.PARAMETER: Category.PARAMETERS,
    Kind.FROZEN: Category.PARAMETERS,
    Kind.BUFFER: Category.PARAMETERS,
    Kind.CONSTANT: Category.PARAMETERS,
    Kind.STATE: Category.OPTIMIZER_STATE,
    Kind.ACTIVATION: Category.ACTIVATIONS,
    Kind.GRADIENT: Category.GRADIENTS,
    Kind.ACCUMULATOR: Category.GRADIENTS,
}


def region_of(kind: Kind) -> int:
    """The region of a stored value."""
    return PARAMETERS if kind in (Kind.PARAMETER, Kind.FROZEN, Kind.BUFFER) else STATE


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor as a kernel sees it: a window onto a problem value.

    Attributes:
        value: index into the problem's values.
        offset: bytes from the value's first byte to the window's first element.
        type: element type and shape of the window.
        strides: bytes from one element to the next along each axis.
        holds: the element type that was written there, where the window reads its bytes as another one (`bitcast`).
        blocks: the blocks in which the elements of a whole value lie, where it is not by strides.
    """

    value: int
    offset: int
    type: TensorType
    strides: tuple[int, ...]
    holds: DType | None = None
    blocks: Blocks | None = None

    @property
    def window(self) -> Window:
        """How it lies, without its place."""
        return Window(self.type, self.strides, self.blocks)

    @property
    def nbytes(self) -> int:
        """Bytes of its elements, with what fills up blocks."""
        return self.type.nbytes if self.blocks is None else self.blocks.size * self.type.dtype.itemsize

    @property
    def written(self) -> DType:
        """The element type that was written there."""
        return self.type.dtype if self.holds is None else self.holds

    def __str__(self) -> str:
        dense = self.strides == self.type.strides
        lies = f"/{self.blocks.tag}" if self.blocks else "" if dense else f"/{list(self.strides)}"
        return f"v{self.value}+{self.offset}:{self.type}{lies}" + ("" if self.holds is None else f" of {self.holds}")


@dataclass(frozen=True, slots=True)
class Call(Generic[OpT]):
    """What one action runs: a `Call[Loop]` of a loop, a plain `Call` of any op.

    Attributes:
        op: with its attributes.
        kernel: which of the target's kernels; `reference` is the op's own NumPy kernel.
        inputs: in the op's order; several may be windows onto one value.
        outputs: in the op's order, each a value of its own.
        node: name of the graph's node, for people.
        source: where the node comes from, for people.
        payload: further data of the kernel, such as a library's own plan, serialised.
    """

    op: OpT
    kernel: str
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    node: str
    source: str = ""
    payload: bytes = field(default=b"", repr=False)

    def of(self, *ops: type[Asked]) -> Call[Asked] | None:
        """The call itself, if it is of one of these ops; else None."""
        return self if isinstance(self.op, ops) else None  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class Slot:
    """A named tensor that crosses the border of a step: an input, a stored value, or a result.

    Attributes:
        kind: what it is to the user.
        init: first content of a stored value; the default of an input that may be left out.
        valid: the lowest and the highest value of an integer input, then single values that are allowed as well; None:
            any value is allowed.
        spread: of a tensor that lies spread over ranks: its first element in the row that their parts make up. Then
            the operand has its type alone; the value is this rank's part.
        shard: of a tensor of which each rank stores, or has in such a row, a part: how it is cut. The operand has the
            type of the whole tensor.
    """

    name: str
    operand: Operand
    kind: Kind
    init: Initializer | None = None
    valid: tuple[int, ...] | None = None
    spread: int | None = None
    shard: Shard | None = None

    @property
    def is_rate(self) -> bool:
        """Whether it is the learning rate of a step: the one number that has a default."""
        if self.init is None or self.kind is not Kind.INPUT:
            return False
        return self.operand.type.dtype.is_float and not self.operand.type.shape


@dataclass(frozen=True, repr=False)
class Program(Problem):
    """A Problem whose actions can be run.

    Attributes:
        calls: one an action.
        target: name of the target that it was lowered for.
        profile: of the device that predicted times are for.
        model: name of the graph.
        inputs: what the user gives each step.
        stored: parameters and buffers (in region PARAMETERS), state and constants (in region STATE).
        outputs: what the user asked for.
        loss: the loss, or None.
        gradients: by parameter, where they are returned.
        ahead: second slots of inputs, by the input's name, in region STATE: the next batch is copied there while a step
            runs. No action reads or writes them.
        notes: what import and passes changed, for people.
        base: flops and nanoseconds of the step as it was before more of it was put in parts for a budget, by the
            fastest kernels and without recomputation; None: of this program.
        code: machine code of foreplan's own kernels for a card, by the key of its source (`key_of` in nvrtc.py), in the
            order of keys; a session makes what is missing when it is bound.
        trusted: whether the machine code in `code` and in the payloads of calls may run; else engines make their own.
    """

    calls: tuple[Call, ...] = ()
    target: str = "numpy"
    profile: DeviceProfile | None = None
    model: str = ""
    inputs: tuple[Slot, ...] = ()
    stored: tuple[Slot, ...] = ()
    outputs: tuple[Slot, ...] = ()
    loss: Slot | None = None
    gradients: tuple[Slot, ...] = ()
    ahead: tuple[Slot, ...] = ()
    notes: tuple[str, ...] = field(default=())
    base: tuple[int, int] | None = None
    code: tuple[tuple[str, bytes], ...] = ()
    trusted: bool = True

    def costs(self, plan: Plan) -> Totals:
        """The costs of a plan, beside `base`."""
        own = totals(self, [[step.action for step in plan.steps]])[0]
        return own if self.base is None else replace(own, base_flops=self.base[0], base_nanoseconds=self.base[1])

    def calls_of(self, *ops: type[Asked]) -> tuple[Call[Asked], ...]:
        """The calls of these ops, in the order of actions."""
        return tuple(call for call in self.calls if isinstance(call.op, ops))  # type: ignore[misc]

    @property
    def required_inputs(self) -> tuple[Slot, ...]:
        """The inputs that have no default: a step cannot run without them."""
        return tuple(slot for slot in self.inputs if slot.init is None)

    @property
    def step_count(self) -> Slot | None:
        """The optimizer's count of updates, `step` unless the model has that name already; None without optimizer."""
        counts = (s for s in self.stored if s.kind is Kind.STATE and s.name.partition(".")[0] == "step")
        return next(counts, None)

    @cached_property
    def tensors(self) -> tuple[Slot, ...]:
        """What is stored, as its user names it: of a row of tensors, each of these."""
        return tuple(tensor for slot in self.stored for tensor in _tensors(slot))

    @cached_property
    def stored_as(self) -> Mapping[int, Slot]:
        """What is stored, by value."""
        return {slot.operand.value: slot for slot in self.stored}

    @cached_property
    def groups(self) -> frozenset[Group]:
        """The groups of ranks that exchange something, or hold parts of something."""
        found = {Group(slot.init.ranks, slot.init.stride) for slot in self.stored if isinstance(slot.init, Flat)}
        found |= {Group(call.op.ranks, call.op.stride) for call in self.calls_of(Collective)}
        return frozenset({*found, Group(self.tensor)})

    @property
    def ranks(self) -> int:
        """How many ranks run it together."""
        return max(group.ranks * group.stride for group in self.groups)

    @cached_property
    def tensor(self) -> int:
        """How many neighbouring ranks compute parts of one model's products."""
        return max([1, *(slot.shard.ranks for slot in self.tensors if slot.shard is not None)])

    @cached_property
    def is_stage(self) -> bool:
        """Whether it is the step of one stage: ranks of others run other programs."""
        return self._message is not None

    @property
    def stage(self) -> int:
        """Which stage it is of; 0 where there is one."""
        return 0 if self._message is None else self._message.own

    @property
    def of_stage(self) -> int:
        """How many neighbouring ranks run it: those of its stage."""
        return self.ranks if self._message is None else self._message.stride

    @cached_property
    def _message(self) -> BeginMessage | None:
        """One of the messages of a stage."""
        return next((call.op for call in self.calls_of(BeginMessage)), None)


def _tensors(slot: Slot) -> Iterator[Slot]:
    """The tensors of a stored value."""
    if not isinstance(slot.init, Flat):
        yield _whole(slot)
        return
    for each in slot.init.members:
        offset = each.start * each.type.dtype.itemsize if slot.init.ranks == 1 else 0
        operand = Operand(slot.operand.value, offset, each.type, each.type.strides)
        spread = None if slot.init.ranks == 1 else each.start
        yield _whole(Slot(each.name, operand, slot.kind, each.init, spread=spread))


def _whole(slot: Slot) -> Slot:
    """A tensor as its user sees it, if each rank has a part of it."""
    if not isinstance(slot.init, Sharded):
        return slot
    type = slot.init.type
    operand = replace(slot.operand, type=type, strides=type.strides, blocks=None)
    return replace(slot, operand=operand, init=slot.init.init, shard=slot.init.shard)
