"""Collectives: ops in which ranks of a job take part, each with a tensor of its own of the same type.

They take part in groups, which are alike for one op: all ranks are one group; or groups lie side by side, such as ranks
0 and 1, and 2 and 3; or they take turns, such as ranks 0 and 2, and 1 and 3.

All ranks run one graph. What is differentiated is the sum of the ranks' losses, as in PyTorch's functional collectives
and JAX's `psum`: the cotangent of a tensor that others have read is the sum of the cotangents that they have for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, TypeVar

import numpy as np

from foreplan.base.errors import ShapeError
from foreplan.graph import Builder, Cost, Op, TensorType, register
from foreplan.graph.op import Arrays, Cotangents, Types, Values, only
from foreplan.ops.join import concat
from foreplan.ops.reduce import reduce
from foreplan.ops.shape import reshape

SMALL = 1 << 14  # bytes: below, every rank gets all tensors and adds them up, in one exchange instead of two
Other = TypeVar("Other", bound="Collective")
_ALL_GATHER, _ALL_TO_ALL, _BROADCAST, _SHIFT = EXCHANGES = ("all_gather", "all_to_all", "broadcast", "shift")


@dataclass(frozen=True, order=True)
class Group:
    """Ranks that take part in something.

    Attributes:
        ranks: how many a group has.
        stride: how far its neighbours stand apart: rank r is number r // stride % ranks of its group.
    """

    ranks: int = 1
    stride: int = 1

    def op(self, kind: type[Other], /, **attributes: object) -> Other:
        """An op of such groups."""
        return kind(self.ranks, stride=self.stride, **attributes)


ALONE = Group()


@dataclass(frozen=True)
class Collective(Op):
    """An op of groups of ranks.

    Attributes:
        ranks, stride: see `Group`.
    """

    of_ranks: ClassVar[bool] = True
    moves: ClassVar[bool] = True  # most of them only move elements
    ranks: int
    stride: int = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.stride < 1:
            raise ValueError(f"ranks and stride must be 1 or more, and are {self.ranks} and {self.stride}")

    def among(self, other: type[Other], /, **attributes: object) -> Other:
        """Another op of the same groups."""
        return Group(self.ranks, self.stride).op(other, **attributes)

    def infer(self, inputs: Types) -> tuple[TensorType, ...]:
        """The input's type, of those that say nothing else."""
        self.check_count(inputs, 1)
        return tuple(inputs)

    def flops(self, inputs: Types, outputs: Types) -> int:
        """None: sums are ops of their own."""
        return 0

    def pieces(self, x: TensorType) -> TensorType:
        """A tensor as one piece a rank: a further leading axis.

        Raises:
            ShapeError: its first axis does not divide.
        """
        if not x.rank or x.shape[0] % self.ranks:
            raise ShapeError(f"the first axis of {x} must be a multiple of the {self.ranks} ranks")
        return x.with_shape((self.ranks, x.shape[0] // self.ranks, *x.shape[1:]))


class Sum(Collective):
    """A collective that adds up what ranks have."""

    moves: ClassVar[bool] = False  # it adds


@register
@dataclass(frozen=True)
class AllReduce(Sum):
    """y = the sum of all ranks' x, on every rank. Ranks are added in their order, so every run gives the same bits."""

    name: ClassVar[str] = "all_reduce"

    def vjp(self, b: Builder, inputs: Values, outputs: Values, cotangents: Cotangents) -> Cotangents:
        """The sum of all ranks' cotangents."""
        return [b.apply(self, only(cotangents))]

    def decompose(self, b: Builder, inputs: Values) -> Values:
        """A large tensor is summed a part on each rank, and gathered (Rabenseifner 2004); of a small one, each rank
        gathers all and sums them.
        """
        (x,) = inputs
        if self.ranks == 1:
            return [x]
        flat = reshape(b, x, (x.type.size,))
        if x.type.nbytes <= SMALL or x.type.size % self.ranks:
            all_of_them = reshape(b, b.apply(self.among(AllGather), flat), (self.ranks, x.type.size))
            return [reshape(b, reduce(b, "sum", all_of_them, (0,)), x.shape)]
        part = b.apply(self.among(ReduceScatter), flat)
        return [reshape(b, b.apply(self.among(AllGather), part), x.shape)]


@register
@dataclass(frozen=True)
class ReduceScatter(Sum):
    """y = this rank's part, along the first axis, of the sum of all ranks' x. Ranks are added in their order."""

    name: ClassVar[str] = "reduce_scatter"

    def infer(self, inputs: Types) -> tuple[TensorType, ...]:
        """One piece of the input."""
        self.check_count(inputs, 1)
        piece = self.pieces(inputs[0])
        return (piece.with_shape(piece.shape[1:]),)

    def vjp(self, b: Builder, inputs: Values, outputs: Values, cotangents: Cotangents) -> Cotangents:
        """All ranks' cotangents, one behind the other."""
        return [b.apply(self.among(AllGather), only(cotangents))]

    def decompose(self, b: Builder, inputs: Values) -> Values:
        """Each rank gets its piece of every rank's tensor, and adds them up."""
        (x,) = inputs
        if self.ranks == 1:
            return [x]
        exchanged = b.apply(self.among(AllToAll), x)
        return [reduce(b, "sum", reshape(b, exchanged, self.pieces(x.type).shape), (0,))]


class Exchange(Collective):
    """A collective that only moves elements: it begins, and is waited for."""

    kind: ClassVar[str]  # which of `EXCHANGES` it is

    @property
    def peer(self) -> int:
        """The rank that it is about, if it is about one."""
        return 0

    @property
    def beginning(self) -> Begin:
        """What begins it."""
        return self.among(Begin, kind=self.kind, peer=self.peer)

    def decompose(self, b: Builder, inputs: Values) -> Values:
        """Begun, and waited for at once."""
        (x,) = inputs
        if self.ranks == 1:
            return [x]
        begun = b.apply(self.beginning, x)
        return [b.apply(self.among(Finish), begun, x)]


@register
@dataclass(frozen=True)
class AllGather(Exchange):
    """y = all ranks' x, one behind the other along the first axis, on every rank.

    Attributes:
        time: tells several gathers of one tensor apart, which is not to be kept in between.
        again: the backward pass is to gather it again.
    """

    name: ClassVar[str] = "all_gather"
    kind: ClassVar[str] = _ALL_GATHER
    time: int = 0
    again: bool = False

    @property
    def beginning(self) -> Begin:
        """With its time."""
        return self.among(Begin, kind=self.kind, peer=self.peer, time=self.time)

    def infer(self, inputs: Types) -> tuple[TensorType, ...]:
        """The first axis times the number of ranks."""
        self.check_count(inputs, 1)
        (x,) = inputs
        if not x.rank:
            raise ShapeError("a scalar has no axis along which ranks could be put one behind the other")
        return (x.with_shape((self.ranks * x.shape[0], *x.shape[1:])),)

    def vjp(self, b: Builder, inputs: Values, outputs: Values, cotangents: Cotangents) -> Cotangents:
        """This rank's part of the sum of all ranks' cotangents."""
        return [b.apply(self.among(ReduceScatter), only(cotangents))]


@register
@dataclass(frozen=True)
class AllToAll(Exchange):
    """y = piece r of every rank's x, r being this rank; pieces lie along the first axis, in the order of ranks."""

    name: ClassVar[str] = "all_to_all"
    kind: ClassVar[str] = _ALL_TO_ALL

    def infer(self, inputs: Types) -> tuple[TensorType, ...]:
        """The input's type, if it divides into pieces."""
        self.check_count(inputs, 1)
        self.pieces(inputs[0])
        return tuple(inputs)

    def vjp(self, b: Builder, inputs: Values, outputs: Values, cotangents: Cotangents) -> Cotangents:
        """Each piece goes back."""
        return [b.apply(self, only(cotangents))]


@register
@dataclass(frozen=True)
class Broadcast(Exchange):
    """y = the x of one rank, on every rank.

    Attributes:
        root: that rank.
    """

    name: ClassVar[str] = "rank_broadcast"
    kind: ClassVar[str] = _BROADCAST
    root: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.root < self.ranks:
            raise ValueError(f"root must be one of {self.ranks} ranks, from 0 on, and is {self.root}")

    @property
    def peer(self) -> int:
        """The root."""
        return self.root

    def vjp(self, b: Builder, inputs: Values, outputs: Values, cotangents: Cotangents) -> Cotangents:
        """The sum of all ranks' cotangents on that rank, and zeros on the others."""
        return [b.apply(self.among(OnlyOn, root=self.root), b.apply(self.among(AllReduce), only(cotangents)))]


@register
@dataclass(frozen=True)
class Shift(Exchange):
    """y = the x of the rank that stands `by` ranks before this one, the last before the first: every rank sends and
    receives once.

    Attributes:
        by: how many ranks further each tensor goes.
    """

    name: ClassVar[str] = "shift"
    kind: ClassVar[str] = _SHIFT
    by: int = 1

    @property
    def peer(self) -> int:
        """How many ranks further, from 0 on."""
        return self.by % self.ranks

    def vjp(self, b: Builder, inputs: Values, outputs: Values, cotangents: Cotangents) -> Cotangents:
        """Back where it came from."""
        return [b.apply(self.among(Shift, by=-self.by), only(cotangents))]


@dataclass(frozen=True)
class OfRank(Collective):
    """An op whose result depends on the rank that runs it. Nothing is sent."""

    def on_rank(self, rank: int, inputs: Arrays, outputs: Arrays) -> None:
        """What a rank computes."""
        raise NotImplementedError

    def compute(self, inputs: Arrays, outputs: Arrays, workspace: np.ndarray) -> None:
        """As the first rank does; an engine of several ranks binds `on_rank`."""
        self.on_rank(0, inputs, outputs)


@register
@dataclass(frozen=True)
class OwnPart(OfRank):
    """y = part r of x along its first axis, r being this rank."""

    name: ClassVar[str] = "own_part"
    any_strides: ClassVar[bool] = True

    def infer(self, inputs: Types) -> tuple[TensorType, ...]:
        """One piece of the input."""
        return self.among(ReduceScatter).infer(inputs)

    def vjp(self, b: Builder, inputs: Values, outputs: Values, cotangents: Cotangents) -> Cotangents:
        """The cotangent at this rank's place, and zeros at the others': what each rank gives to itself alone."""
        g = only(cotangents)
        parts = [b.apply(self.among(OnlyOn, root=rank), g) for rank in range(self.ranks)]
        return [concat(b, parts)]

    def on_rank(self, rank: int, inputs: Arrays, outputs: Arrays) -> None:
        """One copy."""
        (x,), (y,) = inputs, outputs
        np.copyto(y, x[rank * len(y) : (rank + 1) * len(y)])


@register
@dataclass(frozen=True)
class OnlyOn(OfRank):
    """y = x on one rank, and zeros on the others.

    Attributes:
        root: that rank.
    """

    name: ClassVar[str] = "only_on"
    any_strides: ClassVar[bool] = True
    moves: ClassVar[bool] = False  # a zero is a number
    root: int = 0

    def vjp(self, b: Builder, inputs: Values, outputs: Values, cotangents: Cotangents) -> Cotangents:
        """Likewise."""
        return [b.apply(self, only(cotangents))]

    def overwrites(self, inputs: Types, outputs: Types) -> tuple[tuple[int, int], ...]:
        """In place."""
        return ((0, 0),)

    def on_rank(self, rank: int, inputs: Arrays, outputs: Arrays) -> None:
        """A copy, or zeros."""
        (x,), (y,) = inputs, outputs
        if rank == self.root:
            np.copyto(y, x)
        else:
            y.fill(0)


@register
@dataclass(frozen=True)
class Begin(Collective):
    """Begins an exchange. Its result has the place of what will arrive, which is there when `finish_exchange` has run;
    until then, what is sent stays as it is.

    Inputs: what is sent, and others that are only to be there before.

    Attributes:
        kind: which exchange: all_gather, all_to_all, broadcast or shift.
        peer: the rank from which a broadcast comes, or how many ranks further a shift goes.
        time: see `AllGather`.
        wait: also waits, at once, so that its result is what has arrived; what a plan may run again.
    """

    name: ClassVar[str] = "begin_exchange"
    kind: str = _ALL_GATHER
    peer: int = 0
    time: int = 0
    wait: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind not in EXCHANGES:
            raise ValueError(f"kind must be one of {', '.join(EXCHANGES)}, and is {self.kind!r}")
        if not 0 <= self.peer < self.ranks:
            raise ValueError(f"peer must be from 0 to {self.ranks - 1}, and is {self.peer}")

    def infer(self, inputs: Types) -> tuple[TensorType, ...]:
        """The type of what will arrive."""
        if not inputs:
            raise ShapeError("begin_exchange takes what is sent, and got nothing")
        whole: Exchange = self.among(AllGather) if self.kind == _ALL_GATHER else self.among(Broadcast)
        return (self.among(AllToAll) if self.kind == _ALL_TO_ALL else whole).infer(inputs[:1])

    def sent(self, x: TensorType) -> int:
        """Bytes that a rank sends of a tensor, and bytes that arrive, by algorithms that send nothing twice: of a
        broadcast, each rank hands on what it gets.
        """
        others = self.ranks - 1
        each = {_ALL_GATHER: x.nbytes * others, _ALL_TO_ALL: x.nbytes * others // self.ranks}
        return each.get(self.kind, x.nbytes if others else 0)

    def cost(self, inputs: Types, outputs: Types) -> Cost:
        """What arrives is written."""
        return Cost(0, inputs[0].nbytes + outputs[0].nbytes)

    def compute(self, inputs: Arrays, outputs: Arrays, workspace: np.ndarray) -> None:
        """For one rank alone: a copy. An engine of several ranks lets these exchange."""
        np.copyto(outputs[0], inputs[0])


@register
@dataclass(frozen=True)
class Finish(Collective):
    """Waits for what `begin_exchange` began, and has its bytes: inputs are its result, what is sent, and then others
    that are only to be there before.
    """

    name: ClassVar[str] = "finish_exchange"

    def accepts_strides(self, index: int, input: TensorType, strides: tuple[int, ...]) -> bool:
        """What is sent is the copy without gaps that was begun with, if there is one: its bytes stay until then."""
        return index > 1

    @property
    def completes(self) -> bool:
        """Yes: the content arrives in the place of input 0."""
        return True

    def infer(self, inputs: Types) -> tuple[TensorType, ...]:
        """The type of what has arrived."""
        if len(inputs) < 2:
            raise ShapeError(f"finish_exchange takes what was begun and what is sent, and got {len(inputs)} inputs")
        return (inputs[0],)

    def cost(self, inputs: Types, outputs: Types) -> Cost:
        """Nothing: `begin_exchange` has it."""
        return Cost(0, 0)

    def overwrites(self, inputs: Types, outputs: Types) -> tuple[tuple[int, int], ...]:
        """What was begun, always."""
        return ((0, 0),)

    def compute(self, inputs: Arrays, outputs: Arrays, workspace: np.ndarray) -> None:
        """For one rank alone there is nothing to wait for."""
