"""Adds the updates of all parameters to a graph: clipping, loss scaling, the step count and what follows from it."""

from __future__ import annotations

from dataclasses import dataclass

from foreplan.base.units import format_bytes
from foreplan.graph import Builder, Fill, Initializer, Kind, TensorType, Value
from foreplan.graph.flat import Flat, Member, of_state
from foreplan.graph.shard import Sharded
from foreplan.graph.types import FLOAT32, FLOAT64, INT64
from foreplan.ops.collective import ALONE, AllReduce, Group
from foreplan.ops.expr import Arg, Const, Expr, cast, maximum, sqrt, where
from foreplan.ops.map import elementwise, elementwise_many
from foreplan.passes.loss_scale import LossScale, is_finite
from foreplan.passes.optimizer.norms import sum_of_squares
from foreplan.passes.optimizer.rows import Rows, rows_of
from foreplan.passes.optimizer.rule import Optimizer, check_by_element
from foreplan.passes.optimizer.schedule import Schedule
from foreplan.passes.optimizer.site import Average, Site

AVERAGE = "ema"  # the name of a parameter's average, after the parameter's own


@dataclass(frozen=True)
class _Waiting:
    """What is to be updated.

    Attributes:
        parameter, gradient, home, group: see `Updater.update`.
        square: the sum of the gradient's squares; None: it does not count here.
    """

    parameter: Value
    gradient: Value
    home: Value
    group: Group
    square: Value | None = None

    @property
    def ranks(self) -> int:
        """How many neighbouring ranks have parts of the gradient."""
        init = self.home.init.members[0].init if isinstance(self.home.init, Flat) else self.home.init
        return self.group.ranks * (init.shard.ranks if isinstance(init, Sharded) else 1)


class Updater:
    """Adds an optimizer's nodes to a graph under construction: one learning rate, one step count, state a parameter."""

    def __init__(
        self,
        b: Builder,
        optimizer: Optimizer,
        micro_batches: Value | None = None,
        scale: LossScale | None = None,
    ) -> None:
        """
        Args:
            b: where nodes are added.
            optimizer: the rule.
            micro_batches: a float32 scalar: how many gradients each one given is the sum of. It is then an ACCUMULATOR,
                which the update divides by their number and clears.
            scale: the factor by which gradients are too large; if one of them is not finite, nothing is updated.
        """
        self.b, self.optimizer, self.count, self.scale = b, optimizer, micro_batches, scale
        self.updates: dict[Value, Value] = {}
        self.waiting: list[_Waiting] = []  # until all gradients' norm is known
        self.seen: list[str] = []
        self.step = b.store("step", TensorType(INT64, ()), Kind.STATE, Fill(0))
        self.products = tuple(
            b.store(name, TensorType(FLOAT64, ()), Kind.STATE, Fill(1.0)) for name in optimizer.products
        )
        self.updates[self.step] = elementwise(b, lambda t: t + 1, self.step, name="next_step")
        self._prepare()

    def _prepare(self) -> None:
        """Compute what follows from the step count. 1 − 0.999 loses most of its digits in float32."""
        optimizer, step, rate = self.optimizer, cast(Arg(0), FLOAT64), self.optimizer.learning_rate
        known = optimizer.prepare(step, *(Arg(1 + i) for i in range(len(self.products))))
        exprs = dict(zip(optimizer.scalars, (cast(expr, FLOAT32) for expr in known)))
        if isinstance(rate, Schedule):
            exprs["learning_rate"] = cast(rate.at(step - 1.0), FLOAT32)
        if optimizer.ema is not None:
            exprs["ema_share"] = cast(where(step <= 1.0, 1.0, 1.0 - optimizer.ema), FLOAT32)
        exprs |= {f"{value.name}/next": new for value, new in zip(self.products, known[len(optimizer.scalars) :])}
        found: dict[str, Value] = {}
        if exprs:
            inputs = (self.updates[self.step], *self.products)
            made = elementwise_many(self.b, list(exprs.values()), *inputs, name="corrections", outputs=list(exprs))
            found = dict(zip(exprs, made))
        self.scalars = tuple(found[name] for name in optimizer.scalars)
        if isinstance(rate, Schedule):
            self.rate = found["learning_rate"]
        else:
            self.rate = self.b.input("learning_rate", TensorType(FLOAT32, ()), Fill(rate))
        self.share = found.get("ema_share")
        self.updates |= {value: found[f"{value.name}/next"] for value in self.products}

    def update(self, parameter: Value, gradient: Value, home: Value | None = None, group: Group = ALONE) -> None:
        """Add the update of one parameter, or keep it for the end if it needs a number of all gradients.

        Args:
            home: the stored value of which `parameter` is this rank's part; None: the parameter itself.
            group: the ranks that have the other parts.
        """
        home = parameter if home is None else home
        self.seen += [member.name for member in home.init.members] if isinstance(home.init, Flat) else [home.name]
        if self.optimizer.clip_norm is None and self.scale is None:
            self._update(_Waiting(parameter, gradient, home, group))
        else:
            self.waiting.append(_Waiting(parameter, gradient, home, group, sum_of_squares(self.b, gradient)))

    def _update(self, given: _Waiting, factor: Value | None = None, ok: Value | None = None) -> None:
        parameter, gradient, home = given.parameter, given.gradient, given.home
        named: Value | Member = home.init.members[0] if isinstance(home.init, Flat) else home  # all have one rule
        rule, rate_factor = self.optimizer.for_parameter(named.name, named.type)
        if isinstance(home.init, Sharded):
            check_by_element(rule, home.name, "tensor=1")
        state = tuple(self._state(given, each.name, each.type, each.first) for each in rule.kept(parameter.type))
        average = None
        if self.share is not None:
            wide = parameter.type.with_dtype(parameter.dtype.wide)
            average = Average(self._state(given, AVERAGE, wide), self.share)
        rows = rows_of(self.b, gradient)
        site = Site(
            self.b,
            parameter,
            gradient,
            state,
            self.rate,
            rate_factor,
            self.scalars,
            count=self.count,
            factor=factor,
            clip_value=self.optimizer.clip_value,
            finite=ok,
            average=average,
            rows=rows,
            by_rows=self._by_rows(parameter, rows),
        )
        rule.add(site)
        self.updates |= site.updates

    def _by_rows(self, parameter: Value, rows: tuple[Rows, ...]) -> bool:
        """Whether the rows of a gradient alone may say how the parameter changes.

        They may not where a norm, a limit or an average needs the whole gradient or the whole parameter, or where they
        have more elements. A narrow parameter would be rounded each time that a row is added.
        """
        shared = (self.optimizer.clip_norm, self.optimizer.clip_value, self.scale, self.count, self.share)
        whole = any(each is not None for each in shared) or parameter.dtype.is_narrow
        return bool(rows) and not whole and sum(each.values.type.size for each in rows) <= parameter.type.size

    def _state(self, given: _Waiting, name: str, type: TensorType, first: float = 0.0) -> Value:
        init, group = given.home.init, given.group
        if isinstance(init, Flat):
            kept: Initializer = init.of_state(name, first, group.ranks, group.stride if group.ranks > 1 else 1)
        else:
            kept = of_state(init, type.dtype, first)
        return self.b.store(f"{given.home.name}/{name}", type, Kind.STATE, kept)

    def finish(self) -> dict[Value, Value]:
        """Every stored value's content for the next step, after adding the updates that had to wait.

        Raises:
            UsageError: a pattern of the optimizer means no parameter.
        """
        self.optimizer.check_parameters(self.seen)
        if self.waiting:
            b, total = self.b, self._sum_of_all_squares()
            factor = self._factor(total)
            ok = None if self.scale is None else is_finite(b, total)
            for each in self.waiting:
                b.scope = f"{each.home.name}/"
                self._update(each, factor, ok)
            b.scope = ""
            if self.scale is not None and ok is not None:
                self.updates |= self.scale.updates(b, ok)
                for old in (self.step, *self.products):
                    of = (ok, self.updates[old], old)
                    self.updates[old] = elementwise(b, where(Arg(0), Arg(1), Arg(2)), *of, name=f"{old.name}/next")
        return self.updates

    def _sum_of_all_squares(self) -> Value:
        """Of the gradients that wait, and of what other ranks have."""
        total = self._sum_of_squares()
        gradients = [each.gradient for each in self.waiting]
        nbytes = sum(gradient.type.nbytes for gradient in gradients if gradient.kind is not Kind.ACCUMULATOR)
        if nbytes:
            why, known = "clipping by global norm", "their norm is known"
            if self.scale is not None:
                why, known = "loss scaling", "it is known that they are finite"
            self.b.note(f"{why}: all gradients, {format_bytes(nbytes)}, are alive until {known}")
        return total

    def _sum_of_squares(self) -> Value:
        """Of the gradients that wait, and of their parts on other ranks; one of them counts, at least."""
        totals: dict[int, Value] = {}  # by the number of ranks that have parts
        for each in self.waiting:
            if each.square is not None:
                before = totals.get(each.ranks)
                totals[each.ranks] = each.square if before is None else self._sum(before, each.square)
        parts = [self.b.apply(AllReduce(n), x, name="square_sum") if n > 1 else x for n, x in totals.items()]
        total = parts[0]
        for part in parts[1:]:
            total = self._sum(total, part)
        return total

    def _sum(self, one: Value, other: Value) -> Value:
        return elementwise(self.b, lambda x, y: x + y, one, other, name="square_sum")

    def _factor(self, total: Value) -> Value:
        """The factor of gradients: min(1, clip_norm / ‖g‖), divided by their scale if they have one."""
        limit = self.optimizer.clip_norm
        scale = None if self.scale is None else self.scale.scale
        larger = [each for each in (self.count, scale) if each is not None]

        def factor(square: Expr, *scalars: Expr) -> Expr:
            by = None if self.scale is None else cast(scalars[-1], FLOAT64)
            if limit is None:
                assert by is not None
                return 1.0 / by
            size = sqrt(square)
            for times in scalars:
                size = size / cast(times, FLOAT64)
            clipped = Const(float(limit)) / maximum(size, Const(float(limit)))
            return clipped if by is None else clipped / by

        return elementwise(
            self.b, factor, total, *larger, name="clip_factor" if limit is not None else "unscale_factor"
        )
