"""What is taken for an array, and what is refused with the way out."""

from __future__ import annotations

import warnings
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import foreplan as fp
from foreplan.runtime.session import Session

ONES = np.ones((2, 3), np.float32)


@pytest.fixture(scope="module")
def session() -> Session:
    step = fp.compile(
        fp.models.build("mlp:batch=2,width=4,layers=1,inputs=3,classes=2"), fp.losses.cross_entropy, fp.optim.SGD(0.0)
    )
    return step.bind()


class Like:
    """Something with one attribute: what a library's own array is to NumPy."""

    def __init__(self, name: str, give: Any) -> None:
        self.name, self.give = name, give

    def __getattr__(self, name: str) -> Any:
        if name == self.name:
            return self.give
        raise AttributeError(name)


class WithArray:
    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return ONES


class NeedsDetach:
    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        raise RuntimeError("Use tensor.detach().numpy() instead.")


class OnDevice:
    """As another library's tensor, of which NumPy knows DLPack alone."""

    def __init__(self, array: np.ndarray, where: int = 1) -> None:
        self.array, self.where = array, where

    def __dlpack__(self, **options: Any) -> Any:
        if self.where != 1:
            raise BufferError("it lies on a card")
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (self.where, 0)


class Sparse:
    shape = (2, 3)

    def toarray(self) -> np.ndarray:
        return ONES


def masked(*mask: int) -> np.ma.MaskedArray:
    return np.ma.masked_array(ONES, mask=np.reshape(mask, (2, 3)))


@pytest.mark.parametrize(
    "given",
    [
        ONES.tolist(), ONES.astype(np.float64), ONES.astype(np.float16), ONES.astype(">f4"), ONES.astype(np.longdouble),
        ONES.astype(bool), ONES.astype(np.int8), np.ones((4, 6), np.float32)[::2, ::-2], np.broadcast_to(1.0, (2, 3)),
        memoryview(ONES), np.ma.masked_array(ONES), masked(0, 0, 0, 0, 0, 0), WithArray(),
        OnDevice(ONES), Like("__array_interface__", ONES.__array_interface__),
        Like("__array_struct__", ONES.__array_struct__),
    ],
)  # fmt: skip
def test_what_is_an_array_to_numpy_is_taken(session: Session, given: Any) -> None:
    target = np.zeros(2, np.int64)
    assert session.step({"x": given, "target": target}).loss == session.step({"x": ONES, "target": target}).loss


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (masked(0, 1, 0, 1, 0, 0), r"'x' has 2 masked elements.*\.filled\(value\)"),
        ([np.ma.masked_array(np.ones(3), [1, 0, 0])] * 2, r"masked elements.*\.filled\(value\)"),
        (ONES.astype(object), r"is object: convert it, \.astype\('float32'\)"),
        (np.full((2, 3), "1"), r"is <U1: convert it, \.astype\('float32'\)"),
        (np.full((2, 3), b"1"), r"is \|S1: convert it"),
        (ONES.astype(complex), "is complex128: convert it"),
        (ONES.astype(ml_dtypes.bfloat16), r"is bfloat16: convert it, \.astype\('float32'\)"),
        (np.zeros((2, 3), "M8[s]"), r"is datetime64\[s\]"),
        (np.zeros((2, 3), [("a", "f4"), ("b", "i4")]), r"has fields.*one of them, such as \['a'\]"),
        (np.rec.array(np.zeros((2, 3), [("a", "f4")])), r"has fields.*\['a'\]"),
        (Sparse(), r"is a Sparse, not an array: write \.toarray\(\)"),
        (NeedsDetach(), r"cannot be made an array: Use tensor\.detach\(\)\.numpy\(\)"),
        (OnDevice(ONES, 2), "cannot be made an array: it lies on a card"),
        (None, "'x' must be an array and is None"),
        (lambda: ONES, "is a function, not an array"),
        ({"a": 1}, "is a dict, not an array"),
        ((x for x in ONES), "is a generator, not an array"),
        ({1, 2}, "is a set, not an array"),
        ("abc", "'x' must have the shape"),
        ([[1.0, 2.0], [3.0]], "cannot be made an array"),
        ([[10**400] * 3] * 2, "is object: convert it"),
        (np.ones((3, 2)), "must have the shape"),
    ],
)
def test_what_is_none_is_refused_and_nothing_changes(session: Session, given: Any, message: str) -> None:
    with pytest.raises(fp.InputError, match=message):
        session.step({"x": given, "target": np.zeros(2, np.int64)})
    with pytest.raises(fp.InputError):
        session.parameters[next(iter(session.parameters))] = given
    assert session.step({"x": ONES, "target": np.zeros(2, np.int64)}).loss


LARGEST = {dtype: float(ml_dtypes.finfo(dtype).max) for dtype in ("float16", "bfloat16", "float32")}


@pytest.mark.parametrize("dtype", LARGEST)
@pytest.mark.parametrize("count", [1, 100])  # few numbers are checked in another way than many
@pytest.mark.parametrize("how", ["warnings", "errors"])
def test_numbers_that_would_become_infinite_are_refused(dtype: str, count: int, how: str) -> None:
    session = fp.compile(fp.trace(lambda x: -x, fp.spec((count,), dtype))).bind()
    largest, least = LARGEST[dtype], float(ml_dtypes.finfo(dtype).smallest_subnormal)
    ulp = largest * float(ml_dtypes.finfo(dtype).epsneg)  # from the largest number to the one below it
    half = largest + ulp * (0.5 - 2.0**-20)  # of what is rounded to the largest number, nearly the last one
    for number in (largest, -largest, half, -half, np.inf, -np.inf, np.nan, 0.0, least, least / 4):
        given = np.full(count, 0.5)
        given[-1] = number
        with warnings.catch_warnings(), np.errstate(all="warn" if how == "warnings" else "raise"):
            warnings.simplefilter("error")
            found = session.step({"x": given}).outputs["output"][-1].astype(np.float64)
        with np.errstate(all="ignore"):
            np.testing.assert_array_equal(found, -np.asarray(number).astype(dtype).astype(np.float64))
    for number in (largest + ulp, -largest - ulp, 1e300, -1e300):
        given[-1] = number
        with pytest.raises(
            fp.InputError, match=rf"'x' holds .* at \[{count - 1}\], and the largest number of {dtype} is"
        ):
            session.step({"x": given})


def test_narrower_numbers_are_taken_without_a_word() -> None:
    session = fp.compile(fp.trace(lambda x: -x, fp.spec((100,), "float64"))).bind()
    with warnings.catch_warnings(), np.errstate(all="raise"):
        warnings.simplefilter("error")
        for dtype in ("float16", "float32", "int64", "uint8", "bool"):
            assert (session.step({"x": np.ones(100, dtype)}).outputs["output"] == -1).all()


def test_whole_numbers_that_would_become_infinite_are_refused() -> None:
    session = fp.compile(fp.trace(lambda x: -x, fp.spec((2,), "float16"))).bind()
    assert session.step({"x": np.array([65519, -65519])}).outputs["output"].tolist() == [-65504.0, 65504.0]
    with pytest.raises(fp.InputError, match="'x' holds 65520"):
        session.step({"x": np.array([0, 65520])})


@pytest.mark.parametrize(
    "given", [np.nan, np.inf, -np.inf, -1.0, -1e-45, 1e39, 10**39, True, np.True_, "0.1", None, [0.1]]
)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_learning_rate_is_a_number_of_at_least_0(given: Any, accumulate: int) -> None:
    model = fp.models.build("mlp:batch=2,width=4,layers=1,inputs=3,classes=2")
    step = fp.compile(model, fp.losses.cross_entropy, fp.optim.SGD(0.1), accumulate=accumulate)
    session, leading = step.bind(), (accumulate,) * (accumulate > 1)
    batch = {"x": np.broadcast_to(ONES, (*leading, 2, 3)), "target": np.zeros((*leading, 2), np.int64)}
    before = {name: array.copy() for name, array in session.parameters.items()}
    with pytest.raises(fp.InputError, match="'learning_rate'"):
        session.step(batch | {"learning_rate": given})
    for name, array in session.parameters.items():
        np.testing.assert_array_equal(array, before[name])
    for rate in (0, 0.0, 1, np.float32(0.1), np.float64(1e-3), np.array(0.5)):
        session.step(batch | {"learning_rate": rate})


def test_a_model_may_have_an_input_of_that_name() -> None:
    graph = fp.trace(lambda learning_rate: learning_rate * 2.0, fp.spec(()))
    session = fp.compile(graph).bind()
    assert session.step({"learning_rate": np.float32(-1.0)}).outputs["output"] == -2.0
