"""The place in a graph where one parameter is updated: what a rule reads there, and how it writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from foreplan.graph import Builder, Kind, Value
from foreplan.ops.expr import Arg, Const, Expr, cast, clip, infer_dtypes, simplify, where
from foreplan.ops.index import ScatterAdd, gather
from foreplan.ops.join import concat
from foreplan.ops.map import elementwise, elementwise_many
from foreplan.ops.map_scatter_add import MapScatterAdd
from foreplan.ops.shape import reshape
from foreplan.passes.optimizer.rows import Rows, flat_indices, summed

# A table has at least so many times the elements of the rows that are read where these are summed first: some four
# temporaries have as many as the rows. Measured on one core: as fast as the whole gradient at 5 times, faster above.
SUMMED = 4


@dataclass(frozen=True)
class Average:
    """A running average of a parameter.

    Attributes:
        value: its place.
        weight: a float32 scalar: the share of the new parameter.
    """

    value: Value
    weight: Value


@dataclass(frozen=True)
class Site:
    """What an optimizer's rule for one parameter works with.

    `map` and `write` give a rule the gradient as it counts: divided by the number of micro-batches, without the scale
    of the loss, and clipped. They give everything in the parameter's own element type, so that the update keeps it.

    Attributes:
        b: where nodes are added.
        parameter: its old content.
        gradient: as backward gives it.
        state: the old content of what the rule keeps, in its order.
        rate: the learning rate, a float32 scalar; `map` and `write` give it times `rate_factor`.
        rate_factor: of the parameter's group.
        scalars: those of the optimizer, in its order, float32.
        count: how many gradients `gradient` is the sum of; None: it is one.
        factor: what gradients are multiplied with to clip and unscale them; None: nothing.
        clip_value: the largest magnitude of an element of a gradient; None: any.
        finite: whether all gradients are finite; else nothing may change. None: they need not be.
        average: of the parameter, if there is one.
        rows: of a table, which `gradient` is the sum of; nothing if it is anything else.
        by_rows: whether an update may take these rows in place of the whole gradient: it counts as backward gives it,
            nothing else needs all of it, and it has no fewer elements than they have.
        updates: the new content of stored values: what rules have written.
    """

    b: Builder
    parameter: Value
    gradient: Value
    state: tuple[Value, ...]
    rate: Value
    rate_factor: float = 1.0
    scalars: tuple[Value, ...] = ()
    count: Value | None = None
    factor: Value | None = None
    clip_value: float | None = None
    finite: Value | None = None
    average: Average | None = None
    rows: tuple[Rows, ...] = ()
    by_rows: bool = False
    updates: dict[Value, Value] = field(default_factory=dict)

    def map(self, fn: Callable[..., Expr], *read: Value, name: str = "") -> Value:
        """A value that is computed from the elements of others."""
        inputs, args = self._read(read)
        return elementwise(self.b, fn(*args), *inputs, name=name)

    def write(self, new: Callable[..., Sequence[Expr]], changed: Sequence[Value], *read: Value) -> None:
        """Give stored values of one shape their new contents, in one map.

        Args:
            new: from what is read to the new contents.
            changed: the stored values. With the parameter its average changes too, and its gradient's sum is cleared.
            read: what `new` reads, these values among it.
        """
        inputs, args = self._read(read)
        exprs, targets = list(new(*args)), list(changed)
        if self.average is not None and self.parameter in targets:
            place = len(inputs)
            inputs += [self.average.value, self.average.weight]
            old, latest = Arg(place), cast(exprs[targets.index(self.parameter)], self.average.value.dtype)
            exprs.append(old + cast(Arg(place + 1), self.average.value.dtype) * (latest - old))
            targets.append(self.average.value)
        if self.finite is not None:
            exprs = [where(Arg(len(inputs)), expr, Arg(inputs.index(old))) for expr, old in zip(exprs, targets)]
            inputs.append(self.finite)
        if self.gradient.kind is Kind.ACCUMULATOR and self.parameter in targets:
            exprs, targets = [*exprs, zero(self.gradient)], [*targets, self.gradient]
        dtypes = [value.dtype for value in inputs]
        exprs = [
            expr if infer_dtypes(dtypes, expr)[expr] == target.dtype else cast(expr, target.dtype)
            for expr, target in zip(exprs, targets)
        ]
        names = [f"{value.name}/next" for value in targets]
        made = elementwise_many(self.b, exprs, *inputs, name="update", outputs=names)
        self.updates.update(zip(targets, made))

    @property
    def by_sums(self) -> bool:
        """Whether an update may, and should, take the rows with those of each index summed up, which needs a few
        passes over them and as many temporaries.
        """
        return self.by_rows and SUMMED * sum(rows.values.type.size for rows in self.rows) <= self.parameter.type.size

    def summed(self) -> tuple[Site, Value]:
        """The same place with all rows of an index added up (`rows.summed`); and the first position of each index."""
        rows, first = summed(self.b, self.rows, self.parameter)
        return replace(self, rows=(rows,)), first

    def rows_of(self, table: Value) -> Value:
        """Of a stored value, or its new content, the rows whose indices `summed` gives."""
        (rows,) = self.rows
        return gather(self.b, table, rows.indices)

    def add_rows(
        self,
        target: Value,
        change: Callable[..., Expr],
        *read: Value,
        first: Callable[..., Expr] | None = None,
        of: Sequence[Value] = (),
    ) -> None:
        """Add to rows of a stored value, in place, what follows from the gradient's rows.

        Args:
            target: the parameter or a part of its state, of the same shape.
            change: from the elements of a gradient's rows, and of what is read, to what is added.
            read: scalars; and what has an element for each of these rows, if they are summed.
            first: from the elements of `of` to what rows are added to; None: the old content, whose other rows nothing
                reads or writes.
            of: what `first` reads, `target` among it.
        """
        b, places, changes = self.b, list[Value](), list[Value]()
        for rows in self.rows:
            changed = self.map(change, rows.values, *read, name="change")
            places.append(flat_indices(b, rows))
            changes.append(reshape(b, changed, (*places[-1].shape, *target.shape[1:])))
        rest, op = [target], ScatterAdd(0, target.shape)
        if first is not None:
            rest, args = self._read(of)
            expr = simplify(first(*args), [value.dtype for value in rest])
            op = MapScatterAdd(0, target.shape, str(expr))
        operands = concat(b, places), concat(b, changes), *rest
        (self.updates[target],) = b.node(op, *operands, name="update", outputs=[f"{target.name}/next"])

    def _read(self, values: Sequence[Value]) -> tuple[list[Value], list[Expr]]:
        """The inputs of a map that reads these values, and what each is in it."""
        inputs, args = list(values), [self._own(Arg(i), value) for i, value in enumerate(values)]
        for i, value in enumerate(values):
            if value is self.gradient:
                args[i] = self._counting(args[i], inputs)
            elif value is self.rate and self.rate_factor != 1.0:
                args[i] = args[i] * self.rate_factor
        return inputs, args

    def _counting(self, gradient: Expr, inputs: list[Value]) -> Expr:
        """The gradient as it counts; what it needs is added to the inputs."""
        if self.count is not None:
            gradient = gradient / self._own(Arg(len(inputs)), self.count)
            inputs.append(self.count)
        if self.factor is not None:
            gradient = gradient * self._own(Arg(len(inputs)), self.factor)
            inputs.append(self.factor)
        if self.clip_value is not None:
            gradient = clip(gradient, -self.clip_value, self.clip_value)
        return gradient

    def _own(self, arg: Expr, value: Value) -> Expr:
        """In the parameter's element type."""
        return arg if value.dtype == self.parameter.dtype else cast(arg, self.parameter.dtype)


def zero(like: Value) -> Expr:
    """The number that clears a value of that element type."""
    return cast(Const(0.0), like.dtype)
