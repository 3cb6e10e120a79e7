"""Element-wise mathematics: every function against NumPy and SciPy, every derivative against differences."""

from __future__ import annotations

import itertools
import math
import operator

import numpy as np
import pytest
import scipy.special

from foreplan.base.errors import ModelError, ShapeError
from foreplan.graph import GraphBuilder, TensorType, as_dtype
from foreplan.ops.expr import (
    FUNCTIONS,
    Arg,
    Call,
    Const,
    Expr,
    call,
    cast,
    clip,
    infer_dtypes,
    parse_expr,
    simplify,
    subexpressions,
    where,
)
from foreplan.ops.map import BLOCK, Map, elementwise, elementwise_many
from tests.ops.check import check_vjp, evaluate, run_op, type_of
from tests.sweep.oracles.expressions import OF_FLOATS


def _arguments(name: str) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    arity = FUNCTIONS[name].arity
    low, high = (1.1, 3) if name == "acosh" else (0.1, 0.9)
    args = [rng.uniform(low, high, (3, 4)) for _ in range(arity)]
    if name in ("abs", "sign", "relu", "floor", "sin", "tanh", "erf", "round"):
        args[0] -= 0.52
    if name == "clip":
        args[1:] = [np.full((3, 4), 0.3), np.full((3, 4), 0.7)]
    return args


@pytest.mark.parametrize("name", OF_FLOATS)
def test_function_and_its_derivative(name: str) -> None:
    args = _arguments(name)
    expr = Call(name, tuple(Arg(i) for i in range(len(args))))
    np.testing.assert_allclose(run_op(Map((str(expr),)), *args)[0], OF_FLOATS[name](*args), rtol=1e-14)
    single = [x.astype(np.float32) for x in args]
    np.testing.assert_allclose(run_op(Map((str(expr),)), *single)[0], OF_FLOATS[name](*args), rtol=3e-6, atol=1e-6)
    check_vjp(lambda b, *values: elementwise(b, expr, *values), *args, wrt=[0] if name == "clip" else None, tol=1e-7)


LOGIC = ("eq", "ne", "lt", "le", "gt", "ge")
UFUNCS = (np.equal, np.not_equal, np.less, np.less_equal, np.greater, np.greater_equal)


@pytest.mark.parametrize(("name", "ufunc"), list(zip(LOGIC, UFUNCS)))
def test_comparison(name: str, ufunc: np.ufunc) -> None:
    x = np.array([1.0, 2.0, np.nan, 4.0], np.float32)
    y = np.array([1.0, 3.0, 3.0, 2.0], np.float32)
    np.testing.assert_array_equal(run_op(Map((str(call(name, Arg(0), Arg(1))),)), x, y)[0], ufunc(x, y))


def test_logic_and_bits() -> None:
    p, q = np.array([True, True, False, False]), np.array([True, False, True, False])
    for name, expected in (("and_", p & q), ("or_", p | q), ("xor", p ^ q)):
        np.testing.assert_array_equal(run_op(Map((f"{name}(a0, a1)",)), p, q)[0], expected)
    np.testing.assert_array_equal(run_op(Map(("not_(a0)",)), p)[0], ~p)
    m, n = np.array([12, 7, 255], np.uint8), np.array([1, 2, 3], np.uint8)
    for name, expected in (
        ("bitand", m & n),
        ("bitor", m | n),
        ("bitxor", m ^ n),
        ("shiftleft", m << n),
        ("shiftright", m >> n),
    ):
        np.testing.assert_array_equal(run_op(Map((f"{name}(a0, a1)",)), m, n)[0], expected)
    np.testing.assert_array_equal(run_op(Map(("bitnot(a0)",)), m)[0], ~m)
    x = np.array([np.nan, np.inf, -np.inf, 0.0], np.float32)
    np.testing.assert_array_equal(run_op(Map(("isnan(a0)",)), x)[0], np.isnan(x))
    np.testing.assert_array_equal(run_op(Map(("isinf(a0)",)), x)[0], np.isinf(x))


def test_integer_division_truncates_as_c_does() -> None:
    a = np.array([7, -7, 7, -7, 6, -6, 0], np.int32)
    b = np.array([2, 2, -2, -2, 3, 3, -5], np.int32)
    expected = np.array([math.trunc(x / y) for x, y in zip(a.tolist(), b.tolist())], np.int32)
    np.testing.assert_array_equal(run_op(Map(("truncdiv(a0, a1)",)), a, b)[0], expected)


def test_a_constant_beyond_the_type_is_infinite_whatever_numpy_is_told_of_errors() -> None:
    x = np.array([-2.0, 3.0], np.float32)
    with np.errstate(all="raise"):
        (found,) = run_op(Map(("a0 * 1e39",)), x)
    np.testing.assert_array_equal(found, [-np.inf, np.inf])


def test_where_keeps_nan_out_of_the_other_branch() -> None:
    x = np.array([-1.0, 4.0, np.nan], np.float32)
    y = run_op(Map(("where((a0 > 0), sqrt(a0), (a0 * 0.0 + 7.0))",)), x)[0]
    np.testing.assert_allclose(y[:2], [7, 2])
    condition = np.array([True, False, True])
    got = run_op(Map(("where(a0, a1, a2)",)), condition, x, np.arange(3, dtype=np.float32))[0]
    np.testing.assert_array_equal(got, np.where(condition, x, np.arange(3)))


def test_scalar_condition_and_branch_in_place() -> None:
    x = np.arange(4, dtype=np.float32)
    for flag in (True, False):
        got = run_op(Map(("where(a0, a1, 9.0)",)), np.array(flag), x)[0]
        np.testing.assert_array_equal(got, x if flag else np.full(4, 9))


def test_broadcasting_over_many_blocks_is_exact() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 5, BLOCK // 4 + 3)).astype(np.float32)
    row, column = rng.standard_normal(x.shape[-1]).astype(np.float32), rng.standard_normal((3, 1, 1)).astype(np.float32)
    got = run_op(Map(("((a0 * a1) + a2)",)), x, row, column)[0]
    np.testing.assert_array_equal(got, x * row + column)


def test_several_results_share_their_parts() -> None:
    x = np.linspace(0.1, 2, 7).astype(np.float32)
    y, z = run_op(Map(("exp(a0)", "(exp(a0) * a0)")), x)
    np.testing.assert_allclose(y, np.exp(x), rtol=1e-6)
    np.testing.assert_allclose(z, np.exp(x) * x, rtol=1e-6)
    check_vjp(lambda b, v: elementwise_many(b, [call("exp", Arg(0)), call("sin", Arg(0)) * Arg(0)], v), x)


def test_the_gradient_of_several_results_is_one_map_for_all_inputs_of_their_type() -> None:
    x, y, row = np.linspace(-1, 1, 12).reshape(3, 4), np.linspace(1, 2, 12).reshape(3, 4), np.linspace(0, 1, 4)
    fns = [call("tanh", Arg(0)) * Arg(1), Arg(0) * Arg(1) + Arg(2)]
    check_vjp(lambda b, *values: elementwise_many(b, fns, *values), x, y, row)
    b = GraphBuilder("gradient")
    values = [b.input(name, type_of(array)) for name, array in (("x", x), ("y", y), ("row", row))]
    outputs = elementwise_many(b, fns, *values)
    (by_x, by_y, _) = Map(tuple(map(str, fns))).vjp(b, values, outputs, outputs)
    assert by_x is not None and by_y is not None
    (maker,) = (node for node in b.finish({"x": by_x, "y": by_y}).nodes if by_x in node.outputs)
    assert set(maker.outputs) == {by_x, by_y}


def test_results_that_are_inputs_or_constants() -> None:
    x, y = np.arange(6, dtype=np.float32), np.arange(6, 12, dtype=np.float32)
    first, second = run_op(Map(("a1", "a0")), x, y)
    np.testing.assert_array_equal(first, y)
    np.testing.assert_array_equal(second, x)
    first, second = run_op(Map(("(a0 + a1)", "a0")), x, y)
    np.testing.assert_array_equal(first, x + y)
    np.testing.assert_array_equal(second, x)


@pytest.mark.parametrize("shape", [(), (1,), (0,), (2, 0, 3), (1, 1)])
def test_odd_shapes(shape: tuple[int, ...]) -> None:
    x = np.full(shape, 0.5, np.float32)
    np.testing.assert_allclose(run_op(Map(("((a0 + 1.0) * exp(a0))",)), x)[0], (x + 1) * np.exp(x), rtol=1e-6)


def test_derivative_sums_over_broadcast_axes() -> None:
    rng = np.random.default_rng(0)
    x, row, column = rng.standard_normal((2, 3, 4)), rng.standard_normal(4), rng.standard_normal((3, 1))
    check_vjp(lambda b, *v: elementwise(b, lambda x, r, c: call("tanh", x * r + c) * c, *v), x, row, column)


def test_dtype_rules() -> None:
    types = {n: as_dtype(n) for n in ("float32", "float64", "float16", "bfloat16", "int32", "int64", "bool", "uint8")}

    def result(text: str, *names: str) -> str:
        expr = parse_expr(text)
        return str(infer_dtypes([types[n] for n in names], expr)[expr])

    assert result("(a0 + a1)", "float16", "float32") == "float32"
    assert result("(a0 + a1)", "float16", "bfloat16") == "float32"
    assert result("(a0 + a1)", "int64", "float16") == "float16"
    assert result("(a0 + a1)", "int32", "int64") == "int64"
    assert result("(a0 / a1)", "int32", "int32") == "float32"
    assert result("(a0 + 1)", "int32") == "int32"
    assert result("(a0 + 1.0)", "int32") == "float32"
    assert result("(a0 + 1.0)", "float16") == "float16"
    assert result("(a0 < a1)", "float32", "float32") == "bool"
    assert result("float16((a0 + 1))", "int32") == "float16"
    with pytest.raises(ShapeError, match="boolean condition"):
        result("where(a0, a0, a0)", "float32")
    with pytest.raises(ShapeError, match="only 1 inputs"):
        result("(a0 + a1)", "float32")


def test_conversions_to_the_type_that_a_part_has_are_left_out() -> None:
    def simple(text: str, *dtypes: str) -> str:
        return str(simplify(parse_expr(text), [as_dtype(name) for name in dtypes]))

    assert simple("float32((float32((a0 * 0.25)) + a1))", "float32", "float32") == "((a0 * 0.25) + a1)"
    assert simple("int64(a0)", "int64") == "a0" and simple("int64(a0)", "int32") == "int64(a0)"
    assert simple("float64(where(a0, 0.1, 0.2))", "bool") == "float64(where(a0, 0.1, 0.2))"
    assert simple("(float16((a0 * a0)) + a0)", "float16") == "(float16((a0 * a0)) + a0)"  # which rounds


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int64", "bool"])
@pytest.mark.parametrize("literal", [1, 1.0, 0.5, -1, 300, 2.5, -0.5, math.inf, -math.inf, math.nan, 1 << 70])
@pytest.mark.parametrize("name", ["lt", "le", "gt", "ge", "eq", "ne"])
def test_integers_compare_with_any_literal_as_numbers_do(name: str, literal: float, dtype: str) -> None:
    """As Python compares them: exactly."""
    x = np.array([0, 1] if dtype == "bool" else [0, 1, 2, 100], dtype)
    found = run_op(Map((str(call(name, Arg(0), literal)),)), x)[0]
    assert found.tolist() == [getattr(operator, name)(int(element), literal) for element in x.tolist()]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a0 + 300", r"\(a0 \+ 300\) is int8, which cannot hold 300; convert"),
        ("where(a0 < 2, a0, 1000)", "is int8, which cannot hold 1000"),
        ("bitand(a0, nan)", r"bitand\(\) needs integers"),
        ("bitnot(nan)", r"bitnot\(\) needs integers"),
        ("shiftleft(a0, 1.5)", r"shiftleft\(\) needs integers"),
    ],
)
def test_literals_that_an_integer_map_cannot_take(text: str, message: str) -> None:
    b = GraphBuilder()
    x = b.input("x", TensorType(as_dtype("int8"), (3,)))
    with pytest.raises(ShapeError, match=rf"node 'tokens'.*{message}"):
        b.apply(Map((text,)), x, name="tokens")


@pytest.mark.parametrize(
    "name", ["sub", "neg", "sign", "square", "pow", "floordiv", "mod", "fmod", "truncdiv", "shiftleft", "shiftright"]
)
def test_arithmetic_of_booleans_is_refused(name: str) -> None:
    truth, args = TensorType(as_dtype("bool"), (3,)), [Arg(i) for i in range(FUNCTIONS[name].arity)]
    with pytest.raises(ShapeError, match=rf"{name}\(\) does not take booleans; convert"):
        Map((str(call(name, *args)),)).infer([truth] * len(args))


@pytest.mark.parametrize("dtype", ["int8", "int32", "int64"])
def test_whole_powers_take_any_exponent(dtype: str) -> None:
    """One below 0 has no meaning, and ends no step."""
    a, b = np.array([-3, 2, 5, 0, 7], dtype), np.array([3, 6, 2, 0, -1], dtype)
    found = run_op(Map(("(a0 ** a1)",)), a, b)[0]
    assert found[:4].tolist() == [-27, 64, 25, 1]
    assert run_op(Map(("(a0 ** 3)",)), a)[0][:3].tolist() == [-27, 8, 125]


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int64", "uint64", "bool"])
def test_whole_numbers_are_round_already(dtype: str) -> None:
    x = np.array([0, 1, 1] if dtype == "bool" else [0, 1, 100], dtype)
    assert run_op(Map(("round(a0)",)), x)[0].tolist() == x.tolist()


def test_conversions() -> None:
    x = np.array([-1.7, 0.0, 2.9], np.float32)
    np.testing.assert_array_equal(run_op(Map(("int32(a0)",)), x)[0], [-1, 0, 2])
    np.testing.assert_array_equal(run_op(Map(("bool(a0)",)), x)[0], [True, False, True])
    mixed = run_op(Map(("((a0 + a1) * float64(a1))",)), x, np.array([1, 2, 3], np.int32))[0]
    assert mixed.dtype == np.float64
    np.testing.assert_allclose(mixed, np.add(x, [1, 2, 3]).astype(np.float32).astype(np.float64) * [1, 2, 3], rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_small_floats(dtype: str) -> None:
    x = np.linspace(-2, 2, 9).astype(as_dtype(dtype).numpy)
    for text, expected in (
        ("((a0 * a0) + 1.0)", lambda x: x * x + 1),
        ("exp(a0)", np.exp),
        ("relu(a0)", lambda x: np.maximum(x, 0)),
        ("sigmoid(a0)", scipy.special.expit),
        ("tanh(a0)", np.tanh),
        ("erf(a0)", scipy.special.erf),
    ):
        got = run_op(Map((text,)), x)[0]
        assert got.dtype == x.dtype
        np.testing.assert_allclose(got.astype(np.float64), expected(x.astype(np.float64)), rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", ["sigmoid", "erf"])
def test_sigmoid_and_erf_of_every_size(name: str, dtype: type) -> None:
    """Also results below the least normal number; and nothing overflows on the way."""
    limits = np.finfo(dtype)
    ends = [np.inf, -np.inf, np.nan, 0.0, -0.0, limits.tiny, limits.smallest_subnormal, limits.max, -limits.max]
    x = np.concatenate([np.linspace(-760, 760, 5001), np.linspace(-110, 10, 5001), ends]).astype(dtype)
    expected = [1 / (1 + math.exp(-each)) if each > -700 else math.exp(each) for each in x.tolist()]
    if name == "erf":
        expected = [math.erf(each) for each in x.tolist()]
    (found,) = run_op(Map((f"{name}(a0)",)), x)
    np.testing.assert_allclose(found, np.array(expected), rtol=4 * limits.eps, atol=limits.smallest_subnormal)
    if name == "erf":
        np.testing.assert_array_equal(np.signbit(found), np.signbit(x))
    with np.errstate(all="raise", under="ignore"):
        FUNCTIONS[name].compute()(x[~np.isnan(x)], out=np.empty(len(x) - 1, dtype))


@pytest.mark.parametrize("name", ["sigmoid", "erf"])
def test_sigmoid_and_erf_in_place_and_strided(name: str) -> None:
    compute = FUNCTIONS[name].compute()
    x = np.random.default_rng(0).normal(0, 40, (3, 70, 90)).astype(np.float32)
    expected = np.empty_like(x)
    compute(x, out=expected)
    for order in itertools.permutations(range(3)):
        held = np.zeros((*(2 * x.shape[axis] for axis in order),), np.float32)
        window = held[::2, 1::2, ::-2].transpose(np.argsort(order))
        window[...] = x
        compute(window, out=window)
        np.testing.assert_array_equal(window, expected)
        assert np.count_nonzero(held) <= x.size
    compute(np.broadcast_to(x[:, :1], x.shape), out=window)
    np.testing.assert_array_equal(window, np.broadcast_to(expected[:, :1], x.shape))
    compute(np.float32(0.5), out=window)
    assert np.unique(window).size == 1
    compute(np.zeros((0, 3), np.float32), out=np.zeros((0, 3), np.float32))


def test_text_reads_back() -> None:
    text = "where(((a0 < a1) ), (a0 * -2.5), and_((a0 > 1e-30), (a1 <= inf)))".replace(") )", "))")
    expr = parse_expr(text)
    assert parse_expr(str(expr)) == expr
    for bad in ("a0 +", "foo(a0)", "__import__('os')", "a0 if a1 else a2", "exp(a0, a1)", "a0.real", "'x'"):
        with pytest.raises(ModelError, match="not a scalar expression"):
            parse_expr(bad)


@pytest.mark.parametrize("seed", range(20))
def test_a_graph_of_expressions_reads_back(seed: int) -> None:
    rng = np.random.default_rng(seed)
    parts: list[Expr] = [Arg(0), Arg(1), Const(0.5)]
    for _ in range(rng.integers(1, 45)):
        function = rng.choice(["add", "mul", "sin", "where", "max", "float32"])
        arity = 1 if function == "float32" else FUNCTIONS[function].arity
        args = [parts[max(0, len(parts) - 1 - rng.geometric(0.4))] for _ in range(arity)]
        parts.append(Call(function, tuple(args)) if function != "where" else where(args[0] > 0, *args[1:]))
    whole = parts[-1]
    assert parse_expr(str(whole)) == whole
    assert subexpressions(parse_expr(str(whole))) == subexpressions(whole)
    calls = [part for part in subexpressions(whole) if isinstance(part, Call)]
    assert len(str(whole)) < 400 * len(calls)


@pytest.mark.parametrize(
    "bad", ["(t0 + (t0 := exp(a0)))", "(t1 := exp(a0))", "((t0 := exp(a0)) + (t0 := sin(a0)))", "(a0 := exp(a1))", "t0"]
)
def test_a_name_stands_for_a_part_before_it(bad: str) -> None:
    assert parse_expr("((t0 := exp(a0)) + t0)") == call("exp", Arg(0)) + call("exp", Arg(0))
    with pytest.raises(ModelError, match="not a scalar expression"):
        parse_expr(bad)


def test_builder_drops_unread_inputs_and_identities() -> None:
    b = GraphBuilder()
    x, y = (b.input(n, TensorType(as_dtype("float32"), (3,))) for n in "xy")
    z = elementwise(b, lambda x, y: y * 2, x, y)
    assert b.nodes[-1].inputs == (y,) and z.shape == (3,)
    assert elementwise(b, lambda x: x * 1.0 + 0.0, x) is x
    with pytest.raises(ShapeError, match="reads none"):
        elementwise(b, lambda x: Const(1.0), x)
    assert elementwise(b, lambda x: x, x, dtype=as_dtype("float64")).dtype.name == "float64"
    graph = b.finish({"z": z})
    values = evaluate(graph, {"x": np.ones(3, np.float32), "y": np.arange(3, dtype=np.float32)})
    np.testing.assert_array_equal(values[z], [0, 2, 4])


def test_flops_count_each_part_once() -> None:
    x = np.ones((4, 5), np.float32)
    op = Map(("((a0 * 2.0) + exp((a0 * 2.0)))", "exp((a0 * 2.0))"))
    assert op.cost([type_of(x)], op.infer([type_of(x)])).flops == 3 * 20


def test_clip_and_cast_derivatives() -> None:
    x = np.array([-2.0, -0.5, 0.5, 2.0])
    check_vjp(lambda b, v: elementwise(b, lambda x: clip(x, -1.0, 1.0), v), x)
    check_vjp(lambda b, v: elementwise(b, lambda x: cast(x * 3.0, "float64"), v), x)
    check_vjp(lambda b, v: elementwise(b, lambda x: where(x > 0, x * x, x * 5.0), v), x)
    check_vjp(lambda b, v: elementwise(b, lambda x: x**3.0, v), x, tol=1e-7)
