"""Drawn chains of any ops and products of weights: what ranks compute in parts is what one computes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from foreplan.base.errors import ModelError, ShapeError, UnsupportedError, UsageError
from foreplan.graph import Array, Graph, GraphBuilder, Kind, Normal, TensorType, Value
from foreplan.graph.shard import Shard
from foreplan.graph.types import FLOAT64, Shape
from foreplan.ops.map import Map
from foreplan.ops.matmul import MatMul
from foreplan.ops.reduce import reduce
from foreplan.ops.shape import reshape
from foreplan.passes.tensor.rules import Known, StaysWhole, possible_shards
from foreplan.passes.tensor.split_products import SplitProducts
from tests.passes.judges import RANKS, hold_parts
from tests.profile import pick
from tests.sweep.case import Case
from tests.sweep.draws import drawn
from tests.sweep.table import ENTRIES

MOST = 400  # elements of a tensor
TRIES = 6
NAMES = [name for name in ENTRIES if name not in ("random", "dropout")]  # ranks draw numbers of their own
TAMED = "where(lt(abs(a0), 100.0), tanh(a0), 0.5)"  # finite, whatever an op gives


class Chain:
    """One graph, in float64."""

    def __init__(self, seed: int) -> None:
        self.rng, self.b = drawn("chain", seed, 0), GraphBuilder()
        b, rng = self.b, self.rng
        self.names: list[str] = []
        self.values = [b.input("x", TensorType(FLOAT64, (2 * rng.randint(1, 2), 2 * rng.randint(1, 3))))]
        while len(self.names) < rng.randint(2, 4):
            self.add(self.case())
        with_loss, last = rng.random() < 0.6, self.brought((4, 4))
        results = {} if with_loss else {"y": last} | {f"y{i}": y for i, y in enumerate(self.values[-2:])}
        loss = reduce(b, "mean", b.apply(Map(("square(a0)",)), last), (0, 1)) if with_loss else None
        self.graph = b.finish(results, loss=loss)

    def case(self) -> Case:
        """Of any op that takes float64, mostly one that computes with parts of its first input."""
        for _ in range(TRIES):
            case = self.any_case()
            if _takes_parts(case):
                break
        return case

    def any_case(self) -> Case:
        """Of any op that takes float64."""
        while True:
            case = ENTRIES[self.rng.choice(NAMES)].full(self.rng)
            types = [_wide(given.type) for given in case.inputs]
            try:
                types += case.op.result_types(types)
            except ShapeError:
                continue
            fits = all(type == _wide(type) and 0 < type.size <= MOST for type in types)
            if fits and case.inputs and types[0].dtype.is_float:
                return case

    def add(self, case: Case) -> None:
        """What an op makes of what there is."""
        b, rng = self.b, self.rng
        inputs = []
        for i, given in enumerate(case.inputs):
            type = _wide(given.type)
            if type.dtype.is_float and (i == 0 or rng.random() < 0.3):
                inputs.append(self.brought(type.shape))
            elif type.dtype.is_float:
                inputs.append(b.store(f"{len(b.stored)}.p", type, Kind.PARAMETER, Normal(1.0)))
            else:
                low, high, *_ = case.op.valid_range(i, case.types) or (None, None)
                valid = given.array() if low is None else np.clip(given.array(), low, high)
                inputs.append(b.store(f"{len(b.stored)}.i", type, Kind.CONSTANT, Array(valid)))
        made = b.node(case.op, *inputs)
        self.names.append(case.op.name)
        self.values += [b.apply(Map((TAMED if y.dtype.is_float else "sin(float64(a0))",)), y) for y in made]

    def brought(self, shape: Shape) -> Value:
        """A value, mostly the last one, in another shape: the same elements, or a product of a weight that keeps
        leading axes.
        """
        b, rng = self.b, self.rng
        x = rng.choice([*self.values, self.values[-1], self.values[-1]])
        size, wanted = x.type.size, int(np.prod(shape))
        if size == wanted and rng.random() < 0.3:
            return reshape(b, x, shape)
        rows = rng.choice(sorted(set(_leading(x.shape)) & set(_leading(shape))))
        type = TensorType(FLOAT64, (size // rows, wanted // rows))
        weight = b.store(f"{len(b.stored)}.w", type, Kind.PARAMETER, Normal(1.0))
        y = b.apply(MatMul(), reshape(b, x, (rows, size // rows)), weight)
        y = b.apply(Map(("(1.5 + sin(a0))",)), y)
        if rng.random() < 0.3:
            y = b.apply(Map(("where(a1, a0, 0.5)",)), y, b.apply(Map(("gt(a0, 1.5)",)), y))
        return reshape(b, y, shape)


def _wide(type: TensorType) -> TensorType:
    return type.with_dtype(FLOAT64) if type.dtype.is_float else type


def _takes_parts(case: Case) -> bool:
    """Whether ranks can compute with parts of the first input."""
    b = GraphBuilder()
    b.node(case.op, *(b.input(f"x{i}", _wide(given.type)) for i, given in enumerate(case.inputs)))
    (node,) = b.nodes
    for axis in range(case.types[0].rank):
        try:
            possible_shards(Known(node, 0, False, Shard(RANKS, axis)))
        except StaysWhole:
            continue
        return True
    return False


def _leading(shape: Shape) -> Iterator[int]:
    """Numbers of elements along leading axes."""
    return itertools.accumulate((1, *shape), lambda n, extent: n * extent)


@pytest.mark.parametrize("seed", range(pick(4, 8, 80)))
def test_chains(seed: int) -> None:
    """Twenty each, with their gradients where there are any."""
    for number in range(20 * seed, 20 * seed + 20):
        hold(Chain(number).graph, number)


def hold(graph: Graph, seed: int) -> None:
    """Check what ranks compute, if they compute anything in parts."""
    try:
        parts = SplitProducts(RANKS)(graph)
    except UsageError:
        return
    rng = np.random.default_rng(seed)
    try:
        hold_parts(graph, parts, rng)
    except (ModelError, UnsupportedError):  # nothing is trained, or an op has no derivative
        hold_parts(replace(graph, loss=None), replace(parts, loss=None), rng)
