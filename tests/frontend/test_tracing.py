"""Traced functions compute what NumPy computes when the same function runs on arrays."""

import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import scipy.special

from foreplan.base.errors import ShapeError, TraceError, UsageError
from foreplan.frontend import spec, trace
from foreplan.graph import parse_graph
from foreplan.graph.value import Kind
from tests.ops.check import evaluate

RNG = np.random.default_rng(7)
A = RNG.standard_normal((3, 4)).astype(np.float32)
B = RNG.standard_normal((3, 4)).astype(np.float32)
C = RNG.standard_normal((2, 3, 4)).astype(np.float32)
P = (np.abs(A) + 0.5).astype(np.float32)
IDS = np.array([[2, 0, -1], [1, 1, 0]])
COLUMN = np.array([3, 0, -2])
M = A > 0
SIDE = spec(3)
SIDE34 = spec((3, 4))


def run(fn, *arrays, **options):
    """The outputs of the traced function on these inputs."""
    graph = trace(fn, *(spec(x.shape, x.dtype) for x in arrays), **options)
    values = evaluate(graph, {value.name: x for value, x in zip(graph.inputs, arrays)})
    return {name: values[value] for name, value in graph.outputs.items()}


def same(fn, *arrays, rtol=2e-6, dtype=True):
    """Check the traced function against itself on arrays."""
    expected = fn(*arrays)
    (got,) = run(fn, *arrays).values()
    expected = np.asarray(expected)
    assert got.shape == expected.shape
    if dtype:
        assert got.dtype == expected.dtype
    np.testing.assert_allclose(got, expected, rtol=rtol, atol=1e-6)


BINARY = (
    np.add, np.subtract, np.multiply, np.divide, np.maximum, np.minimum, np.arctan2, np.hypot, np.logaddexp, np.fmod,
    np.remainder, np.floor_divide, np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal,
)  # fmt: skip


@pytest.mark.parametrize("ufunc", BINARY, ids=lambda f: f.__name__)
def test_binary_ufuncs(ufunc):
    same(ufunc, A, B)
    same(lambda x: ufunc(x, A[0]), C)
    same(lambda x: ufunc(x, 2.0), A)
    same(lambda x: ufunc(2.0, x), A)


UNARY = (
    np.negative, np.absolute, np.fabs, np.sign, np.floor, np.ceil, np.trunc, np.rint, np.square, np.exp, np.exp2,
    np.expm1, np.sin, np.cos, np.tan, np.arctan, np.sinh, np.cosh, np.tanh, np.arcsinh, np.isnan, np.isinf,
    np.isfinite, np.deg2rad, np.rad2deg, np.positive,
)  # fmt: skip
POSITIVE = (np.sqrt, np.log, np.log1p, np.log2, np.log10, np.reciprocal)
SMALL = (np.arcsin, np.arccos, np.arctanh)


@pytest.mark.parametrize("ufunc", UNARY + POSITIVE + SMALL, ids=lambda f: f.__name__)
def test_unary_ufuncs(ufunc):
    given = P if ufunc in POSITIVE else A / 4 if ufunc in SMALL else A
    same(lambda x: ufunc(x) + 0.5 if ufunc is np.positive else ufunc(x), given)


def test_scipy_ufuncs():
    same(scipy.special.erf, A)
    same(scipy.special.expit, A)


def test_bits_and_logic():
    n, m = np.array([1, 6, -3], np.int64), np.array([3, 5, 7], np.int64)
    for fn in (np.bitwise_and, np.bitwise_or, np.bitwise_xor, np.left_shift, np.right_shift, np.fmod, np.floor_divide):
        same(fn, np.abs(n), m)
    same(lambda x: ~x, n)
    same(lambda x: ~(x > 0) | (x < -1) & (x > -9) ^ (x > 5), A)
    same(lambda x, y: np.logical_and(x, y), A * M, B)
    same(lambda x: np.logical_not(x), n - 1)


OPERATORS = {
    "arithmetic": lambda x, y: (x + y) * 2 - y / 3 + 1.5 * x - (-x) + abs(y),
    "reflected": lambda x, y: (1 - x) + (2.0 / (y * y + 1)) + 3 * x,
    "powers": lambda x, y: x**2 + (y * y) ** 0.5 + (y * y + 1) ** -0.5 + x**3,
    "array constants": lambda x, y: x + B + B[0] * y + np.arange(4, dtype=np.float32),
    "numpy scalars": lambda x, y: x * np.float32(0.3) + y,
    "same twice": lambda x, y: x * x + x - x,
    "scalar first": lambda x, y: np.float32(0.5) * x + 2 - (np.int8(3) - y),
    "power of two": lambda x, y: np.float32(2) ** x + (y * y + 1) ** x,
    "built-in sum": lambda x, y: sum([x, y, x]),
    "compare": lambda x, y: (x > y) & (x >= 0) | (x < -1) & (y <= 0),
    "equal": lambda x, y: (x == x) & (x != y),
    "modulo": lambda x, y: x % 2.0 + x // 0.5,
    "matmul": lambda x, y: x @ y.T,
    "matmul vector": lambda x, y: x @ y[0],
    "vector matmul": lambda x, y: x[:, 0] @ y,
    "inner": lambda x, y: x[0] @ y[1],
    "matmul constant": lambda x, y: x @ B.T,
    "matmul reflected": lambda x, y: B.T @ x,
    "batched": lambda x, y: C @ y.T,
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators(name):
    same(OPERATORS[name], A, B, rtol=1e-5)


METHODS = {
    "reshape": lambda x: x.reshape(4, -1),
    "reshape tuple": lambda x: x.reshape((2, 12)),
    "transpose": lambda x: x.transpose(2, 0, 1),
    "T": lambda x: x.T,
    "mT": lambda x: x.mT,
    "flatten": lambda x: x.flatten(),
    "ravel": lambda x: x.ravel(),
    "swapaxes": lambda x: x.swapaxes(0, -1),
    "squeeze": lambda x: x[:1].squeeze(),
    "squeeze axis": lambda x: x[:1].squeeze(0),
    "sum": lambda x: x.sum(),
    "sum axis": lambda x: x.sum(1),
    "sum axes": lambda x: x.sum(axis=(0, -1), keepdims=True),
    "mean": lambda x: x.mean(axis=-1),
    "prod": lambda x: x.prod(axis=0),
    "max": lambda x: x.max(axis=1),
    "min": lambda x: x.min(),
    "var": lambda x: x.var(axis=0),
    "var ddof": lambda x: x.var(axis=2, ddof=1),
    "std": lambda x: x.std(axis=(1, 2), keepdims=True),
    "argmax": lambda x: x.argmax(axis=1),
    "argmin": lambda x: x.argmin(),
    "any": lambda x: (x > 1).any(axis=0),
    "all": lambda x: (x > -1).all(axis=(0, 1)),
    "clip": lambda x: x.clip(-0.5, 0.5),
    "cumprod": lambda x: x.cumprod(1) + x.cumprod().sum(),
    "diagonal": lambda x: x.diagonal(1, 0, 1) * x.trace()[:, None],
    "argsort": lambda x: x.argsort(0),
    "cumsum": lambda x: x.cumsum(axis=1),
    "repeat": lambda x: x.repeat(3, axis=1),
    "take": lambda x: x.take([2, 0, 0], axis=1),
    "dot": lambda x: x.dot(A.T),
    "round": lambda x: x.round(1),
    "copy": lambda x: x.copy() + 1,
}


@pytest.mark.parametrize("name", METHODS)
def test_methods(name):
    same(METHODS[name], C, rtol=1e-5)


FUNCTIONS = {
    "sum of bools": lambda x: np.sum(x > 0),
    "count_nonzero": lambda x: np.count_nonzero(x > 0, axis=0),
    "norm": lambda x: np.linalg.norm(x, axis=1),
    "where": lambda x: np.where(x > 0, x, 0.1 * x),
    "where scalar": lambda x: np.where(x > 0, x, np.float32(2)),
    "where ints": lambda x: np.where(x > 0, 1, 0),
    "where constant": lambda x: np.where(C > 0, x, -x),
    "where broadcast": lambda x: np.where(A > 0, x, x),
    "clip low": lambda x: np.clip(x, 0, None),
    "clip high": lambda x: np.clip(x, None, 0.5),
    "tril": lambda x: np.tril(x, 1),
    "triu": lambda x: np.triu(x),
    "sort": lambda x: np.sort(x, axis=1),
    "sort all": lambda x: np.sort(x, axis=None),
    "argsort": lambda x: np.argsort(x),
    "take all": lambda x: np.take(x, [5, 0]),
    "take_along_axis": lambda x: np.take_along_axis(x, np.argsort(C, axis=1), axis=1),
    "take_along_axis broadcast": lambda x: np.take_along_axis(x, IDS[:, :, None][:, :2], axis=1),
    "expand_dims": lambda x: np.expand_dims(x, (0, -1)),
    "moveaxis": lambda x: np.moveaxis(x, 0, -1),
    "moveaxis two": lambda x: np.moveaxis(x, [0, 1], [-1, 0]),
    "broadcast_to": lambda x: np.broadcast_to(x[:, :1], (2, 3, 4)) + 0,
    "zeros_like": lambda x: np.zeros_like(x) + x,
    "ones_like": lambda x: np.ones_like(x, dtype=np.int32),
    "full_like": lambda x: np.full_like(x, 2.5),
    "concatenate": lambda x: np.concatenate([x, 2 * x, C], axis=1),
    "concatenate all": lambda x: np.concatenate([x, x[0]], axis=None),
    "stack": lambda x: np.stack([x, x + 1], axis=-1),
    "stack constant": lambda x: np.stack([A, x[0]]),
    "vstack": lambda x: np.vstack([x[0, 0], x[0]]),
    "hstack": lambda x: np.hstack([x, x]),
    "split": lambda x: np.split(x, 2, axis=2)[1],
    "split at": lambda x: np.split(x, [1], axis=1)[1],
    "pad": lambda x: np.pad(x, ((0, 0), (1, 2), (0, 1)), constant_values=3),
    "pad edge": lambda x: np.pad(x, 1, mode="edge"),
    "pad reflect": lambda x: np.pad(x, ((0, 0), (1, 1), (2, 0)), mode="reflect"),
    "tile": lambda x: np.tile(x, (2, 1, 3)),
    "tile more": lambda x: np.tile(x, (2, 1, 1, 2)),
    "repeat all": lambda x: np.repeat(x, 2),
    "flip": lambda x: np.flip(x, 1),
    "flip all": lambda x: np.flip(x),
    "roll": lambda x: np.roll(x, 1, axis=2),
    "roll back": lambda x: np.roll(x, -2, axis=1),
    "roll all": lambda x: np.roll(x, 5),
    "diff": lambda x: np.diff(x, axis=1),
    "outer": lambda x: np.outer(x[0, 0], x[0, 1]),
    "inner": lambda x: np.inner(x, A),
    "dot": lambda x: np.dot(x, A.T),
    "dot three": lambda x: np.dot(A, x.transpose(0, 2, 1)),
    "tensordot": lambda x: np.tensordot(x, A, ([1, 2], [0, 1])),
    "tensordot two": lambda x: np.tensordot(x, A, 2),
    "tensordot one": lambda x: np.tensordot(A, x, ([0], [1])),
    "add.reduce": lambda x: np.add.reduce(x, axis=1),
    "cumsum all": lambda x: np.cumsum(x),
    "swap": lambda x: np.matrix_transpose(x),
    "float_power": lambda x: (x * x) ** 1.5,
    "shape": lambda x: x * (np.shape(x)[0] + np.ndim(x) + np.size(x) + len(x) + x.size),
    "broadcast_arrays": lambda x: np.broadcast_arrays(x, A)[1] + x,
    "astype": lambda x: (x * 3).astype(np.int32),
    "astype bool": lambda x: np.astype(x > 0, np.float32),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name):
    same(FUNCTIONS[name], C, rtol=1e-5)


@pytest.mark.parametrize(
    "subscripts",
    ["ij,kj->ik", "ij,ij->", "ij,ij->i", "ij,kl->ikjl", "ij,kj", "ij,kj->k", "ij,kj->j"],
)
def test_einsum_of_two_matrices(subscripts):
    same(lambda x, y: np.einsum(subscripts, x, y), A, B, rtol=1e-5)


def test_einsum_of_other_operands():
    same(lambda x: np.einsum("bij->bj", x), C, rtol=1e-5)
    same(lambda x: np.einsum("bij->jbi", x), C)
    same(lambda x: np.einsum("bij,bkj->bik", x, x), C, rtol=1e-5)
    same(lambda x, y: np.einsum("bij,ij,kj->bk", x, y, A), C, B, rtol=1e-5)


INDICES = {
    "int": (1,),
    "negative": (-1, -2),
    "slice": (slice(1, 3),),
    "step": (slice(None), slice(None, None, 2)),
    "back": (slice(None), slice(None, None, -1)),
    "back step": (Ellipsis, slice(3, 0, -2)),
    "none": (None, slice(None), None),
    "ellipsis": (Ellipsis, 0),
    "empty": (slice(2, 2),),
    "all": (0, 1, 2),
    "list": ([1, 0, 1],),
    "array": (slice(None), IDS),
    "mask": (slice(None), np.array([True, False, True])),
    "array then int": (slice(None), IDS, 0),
    "pair": (slice(None), IDS, IDS + 1),
    "pair broadcast": (IDS[0][:, None] % 2, IDS[0] % 3),
    "new and array": (None, Ellipsis, IDS),
}


@pytest.mark.parametrize("name", INDICES)
def test_indexing(name):
    same(lambda x: x[INDICES[name]], C)


def test_indexing_with_tensors():
    same(lambda x, i: x[i], A, IDS)
    same(lambda x, i: x[:, i], C, IDS)
    same(lambda x, i: x[np.arange(3), i], A, COLUMN)
    same(lambda x, i: x[1, i], A, COLUMN.astype(np.int32))
    same(lambda x, i: np.take(x, i, axis=1), C, IDS)
    same(lambda x, i: np.take_along_axis(x, i[:, None], axis=1), A, COLUMN)


def test_element_types():
    n = np.arange(6, dtype=np.int64)
    assert run(lambda x: x * 0.5, n)["output"].dtype == np.float32
    assert run(lambda x: x + 1, n)["output"].dtype == np.int64
    assert run(lambda x: x * 1.0, n)["output"].dtype == np.float32
    assert run(lambda x: x * 0, n)["output"].tolist() == [0] * 6
    assert run(lambda x: x / 2, n)["output"].dtype == np.float32
    assert run(lambda x: x + np.ones(4), A)["output"].dtype == np.float32
    assert run(lambda x: x + np.ones(4), A.astype(np.float64))["output"].dtype == np.float64
    assert run(lambda x: np.float64(2) * x, A)["output"].dtype == np.float32
    assert run(lambda x: [1.0, 2.0, 3.0, 4.0] * x, A)["output"].dtype == np.float32
    assert run(lambda x: x.sum(), n > 2)["output"].dtype == np.int64
    assert run(lambda x: x.mean(), n)["output"] == pytest.approx(2.5)


def test_augmented_assignment_makes_a_new_tensor():
    def model(x):
        y = x
        y += 1
        y *= 2
        return y - x

    np.testing.assert_allclose(run(model, A)["output"], (A + 1) * 2 - A, rtol=1e-5)


def test_names_sources_and_constants():
    weights = np.linspace(0, 1, 4)

    def model(images, scale=2.0, *, offset):
        hidden = np.tanh(images * weights) + offset
        return {"a": hidden * weights, "b": hidden * scale}

    graph = trace(model, spec((3, 4)), offset=spec(4))
    assert graph.name == "model"
    assert [value.name for value in graph.inputs] == ["images", "offset"]
    assert list(graph.outputs) == ["a", "b"]
    (constant,) = graph.stored
    assert constant.kind is Kind.CONSTANT
    assert constant.type.dtype.name == "float32"
    lines = Path(__file__).read_text().splitlines()
    found = {node.source for node in graph.nodes}
    assert len(found) == 2
    for source in found:
        name, line = source.split(":")
        assert name == "test_tracing.py"
        assert "hidden" in lines[int(line) - 1]
    assert parse_graph(trace(lambda x: np.exp(x), spec(3)).as_text()).nodes


def test_outputs_and_arguments():
    assert list(trace(lambda x: (x + 1, x * 2), spec(3)).outputs) == ["output_0", "output_1"]
    assert list(trace(lambda x: x, spec(3)).outputs) == ["output"]
    assert trace(lambda *xs: xs[0] + xs[1], spec(3), spec(3)).inputs[1].name == "xs_1"
    assert trace(lambda x, **more: x + more["y"], spec(3), y=spec(3)).inputs[1].name == "y"
    assert trace(lambda x, y=SIDE: x + y, spec(3)).inputs[1].name == "y"
    assert trace(partial(lambda x, k: x * k, k=3), spec(3), name="scaled").name == "scaled"
    assert trace(lambda x, layers: x * layers, spec(3), 2).inputs[0].name == "x"


def refused(fn, *specs, error=TraceError):
    with pytest.raises(error) as caught:
        trace(fn, *(specs or (spec((3, 4)),)))
    if error is not UsageError:
        assert re.search(r"test_tracing\.py:\d+", str(caught.value))
    return str(caught.value)


def branch(x):
    if x.sum() > 0:
        return x
    return -x


def test_python_control_flow_is_refused():
    message = refused(branch)
    line = branch.__code__.co_firstlineno + 1
    assert f"test_tracing.py:{line}:" in message
    assert "np.where" in message
    assert "np.where" in refused(lambda x: x and x)
    assert "float()" in refused(lambda x: float(x.sum()))
    assert "int()" in refused(lambda x: int(x.sum()))
    assert "range" in refused(lambda x: [0, 1][x.sum()])
    assert "range(x.shape[0])" in refused(lambda x: list(x))
    assert "np.asarray" in refused(lambda x: np.asarray(x))
    assert "np.asarray" in refused(lambda x: np.array([x, x]))
    assert ".item()" in refused(lambda x: x.sum().item())
    assert "np.where" in refused(lambda x: x.__setitem__(0, 1))
    assert "any()" in refused(lambda x: 3 in x)


def test_shapes_that_depend_on_data_are_refused():
    assert "depends on data" in refused(lambda x: x[x > 0])
    assert "depends on data" in refused(lambda x: np.where(x > 0))
    assert "depends on data" in refused(lambda x: np.unique(x))
    assert "depend on data" in refused(lambda x, i: x[:i], spec(4), spec((), "int64"))


def test_unsupported_functions_are_named():
    assert "np.linalg.svd" in refused(lambda x: np.linalg.svd(x))
    assert "np.nextafter" in refused(lambda x: np.nextafter(x, x))
    assert "np.multiply.accumulate" in refused(lambda x: np.multiply.accumulate(x))
    assert "where" in refused(lambda x: np.sum(x, where=A > 0))
    assert "out" in refused(lambda x: np.exp(x, out=x))
    assert "complex" in refused(lambda x: x * np.ones(4, complex))
    assert "complex" in refused(lambda x: x * 1j)
    assert "element type" in refused(lambda x: x.astype("complex64"))
    assert "pad" in refused(lambda x: np.pad(x, 1, mode="median"))
    assert "two steps" in refused(lambda x: x[0, :, [0, 1]], spec((3, 4, 4)))


def test_shape_errors_name_the_line():
    refused(lambda x: x + np.ones(3, np.float32), error=ShapeError)
    refused(lambda x: x.reshape(5, -1), error=ShapeError)
    refused(lambda x: x[7], error=ShapeError)
    refused(lambda x: x[0, 0, 0], error=ShapeError)
    refused(lambda x: x.sum(axis=2), error=ShapeError)
    refused(lambda x: x @ x, error=ShapeError)
    refused(lambda x: np.squeeze(x, 0), error=ShapeError)
    refused(lambda x: np.split(x, 3, axis=1), error=ShapeError)


def test_wrong_calls():
    assert "missing" in refused(lambda x, y: x, spec(3), error=UsageError)
    assert "spec((3, 4), 'float32')" in refused(lambda x: x, A, error=UsageError)
    assert "return tensors" in refused(lambda x: 3)
    assert "no tensor" in refused(lambda x: ())
    with pytest.raises(UsageError, match="extent"):
        spec((3, -1))
    with pytest.raises(UsageError, match="extent"):
        spec(("batch", 3))
    with pytest.raises(UsageError, match="complex64"):
        spec(3, "complex64")


def test_tensors_do_not_leave_their_trace():
    kept = []
    trace(lambda x: kept.append(x) or x, spec(3))
    with pytest.raises(TraceError, match="nothing is being traced"):
        kept[0] + 1
    with pytest.raises(TraceError, match="another trace"):
        trace(lambda x: x + kept[0], spec(3))


OUTSIDE = {
    "transpose": lambda x: np.transpose(x, (0, 3)),
    "tensordot": lambda x: np.tensordot(x, x, ([2], [0])),
    "take axis": lambda x: np.take(x, [0], axis=2),
    "concatenate one": lambda x: np.concatenate([x], 2),
    "take": lambda x: np.take(x, [0, 4], axis=1),
    "take before the first": lambda x: np.take(x, [-5], axis=1),
    "index": lambda x: x[[3, 0]],
    "index array": lambda x: x[:, np.array([[0, 4]])],
    "take_along_axis": lambda x: np.take_along_axis(x, np.full((3, 1), 4), 1),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_what_numpy_finds_outside_is_refused(name):
    """Axes and indices that a function holds itself; they were taken modulo what there is."""
    with pytest.raises((IndexError, ValueError)):
        OUTSIDE[name](A)
    with pytest.raises(ShapeError, match=r"distinct axes|is outside an axis of \d elements"):
        trace(OUTSIDE[name], SIDE34)


def test_an_axis_that_is_no_whole_number():
    with pytest.raises(UsageError, match=r"an axis must be a whole number.* 1\.5"):
        trace(lambda x: np.sum(x, axis=1.5), SIDE34)
