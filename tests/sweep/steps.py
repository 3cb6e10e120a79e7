"""Small training steps drawn op by op from the table: chains and branches that end in a loss."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import numpy as np

from foreplan.graph import Array, Graph, GraphBuilder, Kind, TensorType, Value, as_dtype
from foreplan.graph.types import DType, Shape
from foreplan.ops.expr import tanh
from foreplan.ops.join import concat
from foreplan.ops.map import elementwise
from foreplan.ops.reduce import reduce
from foreplan.ops.shape import reshape, slice_axis
from tests.sweep.case import Case, Given
from tests.sweep.table import ENTRIES

# Ops with a derivative, all of whose float inputs a step can make; the rest come from differentiating and lowering.
# `test_steps.py` holds both lists against the table.
OPS = (
    *(
        "conv",
        "conv",
        "conv_data_grad",
        "max_pool",
        "avg_pool",
        "resize",
        "matmul",
        "matmul",
        "attention",
        "map",
        "map",
    ),
    *("softmax", "log_softmax", "layer_norm", "rms_norm", "batch_norm_train", "cumsum", "reduce", "unstack"),
    *("reshape", "transpose", "slice", "broadcast", "concat", "pad", "unslice", "gather", "gather_elements"),
    *("scatter_add", "scatter_elements_add", "cross_entropy", "linear_cross_entropy"),
)
NOT_DRAWN = {
    **dict.fromkeys(("conv_weight_grad", "avg_pool_grad", "resize_grad"), "comes from differentiating"),
    **dict.fromkeys(("max_pool_grad", "softmax_grad", "log_softmax_grad"), "comes from differentiating"),
    **dict.fromkeys(
        ("layer_norm_grad", "rms_norm_grad", "batch_norm_grad", "cross_entropy_grad"), "comes from differentiating"
    ),
    "masked_map": "a pass makes it",
    "map_scatter_add": "optimizers make it",
    "channel_moments": "what batch_norm_train is made of",
    "batch_norm_sync": "for one rank it is batch_norm_train",
    "channel_sums": "comes from differentiating",
    **dict.fromkeys(("grid_sample", "roi_align", "deform_conv"), "a small step may lead to another element"),
    "scatter_reduce": "a step of a difference may exchange two elements",
    "batch_norm": "in training its statistics are the batch's: batch_norm_train",
    "by_mode": "a step has the form of one mode alone",
    "dropout": "in training it becomes other ops, of random numbers",
    "top_k": "a step of a difference may exchange two elements",
}
MOST = 4000  # elements of a value


class _Drawn:
    """A graph as it grows: values that nobody has read yet come first when one is taken."""

    def __init__(self, rng: Random, dtype: DType) -> None:
        self.rng, self.dtype, self.b = rng, dtype, GraphBuilder("drawn")
        x = TensorType(dtype, (rng.choice([2, 3]), rng.choice([3, 8]), rng.choice([5, 8])))
        self.values = [self.b.input("x", x)]
        self.numbers = np.random.default_rng(rng.getrandbits(32))

    def parameter(self, shape: Shape, name: str = "w") -> Value:
        array = (self.numbers.standard_normal(shape) * 0.5).astype(np.float32).astype(self.dtype.numpy)
        return self.b.store(name, TensorType(self.dtype, shape), Kind.PARAMETER, Array(array))

    def taken(self, shape: Shape) -> Value:
        """A value of this shape made of one that there is: its first elements, or all of it and a parameter."""
        of = self.rng.choice(self.values[-3:] if self.rng.random() < 0.8 else self.values)
        size, flat = math.prod(shape), reshape(self.b, of, (of.type.size,))
        if of.type.size > size:
            flat = slice_axis(self.b, flat, 0, self.rng.randint(0, of.type.size - size), size)
        elif of.type.size < size:
            flat = concat(self.b, [flat, self.parameter((size - of.type.size,), "rest")])
        return reshape(self.b, flat, shape)

    def add(self, case: Case) -> None:
        """A node of this op on what there is."""
        inputs, first = [], True
        for given in case.inputs:
            if not given.type.dtype.is_float:
                inputs.append(self.b.store("c", given.type, Kind.CONSTANT, Array(given.array())))
            elif first or self.rng.random() < 0.3:
                inputs.append(self.taken(given.type.shape))
                first = False
            else:
                inputs.append(self.parameter(given.type.shape))
        outputs = self.b.node(case.op, *inputs)
        kept = outputs if case.op.name == "unstack" else outputs[:1]
        # Values stay near 1, so that a step's rounding can be told from a mistake.
        self.values += [elementwise(self.b, lambda x: tanh(x), y) for y in kept if y.type.size]

    def finish(self) -> Graph:
        """The mean square of what nobody has read, and of the last value."""
        read = {value for node in self.b.nodes for value in node.inputs}
        ends = [value for value in self.values if value not in read] or self.values[-1:]
        loss = None
        for end in ends:
            part = reduce(self.b, "mean", elementwise(self.b, lambda x: x * x + 0.3 * x, end))
            loss = part if loss is None else elementwise(self.b, lambda a, c: a + c, loss, part)
        assert loss is not None
        return self.b.finish({"last": self.values[-1]}, loss=loss)


def _plain(case: Case, dtype: DType) -> Case | None:
    """The case in one floating-point type, or None where it is too large, empty, or has no gradient."""
    inputs = []
    for given in case.inputs:
        if not 0 < given.type.size <= MOST:
            return None
        float_ = given.type.dtype.is_float
        inputs.append(
            Given(given.type.with_dtype(dtype), "normal", given.seed) if float_ else replace(given, lies="dense")
        )
    if not inputs[0].type.dtype.is_float and case.op.name not in ("scatter_add", "scatter_elements_add"):
        return None
    op = case.op
    if getattr(op, "mode", "") == "nearest":
        return None
    if op.name in ("cross_entropy", "linear_cross_entropy"):  # targets that are classes
        classes = op.infer([x.type for x in inputs]) and inputs[0].type.shape[getattr(op, "axis", 0)]
        classes = inputs[1].type.shape[0] if op.name == "linear_cross_entropy" else classes
        at = 2 if op.name == "linear_cross_entropy" else 1
        op = replace(op, frozen=False) if op.name == "linear_cross_entropy" else op  # type: ignore[call-arg]
        inputs[at] = replace(inputs[at], type=inputs[at].type.with_dtype("int64"), values=f"0:{classes}")
    found = Case(replace(op, wide=False) if hasattr(op, "wide") else op, tuple(inputs))
    results = found.op.infer(found.types)
    return found if all(0 < y.size <= MOST for y in results) and results[0].dtype == dtype else None


def drawn_step(seed: str, dtype: str = "float32") -> Graph:
    """A forward graph with a loss; the same of the same seed, but for the element type."""
    rng, kind = Random(seed), as_dtype(dtype)
    drawn, wanted = _Drawn(rng, kind), rng.randint(2, 7)
    while wanted:
        name = rng.choice(OPS)
        entry = ENTRIES[name]
        case = _plain((entry.smooth or entry.draw)(rng), kind)
        if case is not None:
            drawn.add(case)
            wanted -= 1
    last = elementwise(drawn.b, lambda x, w: x * w, drawn.values[-1], drawn.parameter((), "last"))
    drawn.values.append(last)  # whatever was drawn, the loss depends on a parameter
    return drawn.finish()


def batch(graph: Graph, seed: int = 0) -> dict[str, np.ndarray]:
    """What a step is given."""
    rng = np.random.default_rng(seed)
    x = graph.inputs[0]
    return {x.name: rng.standard_normal(x.shape).astype(np.float32).astype(x.dtype.numpy)}
