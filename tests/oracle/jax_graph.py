"""Forward graphs run by JAX: values and gradients that owe nothing to our kernels or derivatives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

import numpy as np

from foreplan.graph import Graph, Kind, Value
from foreplan.ops.expr import Arg, Call, Const, Expr
from foreplan.ops.shape import slices
from tests.oracle.peers import jax, jnp

Array = Any
SCALAR = {  # JAX's name for each of our functions
    "add": "numpy.add",
    "sub": "numpy.subtract",
    "mul": "numpy.multiply",
    "div": "numpy.divide",
    "pow": "numpy.power",
    "max": "numpy.maximum",
    "min": "numpy.minimum",
    "neg": "numpy.negative",
    "abs": "numpy.abs",
    "square": "numpy.square",
    "sqrt": "numpy.sqrt",
    "rsqrt": "lax.rsqrt",
    "reciprocal": "numpy.reciprocal",
    "exp": "numpy.exp",
    "log": "numpy.log",
    "log1p": "numpy.log1p",
    "sin": "numpy.sin",
    "cos": "numpy.cos",
    "tanh": "numpy.tanh",
    "sigmoid": "nn.sigmoid",
    "relu": "nn.relu",
    "erf": "scipy.special.erf",
    "clip": "numpy.clip",
    "where": "numpy.where",
    "lt": "numpy.less",
    "le": "numpy.less_equal",
    "gt": "numpy.greater",
    "ge": "numpy.greater_equal",
    "eq": "numpy.equal",
    "ne": "numpy.not_equal",
    "and": "numpy.logical_and",
    "or": "numpy.logical_or",
}


def scalar(expr: Expr, args: list[Array]) -> Array:
    """A scalar expression of JAX arrays."""
    if isinstance(expr, Arg):
        return args[expr.index]
    if isinstance(expr, Const):
        return expr.value
    assert isinstance(expr, Call)
    values = [scalar(arg, args) for arg in expr.args]
    if expr.function in SCALAR:
        return attrgetter(SCALAR[expr.function])(jax)(*values)
    return jnp.asarray(values[0]).astype(expr.function)


def _map(op: Any, *xs: Array) -> list[Array]:
    shape = jnp.broadcast_shapes(*(x.shape for x in xs))
    return [jnp.broadcast_to(scalar(expr, list(xs)), shape) for expr in op.parsed]


def _reduce(op: Any, x: Array) -> Array:
    return getattr(jnp, op.how)(x, axis=op.axes, keepdims=op.keepdims)


def _matmul(op: Any, a: Array, b: Array) -> Array:
    a = a.swapaxes(-1, -2) if op.transpose_a else a
    b = b.swapaxes(-1, -2) if op.transpose_b else b
    return jnp.matmul(a, b)


def _conv(op: Any, x: Array, w: Array, added: Array | None = None) -> Array:
    y = jax.lax.conv_general_dilated(
        x, w, op.strides, op.pads, rhs_dilation=op.dilations, feature_group_count=op.groups
    )
    if added is None or added.shape == y.shape:
        return y if added is None else y + added
    return y + added.reshape(1, -1, *(1 for _ in op.strides))


def _conv_data_grad(op: Any, g: Array, w: Array) -> Array:
    shape = (g.shape[0], w.shape[1] * op.groups, *op.spatial)
    _, pull = jax.vjp(lambda x: _conv(op, x, w), jnp.zeros(shape, g.dtype))
    return pull(g)[0]


def _windows(op: Any, x: Array, start: float, combine: Callable[..., Array]) -> Array:
    lead = (1, 1)
    return jax.lax.reduce_window(
        x,
        np.asarray(start, x.dtype)[()],
        combine,
        lead + tuple(op.kernel),
        lead + tuple(op.strides),
        ((0, 0), (0, 0), *op.pads),
        window_dilation=lead + tuple(op.dilations),
    )


def _max_pool(op: Any, x: Array) -> Array:
    return _windows(op, x, -np.inf, jax.lax.max)


def _avg_pool(op: Any, x: Array) -> Array:
    assert not op.beyond or not any(op.beyond)
    counted = jnp.ones_like(x)
    total = _windows(op, x, 0.0, jax.lax.add)
    return total / (np.prod(op.kernel) if op.count_include_pad else _windows(op, counted, 0.0, jax.lax.add))


def _batch_norm_train(op: Any, x: Array, scale: Array, bias: Array) -> list[Array]:
    axes = (0, *range(2, x.ndim))
    shape = (1, -1, *(1 for _ in range(2, x.ndim)))
    mean, var = x.mean(axes), x.var(axes)
    y = (x - mean.reshape(shape)) / jnp.sqrt(var.reshape(shape) + op.epsilon)
    return [y * scale.reshape(shape) + bias.reshape(shape), mean, var]


def _layer_norm(op: Any, x: Array, scale: Array = 1.0, bias: Array = 0.0) -> list[Array]:
    axes = tuple(range(op.axis % x.ndim, x.ndim))
    mean = x.mean(axes, keepdims=True)
    rstd = 1 / jnp.sqrt(x.var(axes, keepdims=True) + op.epsilon)
    return [(x - mean) * rstd * scale + bias, None, None]


def _rms_norm(op: Any, x: Array, scale: Array) -> list[Array]:
    mean = (x * x).mean(tuple(range(op.axis % x.ndim, x.ndim)), keepdims=True)
    return [x / jnp.sqrt(mean + op.epsilon) * scale, None]


def _cross_entropy(op: Any, logits: Array, target: Array) -> list[Array]:
    logs = jnp.moveaxis(jax.nn.log_softmax(logits, axis=op.axis), op.axis, -1)
    kept = target != op.ignore_index
    picked = jnp.take_along_axis(logs, jnp.where(kept, target, 0)[..., None], -1)[..., 0]
    return [jnp.where(kept, -picked, 0.0), None]


def _attention(op: Any, q: Array, k: Array, v: Array, mask: Array | None = None) -> list[Array]:
    t, s, o = ("bthd", "bshd", "bthd") if op.heads_last else ("bhtd", "bhsd", "bhtd")
    axis = 2 if op.heads_last else 1
    k, v = (jnp.repeat(each, q.shape[axis] // each.shape[axis], axis) for each in (k, v))
    scores = jnp.einsum(f"{t},{s}->bhts", q, k) * op.scale
    scores = scores if mask is None else scores + mask
    if op.causal:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
    return [jnp.einsum(f"bhts,{s}->{o}", jax.nn.softmax(scores, axis=-1), v), None]


def _pad(op: Any, x: Array) -> Array:
    return jnp.pad(x, op.pads, mode=op.mode, **({"constant_values": op.value} if op.mode == "constant" else {}))


def _resize(op: Any, x: Array) -> Array:
    assert op.mode == "nearest" and op.coordinate == "asymmetric" and op.rounding == "floor" and not op.scales
    for axis, (before, after) in enumerate(zip(x.shape, op.shape)):
        assert after % before == 0
        x = jnp.repeat(x, after // before, axis)
    return x


def _loop(op: Any, *xs: Array) -> list[Array]:
    first, last = op.carries, op.carries + op.slices

    def step(carry: list[Array], x: list[Array]) -> tuple[list[Array], list[Array]]:
        found = dict(zip(op.graph.inputs, (*carry, *x, *xs[last:])))
        add_results(op.graph, found)
        results = [found[value] for value in op.results]
        return results[:first], [*results[first:], *(results[i] for i in op.histories)]

    carried, rows = jax.lax.scan(step, list(xs[:first]), list(xs[first:last]), op.steps, op.reverse)
    end = len(op.results) - first
    both = [[xs[i][None], row][:: -1 if op.reverse else 1] for i, row in zip(op.histories, rows[end:])]
    return [*carried, *rows[:end], *(jnp.concatenate(each) for each in both)]


OPS: dict[str, Callable[..., Any]] = {
    "map": _map,
    "reduce": _reduce,
    "matmul": _matmul,
    "reshape": lambda op, x: x.reshape(op.shape),
    "transpose": lambda op, x: x.transpose(op.perm),
    "slice": lambda op, x: x[slices(op.starts, op.shape, op.steps)],
    "broadcast": lambda op, x: jnp.broadcast_to(x, op.shape),
    "conv": _conv,
    "conv_data_grad": _conv_data_grad,
    "max_pool": _max_pool,
    "avg_pool": _avg_pool,
    "batch_norm_train": _batch_norm_train,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "softmax": lambda op, x: jax.nn.softmax(x, axis=op.axis),
    "log_softmax": lambda op, x: jax.nn.log_softmax(x, axis=op.axis),
    "cross_entropy": _cross_entropy,
    "attention": _attention,
    "gather": lambda op, x, i: jnp.take(x, i, axis=op.axis),
    "unstack": lambda op, x: list(x),
    "concat": lambda op, *xs: jnp.concatenate(xs, op.axis),
    "pad": _pad,
    "resize": _resize,
    "dropout": lambda op, x: x,
    "loop": _loop,
}


def run(graph: Graph, inputs: Mapping[str, Array], stored: Mapping[str, Array]) -> dict[Value, Array]:
    """Every value of a forward graph that has a loss or outputs."""
    found: dict[Value, Array] = {}
    for value in (*graph.inputs, *graph.stored):
        given = inputs if value.kind is Kind.INPUT else stored
        found[value] = jnp.asarray(given[value.name])
    add_results(graph, found)
    return found


def add_results(graph: Graph, found: dict[Value, Array]) -> None:
    """Add the results of a graph's nodes to the values that are there."""
    for node in graph.nodes:
        results = OPS[node.op.name](node.op, *(found[value] for value in node.inputs))
        found.update(zip(node.outputs, results if isinstance(results, list) else [results]))


def loss_and_gradients(
    graph: Graph, inputs: Mapping[str, Array], stored: Mapping[str, Array]
) -> tuple[float, dict[str, np.ndarray]]:
    """The loss of a forward graph, and its gradient with respect to every parameter, by jax.grad."""
    trained = {value.name: stored[value.name] for value in graph.parameters}
    assert graph.loss is not None

    def loss(parameters: dict[str, Array]) -> Array:
        return run(graph, inputs, {**stored, **parameters})[graph.loss]

    with jax.enable_x64(True):
        # A function that runs once takes longer to optimise than to run.
        lowered = jax.jit(jax.value_and_grad(loss)).lower(trained)
        value, gradients = lowered.compile({"xla_backend_optimization_level": 0})(trained)
        return float(value), {name: np.asarray(gradient) for name, gradient in gradients.items()}
