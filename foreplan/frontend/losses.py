"""Losses, and attaching one to a model: its further inputs, its nodes, and the scalar that training minimises."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from foreplan.arguments import choice, number_in, shown, whole
from foreplan.errors import ShapeError, UsageError
from foreplan.frontend.nn import functions as nn
from foreplan.frontend.tracing.elementwise import apply, convert
from foreplan.frontend.tracing.function import function_name
from foreplan.frontend.tracing.specs import Spec
from foreplan.frontend.tracing.tensor import Tensor
from foreplan.frontend.tracing.tracer import Tracer, current, fail
from foreplan.graph import Graph, Node, TensorType, Value
from foreplan.graph.types import INT64, Shape
from foreplan.ops import expr as ex
from foreplan.ops.expr import call
from foreplan.ops.reduce import normalize_axes


class Loss:
    """A loss that knows which inputs it needs beside the model's outputs.

    Called in a traced function with outputs and inputs, it gives a scalar tensor.

    Attributes:
        name: as people write it.
    """

    name: ClassVar[str]

    def inputs(self, *outputs: TensorType) -> dict[str, TensorType]:
        """The further inputs, by name, for outputs of these types."""
        return {}

    def __call__(self, *tensors: Tensor, **inputs: Tensor) -> Tensor:
        """The scalar."""
        raise NotImplementedError


@dataclass(frozen=True)
class CrossEntropy(Loss):
    """Mean of −log softmax(logits)[target] over the items whose target is not `ignore_index`.

    The logits are [batch, classes] or [batch, tokens, classes], or maps [batch, classes, *S] (four axes and more);
    `target` is int64 of that shape without the classes. A softmax or log-softmax that ends the model is taken into the
    loss, and a note says so.

    Attributes:
        ignore_index: the target of items that do not count.
        axis: of the classes; by the rule above where it is None.
    """

    name: ClassVar[str] = "cross_entropy"
    ignore_index: int = -100
    axis: int | None = None

    def __post_init__(self) -> None:
        least, most = -(1 << 63), (1 << 63) - 1
        object.__setattr__(self, "ignore_index", whole("ignore_index", self.ignore_index, least, most))
        object.__setattr__(self, "axis", None if self.axis is None else whole("axis", self.axis, least, most))

    def class_axis(self, rank: int) -> int:
        """The axis of the classes among `rank` axes."""
        if rank < 2 and self.axis is None:
            raise ShapeError("cross_entropy needs outputs with at least two axes, [batch, classes]")
        if self.axis is not None:
            return normalize_axes(self.axis, rank)[0]
        return rank - 1 if rank < 4 else 1

    def inputs(self, *outputs: TensorType) -> dict[str, TensorType]:
        """`target`."""
        (logits,) = outputs
        axis = self.class_axis(logits.rank)
        return {"target": TensorType(INT64, logits.shape[:axis] + logits.shape[axis + 1 :])}

    def __call__(self, *tensors: Tensor, **inputs: Tensor) -> Tensor:
        """Args: logits and target (by position or name). Returns: a scalar."""
        logits, target = _two(self, tensors, inputs)
        axis = self.class_axis(logits.ndim)
        logits = _before_softmax(logits, axis)
        losses = nn.cross_entropy(logits, target, axis, self.ignore_index)
        counted = convert(apply("counted", lambda t: call("ne", t, self.ignore_index), target), losses.dtype).sum()
        return losses.sum() / np.maximum(counted, 1.0)


@dataclass(frozen=True)
class _Elementwise(Loss):
    """Mean of a function of output and target; `target` is as the output."""

    def inputs(self, *outputs: TensorType) -> dict[str, TensorType]:
        """`target`."""
        (output,) = outputs
        return {"target": output}

    def term(self, output: ex.Expr, target: ex.Expr) -> ex.Expr:
        """The averaged term, from one element of each."""
        raise NotImplementedError

    def __call__(self, *tensors: Tensor, **inputs: Tensor) -> Tensor:
        """Args: output and target. Returns: a scalar."""
        return apply(self.name, self.term, *_two(self, tensors, inputs)).mean()


@dataclass(frozen=True)
class BinaryCrossEntropy(_Elementwise):
    """Mean of −target·log σ(logit) − (1 − target)·log(1 − σ(logit)), σ the sigmoid; `target` is as the logits.

    A sigmoid that ends the model is taken into the loss, and a note says so.
    """

    name: ClassVar[str] = "binary_cross_entropy"

    def term(self, output: ex.Expr, target: ex.Expr) -> ex.Expr:
        """Without overflow."""
        return ex.maximum(output, 0.0) - output * target + call("log1p", ex.exp(-call("abs", output)))

    def __call__(self, *tensors: Tensor, **inputs: Tensor) -> Tensor:
        """Args: logits and target. Returns: a scalar."""
        logits, target = _two(self, tensors, inputs)
        return super().__call__(_before_sigmoid(logits), target)


@dataclass(frozen=True)
class MeanSquaredError(_Elementwise):
    """Mean of (output − target)²."""

    name: ClassVar[str] = "mse"

    def term(self, output: ex.Expr, target: ex.Expr) -> ex.Expr:
        """The difference's square."""
        return call("square", output - target)


@dataclass(frozen=True)
class MeanAbsoluteError(_Elementwise):
    """Mean of |output − target|."""

    name: ClassVar[str] = "l1"

    def term(self, output: ex.Expr, target: ex.Expr) -> ex.Expr:
        """The difference's magnitude."""
        return call("abs", output - target)


@dataclass(frozen=True)
class Huber(_Elementwise):
    """Mean of d²/2 where |d| ≤ delta, else delta·(|d| − delta/2), d = output − target (Huber 1964).

    Attributes:
        delta: where the parabola becomes a line.
    """

    name: ClassVar[str] = "huber"
    delta: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "delta", number_in("delta", self.delta, math.ulp(0.0), math.inf))

    def term(self, output: ex.Expr, target: ex.Expr) -> ex.Expr:
        """Parabola or line."""
        d = output - target
        size = call("abs", d)
        return ex.where(size <= self.delta, 0.5 * call("square", d), self.delta * (size - 0.5 * self.delta))


@dataclass(frozen=True)
class Mean(Loss):
    """Mean of the output itself."""

    name: ClassVar[str] = "mean"

    def __call__(self, *tensors: Tensor, **inputs: Tensor) -> Tensor:
        """Args: one output. Returns: a scalar."""
        (output,) = tensors
        return output.mean()


@dataclass(frozen=True)
class Sum(Loss):
    """Sum of the output itself."""

    name: ClassVar[str] = "sum"

    def __call__(self, *tensors: Tensor, **inputs: Tensor) -> Tensor:
        """Args: one output. Returns: a scalar."""
        (output,) = tensors
        return output.sum()


cross_entropy = CrossEntropy()
binary_cross_entropy = BinaryCrossEntropy()
mse = MeanSquaredError()
l1 = MeanAbsoluteError()
huber = Huber()
mean = Mean()
sum = Sum()

LOSSES: dict[str, Loss] = {loss.name: loss for loss in (cross_entropy, binary_cross_entropy, mse, l1, huber, mean, sum)}


def named(name: str) -> Loss:
    """The loss of that name, with its defaults.

    Raises:
        UsageError: there is none; lists those there are.
    """
    return LOSSES[choice("loss", name, LOSSES)]


def attach_loss(graph: Graph, loss: Loss | Callable[..., Tensor] | str, outputs: Sequence[str] | None = None) -> Graph:
    """A model with a loss: its inputs and nodes added, and `Graph.loss` set.

    Args:
        graph: a model; its outputs stay.
        loss: one of this module, by itself or by name, or a traceable function whose parameters without default are
            the model's outputs in order and whose parameters with a Spec as default are further inputs.
        outputs: names of the outputs that the loss reads, in order; all of them by default.

    Raises:
        UsageError: the loss takes another number of outputs, or the graph has a loss already.
        ShapeError: the loss does not fit the outputs' types, or an input of that name has another type.
        TraceError: the function cannot be traced, or does not give a scalar.
    """
    if graph.loss is not None:
        raise UsageError(
            f"graph {graph.name!r} has the loss {graph.loss.name!r} already; attach one to the model itself"
        )
    fn = named(loss) if isinstance(loss, str) else loss
    if not callable(fn):
        raise UsageError(f"{shown(fn)} is no loss; give one of foreplan.losses or a function of the outputs")
    values = [_output(graph, name) for name in outputs or graph.outputs]
    label = fn.name if isinstance(fn, Loss) else function_name(fn, "function")
    tracer = Tracer(graph.name, graph)
    with tracer.active() as b:
        b.scope = "loss/"
        needed = _needed(fn, label, values, graph)
        given = {value.name: value for value in graph.inputs}
        further = {}
        for name, type in needed.items():
            value = given[name] if name in given else b.input(name, type)
            if value.type != type:
                raise ShapeError(
                    f"the loss {label} needs the input {name!r} as {type}, and the model's is {value.type}"
                )
            further[name] = tracer.wrap(value)
        result = fn(*(tracer.wrap(value) for value in values), **further)
        if not isinstance(result, Tensor) or result.shape or not result.value.dtype.is_float:
            raise fail(f"the loss {label} gives {result!r}; it must be a floating-point scalar, such as x.mean()")
        return b.finish(graph.outputs, graph.updates, result.value, graph.gradients)


def _output(graph: Graph, name: str) -> Value:
    if name not in graph.outputs:
        raise UsageError(f"graph {graph.name!r} has no output {name!r}; it has {', '.join(graph.outputs)}")
    return graph.outputs[name]


def _needed(fn: Any, label: str, values: Sequence[Value], graph: Graph) -> dict[str, TensorType]:
    """Further inputs of a loss, after checking that it takes as many outputs as there are."""
    listed = ", ".join(f"{name}: {value.type}" for name, value in graph.outputs.items())
    if isinstance(fn, Loss):
        if len(values) != 1:
            raise UsageError(
                f"the loss {label} reads one output, and graph {graph.name!r} has {len(values)} ({listed}); write the "
                f"loss as a function of all of them, such as lambda a, b, target=spec(…): losses.{label}(a, target)"
            )
        return fn.inputs(*(value.type for value in values))
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        raise UsageError(f"{fn!r} is no loss; give one of foreplan.losses or a function of the outputs") from None
    needed = {p.name: p.default.type for p in parameters if isinstance(p.default, Spec)}
    positional = [
        p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    takes_all = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if len(positional) != len(values) and not (takes_all and len(positional) < len(values)):
        raise UsageError(
            f"the loss {label} takes {len(positional)} outputs, and graph {graph.name!r} has {len(values)} ({listed}); "
            "its further inputs need a foreplan.spec as default, such as target=spec((32,), 'int64')"
        )
    return needed


def _two(loss: Loss, tensors: Sequence[Tensor], inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    given = [*tensors, *inputs.values()]
    if len(given) != 2 or set(inputs) - {"target"}:
        raise fail(f"losses.{loss.name} takes an output and a target, and got {len(given)} tensors")
    return given[0], given[1]


def _producer(x: Tensor) -> Node | None:
    for node in reversed(current().at().nodes):
        if x.value in node.outputs:
            return node
    return None


def _taken_in(node: Node, kind: str, loss: str) -> Tensor:
    """The input of the model's last node, with a note that the loss does that node's work."""
    current().at().note(
        f"the model's {kind} {node.name!r} is taken into the loss {loss}, which reads its input "
        f"{node.inputs[0].name!r}; the model's output stays as it is"
    )
    return current().wrap(node.inputs[0])


def _before_softmax(logits: Tensor, axis: int) -> Tensor:
    """The input of a final softmax or log-softmax along the classes; the logits themselves if there is none.

    A reshape may follow the softmax, if the classes remain an axis: older opsets write a softmax so.
    """
    node, classes = _producer(logits), axis
    while node is not None and node.op.name == "reshape" and classes >= 0:
        classes = _same_axis(logits.shape, axis, node.inputs[0].shape)
        node = _producer(current().wrap(node.inputs[0]))
    if node is None or node.op.name not in ("softmax", "log_softmax") or getattr(node.op, "axis", None) != classes:
        return logits
    before = _taken_in(node, node.op.name, "cross_entropy")
    return before if before.shape == logits.shape else before.reshape(logits.shape)


def _same_axis(shape: Shape, axis: int, other: Shape) -> int:
    """The axis of `other` that is the axis `axis` of `shape`, if one is a reshape of the other; -1: there is none."""
    outer = math.prod(shape[:axis])
    found = (i for i, extent in enumerate(other) if extent == shape[axis] and math.prod(other[:i]) == outer)
    return next(found, -1)


def _before_sigmoid(logits: Tensor) -> Tensor:
    """The input of the model's final sigmoid; the logits themselves if there is none."""
    node = _producer(logits)
    if node is None or getattr(node.op, "exprs", None) != ("sigmoid(a0)",):
        return logits
    return _taken_in(node, "sigmoid", "binary_cross_entropy")
