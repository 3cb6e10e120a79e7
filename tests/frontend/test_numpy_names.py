"""Every public function of NumPy on traced tensors: equal to NumPy, or refused with an error that says why."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from foreplan.base.errors import ForeplanError
from foreplan.frontend import spec, trace
from foreplan.frontend.tracing.tensor import Tensor
from foreplan.graph import GraphBuilder
from foreplan.ops.reduce import reduce
from foreplan.ops.scan import cumprod
from tests.frontend.judged import close, run
from tests.ops.check import check_vjp, evaluate
from tests.oracle.peers import jnp, pulled
from tests.profile import pick

# Functions that take no array, or that change NumPy itself or print.
NOT_CALLED = {"test", "info", "show_config", "show_runtime", "setbufsize", "seterr", "seterrcall", "set_printoptions"}
# NumPy's undefined contents; and functions that ask for the bytes or the class of their argument, past its dispatch.
NOT_CALLED |= {"empty_like", "frombuffer", "bmat"}
NOT_CALLED |= {"save", "savez", "savez_compressed", "savetxt", "fromfile", "tofile", "getbufsize", "printoptions"}
# A gradient that JAX gives in another way, by choice of a subgradient, or where NumPy's order is not JAX's.
OTHER_GRADIENT = {"around", "fix", "imag", "empty_like"}
MODULES = {"np": np, "np.linalg": np.linalg, "np.fft": np.fft}


def names() -> list[str]:
    """Every public function and ufunc, by its full name."""
    found = []
    for prefix, module in MODULES.items():
        for name in sorted(dir(module)):
            entry = getattr(module, name)
            public = not name.startswith("_") and callable(entry) and not isinstance(entry, type)
            if public and name not in NOT_CALLED:
                found.append(f"{prefix}.{name}")
    return found


def function_named(name: str) -> Callable[..., Any]:
    prefix, _, last = name.rpartition(".")
    found: Callable[..., Any] = getattr(MODULES[prefix], last)
    return found


def drawn(rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {
        "vector": rng.standard_normal(5).astype(np.float32),
        "other": rng.standard_normal(5).astype(np.float32),
        "matrix": rng.standard_normal((4, 4)).astype(np.float32),
        "wide": rng.uniform(0.1, 0.9, (3, 4)).astype(np.float32),
        "cube": rng.uniform(0.1, 0.9, (2, 4, 3)).astype(np.float32),
        "threes": rng.standard_normal((2, 3)).astype(np.float32),
        "holes": np.where(rng.random((3, 4)) < 0.3, np.nan, rng.standard_normal((3, 4))).astype(np.float32),
        "whole": rng.integers(0, 3, (2, 3)),
        "flags": rng.random((3, 4)) < 0.5,
    }


# The ways to call a function that are tried on each, "@x" being the drawn array x. The first that NumPy takes are used.
CALLS: tuple[tuple[Any, ...], ...] = (
    (["@vector", "@other"],), ([["@wide"], ["@wide"]],), ("@matrix", 2),
    ("@vector",), ("@matrix",), ("@wide",), ("@cube",), ("@holes",), ("@whole",), ("@flags",),
    ("@vector", "@other"), ("@matrix", "@vector"), ("@vector", "@matrix"), ("@matrix", "@matrix"),
    ("@threes", "@threes"), ("@whole", "@whole"), ("@cube", 0), ("@cube", 1), ("@wide", 2), ("@wide", (1, 0)),
    ("@cube", 1, 2), ("@wide", 0.25), ("@wide", 0.7, 1), ("@wide", 1, 2.5, 0), ("@wide", [1, 2], 1),
    ("@whole", ["@threes", 2.0, "@threes"]),
    ([("@flags")], ["@wide"]), ("@flags", "@wide", "@holes"), ("@wide", "@flags", 0.5), ("@vector", 2, "@other"),
    (0.5, "@vector"), ("@vector", "int64"), ("@vector", [0.0, 1.0], [1.0, 3.0]), ("ij,kj", "@wide", "@wide"),
    ("...i,...i->...", "@cube", "@cube"), ("...ii->...i", "@matrix"), ("ii", "@matrix"), ("@cube", (2, 6, 2)),
)  # fmt: skip
NAMED: dict[str, dict[str, Any]] = {"keepdims": {"keepdims": True}, "axis": {"axis": -1}, "ddof": {"ddof": 1}}


def filled(call: Any, arrays: dict[str, Any]) -> Any:
    """A call with arrays in the place of their names."""
    if isinstance(call, str):
        return arrays[call[1:]] if call.startswith("@") else call
    return type(call)(filled(each, arrays) for each in call) if isinstance(call, tuple | list) else call


def used(call: Any) -> list[str]:
    """The names of a call's arrays."""
    if isinstance(call, str):
        return [call[1:]] if call.startswith("@") else []
    return [name for each in call for name in used(each)] if isinstance(call, tuple | list) else []


def flat(result: Any) -> list[Any]:
    """The parts of a result: a tuple's or a list's."""
    return [each for part in result for each in flat(part)] if isinstance(result, tuple | list) else [result]


def plain(function: Callable[..., Any], call: Any, named: dict[str, Any], arrays: dict[str, Any]) -> Any:
    """NumPy's own result, or None where NumPy refuses."""
    copies = {name: array.copy() for name, array in arrays.items()}
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            result = function(*filled(call, copies), **named)
        except Exception:
            return None
    changed = any(copies[name].tobytes() != array.tobytes() for name, array in arrays.items())
    return np.nan if changed and result is None else result


def traced(function: Callable[..., Any], call: Any, named: dict[str, Any], arrays: dict[str, Any]) -> list[Any]:
    """The parts of the traced function's result, computed.

    Raises:
        ForeplanError: it is refused.
    """
    kept: list[Any] = []
    given = sorted(set(used(call)))

    def body(*tensors: Any) -> Any:
        kept[:] = flat(function(*filled(call, dict(zip(given, tensors))), **named))
        return {"input": tensors[0] + 0} | {f"y{i}": part for i, part in enumerate(kept) if isinstance(part, Tensor)}

    graph = trace(body, *(spec(arrays[name].shape, arrays[name].dtype) for name in given))
    values = evaluate(graph, {value.name: arrays[name] for value, name in zip(graph.inputs, given)}, hard=False)
    computed = {name: values[value] for name, value in graph.outputs.items()}
    return [computed[f"y{i}"] if isinstance(part, Tensor) else part for i, part in enumerate(kept)]


def tries(
    name: str, seed: int, most: int = pick(2, 4, 40)
) -> Iterator[tuple[Any, dict[str, Any], dict[str, Any], Any]]:
    """(call, keyword arguments, arrays, NumPy's result) of the ways in which NumPy takes a function."""
    arrays, function = drawn(np.random.default_rng(seed)), function_named(name)
    for call in CALLS:
        result = plain(function, call, {}, arrays) if used(call) else None
        if result is None:
            continue
        yield call, {}, arrays, result
        if len(call) == 1:
            for named in NAMED.values():
                result = plain(function, call, named, arrays)
                if result is not None:
                    yield call, named, arrays, result
        most -= 1
        if not most:
            return


@pytest.mark.parametrize("name", names())
def test_a_name_of_numpy_is_equal_or_refused_with_a_reason(name: str) -> None:
    function = function_named(name)
    for call, named, arrays, expected in tries(name, 1):
        what = f"{name}{call}{named or ''}"
        try:
            got = traced(function, call, named, arrays)
        except ForeplanError as error:
            told = str(error)
            assert re.match(r"test_numpy_names\.py:\d+: ", told), f"{what}: {told}"
            assert len(told) > 50, f"{what}: {told}"
            continue
        parts = flat(expected)
        assert len(got) == len(parts), what
        for ours, theirs in zip(got, parts):
            if isinstance(theirs, np.ndarray | np.generic | float | int) and np.asarray(theirs).dtype.kind != "U":
                assert np.shape(ours) == np.shape(theirs), what
                # A number takes the element type of the tensors it meets.
                if all(isinstance(part, str) for part in call):
                    assert np.asarray(ours).dtype.kind == np.asarray(theirs).dtype.kind, what
                # NumPy computes functions of flags and bytes in float16.
                rtol, atol = (1e-3, 1e-3) if np.asarray(theirs).dtype == np.float16 else (2e-5, 2e-6)
                np.testing.assert_allclose(
                    np.asarray(ours, np.float64), np.asarray(theirs, np.float64), rtol, atol, err_msg=what
                )
            else:
                assert ours == theirs, what


def test_arguments_by_place_mean_what_they_mean_to_numpy() -> None:
    """Traced forms lack parameters that NumPy has between others."""
    x, y = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
    for function, further in (
        (np.max, (1, None, True)),
        (np.prod, (1, np.float64, None, True)),
        (np.std, (1, None, None, 1, True)),
        (np.linspace, (y, 5, True, False, None, 1)),
        (np.percentile, (30, 1, None, False, "linear", True)),
        (np.cov, (y, False, True)),
        (np.take, ([2, 0], 1, None, "raise")),
    ):
        expected = function(x, *further)
        (found,) = traced(function, ("@x", *further), {}, {"x": x})
        np.testing.assert_allclose(found, expected, 2e-5, 2e-6, err_msg=function.__name__)
    with pytest.raises(ForeplanError, match=r"np\.max"):
        traced(np.max, ("@x", 0, None, False, 3.0), {}, {"x": x})


TRACED = """
np.abs np.add np.all np.allclose np.amax np.amin np.angle np.any np.append np.around np.array_equal np.array_split
np.atleast_1d np.atleast_2d np.atleast_3d np.average np.block np.cbrt np.column_stack np.concatenate np.conj
np.convolve np.copysign np.corrcoef np.correlate np.cov np.cross np.cumprod np.cumsum np.cumulative_prod
np.cumulative_sum np.delete np.diag np.diagflat np.diagonal np.diff np.divmod np.dsplit np.dstack np.ediff1d np.einsum
np.empty_like np.fix np.fliplr np.flipud np.fmax np.fmin np.hsplit np.imag np.insert np.iscomplex np.isclose
np.isneginf np.isposinf np.isreal np.kron np.linspace np.logaddexp2 np.matvec np.median np.meshgrid np.modf
np.nan_to_num np.nanargmax np.nanargmin np.nancumprod np.nancumsum np.nanmax np.nanmean np.nanmin np.nanprod np.nanstd
np.nansum np.nanvar np.percentile np.polyval np.prod np.ptp np.quantile np.real np.resize np.result_type np.rollaxis
np.rot90 np.select np.signbit np.sinc np.trace np.trapezoid np.tril_indices_from np.unstack np.unwrap np.vander np.vdot
np.vecdot np.vecmat np.vsplit np.linalg.cross np.linalg.diagonal np.linalg.matmul np.linalg.matrix_norm
np.linalg.matrix_power np.linalg.multi_dot np.linalg.norm np.linalg.outer np.linalg.tensordot np.linalg.trace
np.linalg.vecdot np.linalg.vector_norm np.fft.fftshift np.fft.ifftshift
"""


@pytest.mark.parametrize(("number", "name"), list(enumerate(TRACED.split())))
def test_a_traced_name_is_traced(number: int, name: str) -> None:
    """In some way in which NumPy takes it. The gradient is JAX's there, where JAX has the function."""
    judged = number % pick(8, 4, 1) == 0 or name in ("np.cumprod", "np.prod", "np.diag", "np.diagonal", "np.median")
    function = function_named(name)
    prefix, _, last = name.rpartition(".")
    module = {"np": jnp, "np.linalg": jnp.linalg, "np.fft": jnp.fft}[prefix]
    done = 0
    for call, named, arrays, expected in tries(name, 2):
        try:
            traced(function, call, named, arrays)
        except ForeplanError:
            continue
        done += 1
        (first, *more) = flat(expected)
        given = sorted(set(used(call)))
        smooth = np.asarray(first).dtype.kind == "f" and any(arrays[each].dtype.kind == "f" for each in given)
        if done > 1 or more or not smooth or not judged or last in OTHER_GRADIENT or not hasattr(module, last):
            continue
        ours = run(
            lambda *xs, c=call, g=given, n=named: flat(function(*filled(c, dict(zip(g, xs))), **n))[0] * 1.0,
            *(arrays[each] for each in given),
        )
        theirs = getattr(module, last)
        try:
            _, cotangents = pulled(
                lambda *xs, c=call, g=given, n=named, f=theirs: flat(f(*filled(c, dict(zip(g, xs))), **n))[0],
                ours.cotangent,
                *(arrays[each] for each in given),
            )
        except TypeError:  # JAX takes fewer kinds of arguments
            continue
        for got, want in zip(ours.inputs, cotangents):
            if got is not None:
                close(got, want, f"the gradient of {name}{call}", 1e-4)
    assert done, name


@pytest.mark.parametrize("zeros", range(3))
def test_the_gradient_of_products_with_zeros(zeros: int) -> None:
    rng = np.random.default_rng(zeros)
    x = rng.uniform(0.5, 2.0, (2, 2, 4))
    for row in x.reshape(-1, 4):
        row[rng.choice(4, zeros, replace=False)] = 0.0
    check_vjp(lambda b, x: reduce(b, "prod", x, 2), x)
    check_vjp(lambda b, x: reduce(b, "prod", x, (0, 2), keepdims=True), x)
    for turned in (False, True):
        check_vjp(lambda b, x, t=turned: cumprod(b, x, -1, exclusive=t, reverse=t), x, tol=1e-5)


def test_cumulative_products_of_other_forms() -> None:
    x = np.random.default_rng(0).standard_normal((3, 6))
    for n in (0, 1, 2, 5, 6):
        part = x[:, :n]
        for reverse in (False, True):
            turned = part[:, ::-1] if reverse else part
            whole = np.cumprod(turned, 1)
            before = np.concatenate([np.ones((3, 1)), whole], 1)[:, :n]
            for exclusive, expected in ((False, whole), (True, before)):
                b = GraphBuilder()
                value = b.input("x", spec(part.shape, "float64").type)
                graph = b.finish({"y": cumprod(b, value, 1, exclusive, reverse)})
                (got,) = [evaluate(graph, {"x": part})[v] for v in graph.outputs.values()]
                np.testing.assert_allclose(got, expected[:, ::-1] if reverse else expected, 1e-12)


EINSUMS = (
    ("...ij,...jk->...ik", (2, 1, 3, 4), (5, 4, 2)), ("...i->...", (3, 4)), ("i...,i...", (3, 4), (3, 4)),
    ("ii->i", (4, 4)), ("ii", (4, 4)), ("...ii->...", (2, 3, 3)), ("iji->j", (3, 2, 3)), ("iij,j->i", (3, 3, 2), (2,)),
    ("b...,...->b...", (2, 3, 4), (4,)), ("...a,...b", (2, 3), (2, 4)), ("i,...", (3,), ()),
    ("a...b->b...a", (2, 3, 4)),
)  # fmt: skip


@pytest.mark.parametrize("case", EINSUMS, ids=lambda case: case[0])
def test_einsum_with_ellipses_and_diagonals(case: tuple[Any, ...]) -> None:
    subscripts, *shapes = case
    rng = np.random.default_rng(len(subscripts))
    arrays = [np.asarray(rng.standard_normal(shape), np.float32) for shape in shapes]
    found = run(lambda *xs: np.einsum(subscripts, *xs) * 1.0, *arrays)
    expected, cotangents = pulled(lambda *xs: jnp.einsum(subscripts, *xs), found.cotangent, *arrays)
    close(found.output, expected)
    for got, want in zip(found.inputs, cotangents):
        close(got, want)


X = spec((3, 4))
REFUSED = {
    "split": (lambda x: np.split(x, 3, 1), "3 equal parts"),
    "einsum letters": (lambda x: np.einsum("ij,->i", x), "letters"),
    "einsum ranks": (lambda x: np.einsum("ijk->i", x), "3 letters"),
    "einsum output": (lambda x: np.einsum("...i->i", x), "ellipsis"),
    "einsum twice": (lambda x: np.einsum("ij->ii", x), "twice"),
    "einsum diagonal": (lambda x: np.einsum("ii->i", x), "both 3 and 4"),
    "mask": (lambda x: x[x > 0], r"np\.where\(mask, x, 0\)"),
    "copyto": (lambda x: np.copyto(x, 0.0), "never change"),
    "unique": (lambda x: np.unique(x), "depends on data"),
    "fft": (lambda x: np.fft.fft(x), "complex"),
    "svd": (lambda x: np.linalg.svd(x), "no gradient"),
    "apply": (lambda x: np.apply_along_axis(np.sum, 0, x), "unroll"),
    "partition": (lambda x: np.partition(x, 1), r"np\.sort"),
    "quantile": (lambda x: np.quantile(x, x), "must be a number"),
    "quantile outside": (lambda x: np.percentile(x, 101), r"\[0, 100\]"),
    "a method": (lambda x: x.nonzero(), r"x\.nonzero"),
    "choose": (lambda x: np.choose(x.astype(int), [x, x]), "mode='clip'"),
    "norm": (lambda x: np.linalg.norm(x, "nuc"), "singular values"),
    "power": (lambda x: np.linalg.matrix_power(x, 2), "square"),
    "cross": (lambda x: np.cross(x, x), "three elements"),
    "a strange argument": (lambda x: np.reshape(x, "abc"), "cannot be traced"),
    "insert": (lambda x: np.insert(x, [1, 2], 0.0), "one index"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_says_why(name: str) -> None:
    call, told = REFUSED[name]
    with pytest.raises(ForeplanError, match=told):
        trace(call, X)


def test_numbers_of_numpy_are_numbers_of_parts() -> None:
    x = np.arange(12, dtype=np.float32).reshape(6, 2)
    found = run(lambda x: np.concatenate(np.split(x, np.int64(2))[::-1]) * 1.0, x)
    close(found.output, np.concatenate(np.split(x, 2)[::-1]))
