"""Updates of the rows that a step has read, in the place of whole tables: the same weights, in less memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import foreplan as fp
from foreplan.graph import Fill, Graph, GraphBuilder, Kind, TensorType, as_dtype
from foreplan.graph.types import INT64
from foreplan.ops.index import ScatterAdd, gather, one_hot
from foreplan.ops.map import elementwise
from foreplan.ops.matmul import matmul
from foreplan.ops.reduce import reduce
from foreplan.ops.shape import reshape
from foreplan.passes.optimizer import Optimizer
from foreplan.passes.optimizer.site import SUMMED
from tests.cpu.check import needs_onednn
from tests.profile import pick

RATE, STEPS = 0.05, 3
Shape = tuple[int, ...]
Arrays = dict[str, np.ndarray]


def drawn(rng: np.random.Generator, times: int = 1) -> tuple[list[Shape], Shape]:
    """Shapes of the indices of some lookups, empty ones among them, and of a table with so many times as many rows."""
    lookups = [tuple(map(int, rng.integers(0, 5, rng.integers(1, 3)))) for _ in range(rng.integers(1, 4))]
    lookups[0] = tuple(extent + 1 for extent in lookups[0])
    count = sum(int(np.prod(shape)) for shape in lookups)
    return lookups, (max(1, times * count + int(rng.integers(0, 5))), int(rng.integers(1, 40)))


def model(lookups: Sequence[Shape], table: Shape, dtype: str = "float64", products: bool = False) -> Graph:
    """Σ (scale · row − wanted)² over the rows that each lookup reads in one table.

    Args:
        products: rows are read by products with one-hot vectors, whose gradient is a whole matrix.
    """
    b, total = GraphBuilder("lookups"), None
    weight = b.store("table", TensorType(as_dtype(dtype), table), Kind.PARAMETER, Fill(0.0))
    scale = b.store("scale", TensorType(as_dtype(dtype), table[1:]), Kind.PARAMETER, Fill(1.0))
    for i, shape in enumerate(lookups):
        indices, wanted = b.input(f"i{i}", TensorType(INT64, shape)), weight.type.with_shape((*shape, table[1]))
        if products:
            flat = one_hot(b, reshape(b, indices, (indices.type.size,)), table[0], dtype=dtype)
            read = reshape(b, matmul(b, flat, weight), wanted.shape)
        else:
            read = gather(b, weight, indices)
        term = elementwise(b, lambda x, s, w: (x * s - w) ** 2, read, scale, b.input(f"w{i}", wanted))
        term = reduce(b, "sum", term)
        total = term if total is None else elementwise(b, lambda x, y: x + y, total, term)
    return b.finish({}, loss=total)


def given(rng: np.random.Generator, lookups: Sequence[Shape], table: Shape, dtype: str = "float64") -> Arrays:
    """Inputs of a step: indices from either end, most of them more than once."""
    some = rng.integers(-table[0], table[0], max(1, table[0] // 3))
    return {f"i{i}": rng.choice(some, shape) for i, shape in enumerate(lookups)} | {
        f"w{i}": rng.normal(size=(*shape, table[1])).astype(dtype) for i, shape in enumerate(lookups)
    }


def trained(graph: Graph, optimizer: Optimizer, start: Arrays, batches: Sequence[Arrays], **options: Any) -> Arrays:
    session = fp.compile(graph, optimizer=optimizer, **options).bind()
    for name, array in start.items():
        session.parameters[name] = array
    for batch in batches:
        session.step(batch)
    return {name: np.array(array) for name, array in session.parameters.items()}


def sums(graph: Graph) -> list[int]:
    """Of each scatter-add: 2 inputs if it makes a whole gradient, more if it adds to something."""
    return [len(node.inputs) for node in graph.nodes if isinstance(node.op, ScatterAdd)]


def step_of(graph: Graph, optimizer: Optimizer) -> Graph:
    return fp.differentiate(graph, optimizer=optimizer)


OPTIMIZERS = {
    "sgd": fp.optim.SGD(RATE),
    "schedule, group": fp.optim.SGD(fp.optim.linear(RATE, steps=9), groups=[fp.optim.Group("table", rate=3.0)]),
    "decay of others": fp.optim.SGD(RATE, weight_decay=0.1, decay=["scale"]),
    "decay": fp.optim.SGD(RATE, weight_decay=0.1),
    "norm": fp.optim.SGD(RATE, clip_norm=0.5),
    "limit": fp.optim.SGD(RATE, clip_value=0.5),
    "average": fp.optim.SGD(RATE, ema=0.9),
    "momentum": fp.optim.Momentum(RATE, 0.8),
    "momentum, schedule, group": fp.optim.Momentum(
        fp.optim.linear(RATE, steps=9), groups=[fp.optim.Group("table", rate=3.0)]
    ),
    "momentum, decay": fp.optim.Momentum(RATE, weight_decay=0.1),
    "momentum, norm": fp.optim.Momentum(RATE, clip_norm=0.5),
    "nesterov": fp.optim.Nesterov(RATE, 0.8),
    "nesterov, group": fp.optim.Nesterov(RATE, groups=[fp.optim.Group("table", rate=3.0)]),
    "nesterov, decay": fp.optim.Nesterov(RATE, weight_decay=0.1),
    "nesterov, average": fp.optim.Nesterov(RATE, ema=0.9),
    "adagrad": fp.optim.Adagrad(RATE),
    "adagrad, initial, group": fp.optim.Adagrad(RATE, 0.3, groups=[fp.optim.Group("table", rate=3.0)]),
    "adagrad, decay": fp.optim.Adagrad(RATE, weight_decay=0.1),
    "adagrad, norm": fp.optim.Adagrad(RATE, clip_norm=0.5),
    "adagrad, average": fp.optim.Adagrad(RATE, ema=0.9),
    "adam": fp.optim.Adam(RATE),
}
BY_ROWS = {
    **{key: [3] for key in ("sgd", "schedule, group", "decay of others", "momentum", "momentum, schedule, group")},
    **{key: [3, 5] for key in ("nesterov", "nesterov, group")},  # velocity; then table, velocity and rate
    **{key: [2, 3, 3] for key in ("adagrad", "adagrad, initial, group")},  # sums of rows; squares; then the table
}
PLAIN = {
    "sgd": fp.optim.SGD(RATE),
    "momentum": fp.optim.Momentum(RATE, 0.8),
    "nesterov": fp.optim.Nesterov(RATE, 0.8),
    "adagrad": fp.optim.Adagrad(RATE, 0.5),
    "sparse_adam": fp.optim.SparseAdam(RATE, epsilon=1.0),
}
KEPT = {"sgd": 0, "momentum": 1, "nesterov": 1, "adagrad": 1, "sparse_adam": 2}  # of the table's size


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("seed", range(pick(1, 2, 20)))
def test_rows_learn_as_whole_tables_do(name: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    lookups, table = drawn(rng, SUMMED if "adagrad" in name else 1)
    graph, optimizer = model(lookups, table), OPTIMIZERS[name]
    assert sums(step_of(graph, optimizer)) == BY_ROWS.get(name, [2, *[3] * (len(lookups) - 1)])
    start = {"table": rng.normal(size=table), "scale": rng.normal(size=table[1:])}
    batches = [given(rng, lookups, table) for _ in range(STEPS)]
    theirs = trained(model(lookups, table, products=True), optimizer, start, batches)
    ours = trained(graph, optimizer, start, batches)
    assert (ours["table"] != start["table"]).any()
    for key, array in theirs.items():
        np.testing.assert_allclose(ours[key], array, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("seed", range(pick(2, 4, 10)))
def test_over_micro_batches_tables_learn_as_in_one_batch(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lookups, table = drawn(rng)
    start = {"table": rng.normal(size=table), "scale": rng.normal(size=table[1:])}
    batches = [[given(rng, lookups, table) for _ in range(2)] for _ in range(STEPS)]
    stacked = [{key: np.stack([part[key] for part in parts]) for key in parts[0]} for parts in batches]
    optimizer = fp.optim.SGD(RATE)
    ours, theirs = (
        trained(model(lookups, table, products=products), optimizer, start, stacked, accumulate=2)
        for products in (False, True)
    )
    for key, array in theirs.items():
        np.testing.assert_allclose(ours[key], array, rtol=1e-9, atol=1e-9)


def test_distinct_rows_get_the_bits_of_the_whole_update() -> None:
    """p − η·g, with g scattered into zeros, in float32."""
    rng = np.random.default_rng(1)
    for _ in range(pick(5, 8, 100)):
        count, table = int(rng.integers(1, 9)), (int(rng.integers(9, 40)), int(rng.integers(1, 40)))
        start, wanted = (rng.normal(size=shape).astype(np.float32) for shape in (table, (count, table[1])))
        indices = rng.permutation(table[0])[:count] - table[0] * rng.integers(0, 2, count)
        ones = np.ones(table[1], np.float32)
        after = trained(
            model([(count,)], table, "float32"),
            fp.optim.SGD(RATE),
            {"table": start, "scale": ones},
            [{"i0": indices, "w0": wanted}],
            target="numpy",
        )
        gradient = np.zeros(table, np.float32)
        gradient[indices] = np.float32(2) * (start[indices] - wanted)
        np.testing.assert_array_equal(after["table"], start - np.float32(RATE) * gradient)


def test_distinct_rows_get_the_bits_of_momentum() -> None:
    """v ← μ·v + g and p ← p − η·v, with g scattered into zeros, in float32; the table's and the state's."""
    rng, rate, mu = np.random.default_rng(2), np.float32(RATE), np.float32(0.8)
    for _ in range(pick(5, 8, 100)):
        count, table = int(rng.integers(1, 9)), (int(rng.integers(9, 40)), int(rng.integers(1, 40)))
        now, wanted = (rng.normal(size=shape).astype(np.float32) for shape in (table, (count, table[1])))
        graph = model([(count,)], table, "float32")
        groups = [fp.optim.Group("scale", rate=0.0)]  # stays one
        session = fp.compile(graph, optimizer=fp.optim.Momentum(RATE, 0.8, groups=groups), target="numpy").bind()
        session.parameters["table"], session.parameters["scale"] = now, np.ones(table[1], np.float32)
        velocity = np.zeros(table, np.float32)
        for _ in range(STEPS):
            indices = rng.permutation(table[0])[:count] - table[0] * rng.integers(0, 2, count)
            session.step({"i0": indices, "w0": wanted})
            gradient = np.zeros(table, np.float32)
            gradient[indices] = np.float32(2) * (now[indices] - wanted)
            velocity = mu * velocity + gradient
            now = now - rate * velocity
            np.testing.assert_array_equal(session.stored["table/velocity"], velocity)
            np.testing.assert_array_equal(session.parameters["table"], now)


def test_rows_get_the_bits_of_adagrad() -> None:
    """s ← s + g² and p ← p − η·g / (√s + ε), with g scattered into zeros, rows of an index in their order."""
    rng, rate, epsilon = np.random.default_rng(3), np.float32(RATE), np.float32(1e-10)
    for _ in range(pick(5, 8, 100)):
        count, table = int(rng.integers(1, 9)), (int(rng.integers(32, 40)), int(rng.integers(1, 40)))
        now, wanted = (rng.normal(size=shape).astype(np.float32) for shape in (table, (count, table[1])))
        groups = [fp.optim.Group("scale", rate=0.0)]  # stays one
        graph, optimizer = model([(count,)], table, "float32"), fp.optim.Adagrad(RATE, 0.25, groups=groups)
        session = fp.compile(graph, optimizer=optimizer, target="numpy").bind()
        session.parameters["table"], session.parameters["scale"] = now, np.ones(table[1], np.float32)
        total = np.full(table, 0.25, np.float32)
        for _ in range(STEPS):
            indices = rng.integers(-table[0], table[0], 3)[rng.integers(0, 3, count)]
            session.step({"i0": indices, "w0": wanted})
            gradient = np.zeros(table, np.float32)
            np.add.at(gradient, indices, np.float32(2) * (now[indices] - wanted))
            total = total + gradient * gradient
            now = now - rate * (gradient / (np.sqrt(total) + epsilon))
            assert session.stored["table/sum_of_squares"].tobytes() == total.tobytes()
            assert session.parameters["table"].tobytes() == now.tobytes()


@needs_onednn()
@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("seed", range(pick(1, 2, 10)))
def test_engines_agree(seed: int, name: str, precision: str) -> None:
    rng = np.random.default_rng(seed)
    lookups, table = drawn(rng, int(rng.choice([1, SUMMED])))
    start = {"table": rng.normal(size=table), "scale": rng.normal(size=table[1:])}
    start = {name: array.astype(np.float32) for name, array in start.items()}
    batches = [given(rng, lookups, table, "float32") for _ in range(STEPS)]
    graph, optimizer = model(lookups, table, "float32"), PLAIN[name]
    theirs, ours = (
        trained(graph, optimizer, start, batches, target=target, precision=precision)
        for target in ("numpy", "cpu:threads=1")
    )
    far = {"float32": 1e-5, "bf16": 3e-2}[precision]
    for key, array in theirs.items():
        np.testing.assert_allclose(ours[key], array, rtol=far, atol=far * np.abs(array).max())


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("target", ["numpy", "cpu:threads=1", "cuda:h100"])
def test_no_gradient_of_a_table_is_in_the_plan(target: str, name: str) -> None:
    """The arena has the rows that are read and what follows from them, beside the table, what is kept for it, and
    blocks of kernels.
    """
    lookups, table = [(7,), (3, 5)], (50_000, 24)
    step = fp.compile(model(lookups, table, "float32"), optimizer=PLAIN[name], target=target)
    whole, row = 4 * table[0] * table[1] * (1 + KEPT[name]), 4 * table[1]
    assert whole <= step.arena_bytes <= whole + 8 * 22 * row + (1 << 17)
    assert not any("NumPy" in note for note in step.program.notes)


def test_stays_whole_where_rows_have_more_elements() -> None:
    graph = model([(4,), (5,)], (8, 3))
    assert sums(step_of(graph, fp.optim.SGD(RATE))) == [2, 3]
    assert sums(step_of(model([(4,), (5,)], (9, 3)), fp.optim.SGD(RATE))) == [3]
    for rows, wanted in ((35, [2, 3]), (36, [2, 3, 3])):
        assert sums(step_of(model([(4,), (5,)], (rows, 3)), fp.optim.Adagrad(RATE))) == wanted


def test_a_table_that_a_product_reads_too_gets_a_whole_gradient() -> None:
    graph = fp.models.build("gpt2_small:batch=1,seq=4,layers=1,width=8,heads=2,vocabulary=50")
    step = fp.differentiate(graph, fp.losses.cross_entropy, fp.optim.SGD(RATE))
    tied = step.updates[next(value for value in step.parameters if value.shape == (50, 8))]
    assert not isinstance(step.producer[tied].op, ScatterAdd)


ASKED: list[dict[str, Any]] = [{}, {"clip_norm": 1e9}, {"clip_value": 1e9}, {"ema": 0.9}]


@pytest.mark.parametrize("seed", range(pick(1, 2, 20)))
def test_sparse_adam_learns_alike_by_rows_and_over_whole_tables(seed: int) -> None:
    """What needs the whole gradient changes no result: rows that are not read stay as they are."""
    rng = np.random.default_rng(seed)
    lookups, table = drawn(rng, SUMMED)
    graph = model(lookups, table)
    start = {"table": rng.normal(size=table), "scale": rng.normal(size=table[1:])}
    batches = [given(rng, lookups, table) for _ in range(STEPS)]
    optimizers = [fp.optim.SparseAdam(RATE, **asked) for asked in ASKED]
    by_rows = [sums(step_of(graph, each)) == [2, 3, 3, 3] for each in optimizers]
    assert by_rows == [True, False, False, False]
    first, *others = (trained(graph, each, start, batches) for each in optimizers)
    for other in others:
        for key, array in first.items():
            np.testing.assert_allclose(other[key], array, rtol=1e-5, atol=1e-6)


def test_what_is_no_table_learns_as_with_adam() -> None:
    """To the bit; also a table that products read."""
    rng = np.random.default_rng(4)
    lookups, table = drawn(rng)
    graph = model(lookups, table, products=True)
    start = {"table": rng.normal(size=table), "scale": rng.normal(size=table[1:])}
    batches = [given(rng, lookups, table) for _ in range(STEPS)]
    ours, theirs = (
        trained(graph, kind(RATE, 0.8, 0.99, 1e-3), start, batches) for kind in (fp.optim.SparseAdam, fp.optim.Adam)
    )
    for key, array in theirs.items():
        np.testing.assert_array_equal(ours[key], array)


def test_sparse_adam_over_micro_batches_is_refused() -> None:
    graph = model([(3,)], (9, 2))
    with pytest.raises(fp.UsageError, match="leave accumulate out, or use Adam"):
        fp.compile(graph, optimizer=fp.optim.SparseAdam(RATE), accumulate=2)


@pytest.mark.parametrize("kind", [fp.optim.Adagrad, fp.optim.SparseAdam])
def test_a_table_without_rows(kind: Any) -> None:
    graph = model([(0,)], (0, 2))
    fp.compile(graph, optimizer=kind(RATE)).bind().step({"i0": np.zeros(0, np.int64), "w0": np.zeros((0, 2))})
