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


@pytest.mark.parametrize("how", ["warnings", "errors"])
def test_numbers_beyond_float32_become_infinite_whatever_numpy_is_told_to_do_then(session: Session, how: str) -> None:
    given = {"x": np.full((2, 3), 1e300), "target": np.zeros(2, np.int64)}
    with warnings.catch_warnings(), np.errstate(all="warn" if how == "warnings" else "raise"):
        warnings.simplefilter("error")
        assert np.isnan(session.step(given).loss)
        session.step({"x": ONES, "target": given["target"]})
