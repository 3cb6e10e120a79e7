"""What compiled functions do is what Python does with the same source."""

# ruff: noqa: RET503

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import pytest

from foreplan import jit

LIMIT = 7
TABLE = (5, -2, 9)
SEED = np.uint64(0x9E3779B97F4A7C15)


class Inner(NamedTuple):
    values: np.ndarray
    scale: int


class Outer(NamedTuple):
    name: np.ndarray
    inner: Inner
    rate: float
    nothing: None
    flags: np.ndarray


def record() -> Outer:
    return Outer(np.arange(6), Inner(np.array([4, -3, 8, 0, 1, 2]), 3), 0.5, None, np.array([True, False, True]))


def same(function: Any, *arguments: Any) -> Any:
    """What a function gives, compiled; both ways leave the same results and the same contents of arrays."""
    ours, theirs = (tuple(copied(each) for each in arguments) for _ in range(2))
    with np.errstate(over="ignore"):
        wanted = function.source.function(*theirs)
    found = function(*ours)
    assert found == wanted or (found != found and wanted != wanted), (found, wanted)
    for mine, other in zip(flat(ours), flat(theirs)):
        np.testing.assert_array_equal(mine, other)
    return found


def copied(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        whole = np.zeros([2 * extent for extent in value.shape], value.dtype)  # strided arrays stay strided
        part = whole[tuple(slice(None, None, 2) for _ in value.shape)] if not value.flags.c_contiguous else value.copy()
        part[...] = value
        return part
    if isinstance(value, tuple):
        items = [copied(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value


def flat(value: Any) -> list[np.ndarray]:
    if isinstance(value, np.ndarray):
        return [value]
    return [array for item in value for array in flat(item)] if isinstance(value, tuple) else []


@jit.compiled
def arithmetic(x, y):  # type: ignore[no-untyped-def]
    return x + y, x - y, x * y, x // y, x % y, x / y, -x, ~x, x & y, x | y, x ^ y, abs(x)


@jit.compiled
def by_constants(x):  # type: ignore[no-untyped-def]
    return x // 8, x % 8, x // 3, x % 3, x // -5, x % -5, x // LIMIT, 100 // LIMIT, -7 // 2, x << 3, x >> 2


@pytest.mark.parametrize("x", [0, 1, 7, -1, -8, -9, 123456789012])
@pytest.mark.parametrize("y", [1, -1, 3, -4, 1000])
def test_integers(x: int, y: int) -> None:
    same(arithmetic, x, y)
    same(by_constants, x)


@jit.compiled
def random_bits(seed, n):  # type: ignore[no-untyped-def]
    seed ^= seed << np.uint64(13)
    seed ^= seed >> np.uint64(7)
    seed ^= seed << np.uint64(17)
    return seed, np.int64((seed >> np.uint64(33)) % np.uint64(n)), seed * np.uint64(0xBF58476D1CE4E5B9)


def test_integers_without_a_sign_wrap_around() -> None:
    seed = SEED
    for _ in range(20):
        seed, _, _ = same(random_bits, seed, 37)


@jit.compiled
def floats(x, y):  # type: ignore[no-untyped-def]
    if x < 0.0 or y <= 0.0:
        return -1.0, 0.0, 0.0
    return math.sqrt(x) * y + 1, max(x, y, 2.5), min(x, 1) / y


def test_floats() -> None:
    for x in (0.0, 0.25, 3.0, -2.0):
        same(floats, x, 4.0)
        same(floats, x, -1.0)


@jit.compiled
def single(x):  # type: ignore[no-untyped-def]
    total = np.float32(0)
    for i in range(len(x)):
        total += x[i] * 3 + 0.1
    return np.float64(total), np.float32(x[0]).view(np.int32)


def test_literals_take_the_type_of_what_they_meet() -> None:
    same(single, np.array([0.1, 2.7, -1e6], np.float32))


@jit.compiled
def branches(x, y):  # type: ignore[no-untyped-def]
    kind = 0
    if 0 <= x < y < 10:
        kind = 1
    elif not x or (y > 3 and x != y):
        kind = 2
    best = x if x > y else y
    low, high = (x, y) if x < y else (y, x)
    odd = x % 2 == 1
    odd |= y == 4
    return kind, best, low, high, odd, 1 if odd and kind else TABLE[kind]


def test_branches() -> None:
    for x in range(-2, 6):
        for y in range(-2, 12, 3):
            same(branches, x, y)


@jit.compiled
def guarded(x, at):  # type: ignore[no-untyped-def]
    return (0 <= at < x.size and x[at] > 2) or at == -5


def test_no_more_is_computed_than_what_decides() -> None:
    for at in (-5, -1, 0, 3, 10**12):
        same(guarded, np.array([1, 2, 3, 4]), at)


@jit.compiled
def loops(n, step):  # type: ignore[no-untyped-def]
    total, seen = 0, 0
    for i in range(n):
        if i == 3:
            continue
        for j in range(n, -2, -2):
            if j > 6:
                continue
            if i * j > 40:
                break
            total += i * j
    i = 0
    for i in range(n * step, 0, step):
        total -= i
    while True:
        seen += 1
        if seen > LIMIT:
            break
        while seen % 3:
            seen += 1
            total += 100
    for _ in range(0):
        return -1, i
    return total, i


def test_loops() -> None:
    for n in range(9):
        same(loops, n, -1)
        same(loops, -n, 2)


@jit.compiled
def parts(r, twice):  # type: ignore[no-untyped-def]
    inner, count = r.inner, 0
    values = inner.values
    for v in values:
        count += v
    for i in range(len(r.flags)):
        if r.flags[i]:
            r.name[i], r.name[i + 3] = r.name[i + 3], r.name[i]
        r.flags[i] = not r.flags[i]
    if r.nothing is None:
        count += 1000
    if twice is not None:
        count *= twice
    return count * inner.scale, r.rate * values.size, r[1].values[2]


def test_records_and_none() -> None:
    same(parts, record(), None)
    same(parts, record(), 2)
    assert len(parts._entries) == 2


@jit.compiled
def slices(x, low, high):  # type: ignore[no-untyped-def]
    some, behind = x[low:high], x[high:]
    for i in range(len(some)):
        some[i] += 1
    behind[:] = 9
    x[:1] = -4
    return some.size, len(behind), x[low:].size, x[: high + 100].max(), x.min()


@pytest.mark.parametrize("apart", [1, 2], ids=["dense", "strided"])
def test_slices(apart: int) -> None:
    for low, high in ((0, 4), (2, 3), (3, 2), (5, 20), (30, 40)):
        same(slices, np.arange(20)[::apart], low, high)


@jit.compiled
def rows(x, total):  # type: ignore[no-untyped-def]
    count, width = x.shape
    for i in range(count):
        row = x[i]
        for j in range(width):
            total[i] += row[j] * x[i, j]
        x[i, 0] = total[i]
        part = x[i, 1:width]
        part[:] = i
    return x.size, x.ndim


@pytest.mark.parametrize("kind", ["dense", "strided", "transposed"])
def test_arrays_of_two_axes(kind: str) -> None:
    x = np.arange(40.0).reshape(5, 8)
    x = {"dense": x, "strided": x[:, ::2], "transposed": x.T}[kind]
    same(rows, x, np.zeros(len(x)))


@jit.compiled
def made(n):  # type: ignore[no-untyped-def]
    total = np.int64(0)
    for k in range(n):
        ones, twos, none = np.ones(k), np.full(k, 2), np.zeros((k, 2), np.int8)
        free = np.empty(k + 1, np.int64)
        free[k] = k
        again = free.copy()
        free[k] = 0
        for i in range(k):
            total += twos[i] + np.int64(ones[i]) + np.int64(none[i, 1])
        total += again[k]
    return total


def test_arrays_that_a_function_makes() -> None:
    for n in (0, 1, 30):
        same(made, n)


@jit.compiled
def sorted_places(keys, out):  # type: ignore[no-untyped-def]
    order = np.argsort(keys, kind="stable")
    for i in range(len(keys)):
        out[i] = order[i]
    return np.argmax(keys), keys.max(), keys.min()


def test_sorting_is_stable() -> None:
    rng = np.random.default_rng(0)
    for count in (1, 2, 15, 16, 17, 33, 64, 65, 1000):
        for keys in (rng.integers(0, 9, count), rng.normal(size=count), np.arange(count)[::-1].copy()):
            same(sorted_places, keys, np.zeros(count, np.int64))


@jit.compiled
def casts(x, f):  # type: ignore[no-untyped-def]
    return (
        np.int64(np.int8(x)), np.uint64(x) >> np.uint64(60), np.int64(np.uint8(x)), int(f), float(x), np.float64(f > 1),
        np.int64(np.int32(x) >> np.int32(3)), bool(x), np.float64(np.float32(f)) == f,
    )  # fmt: skip


def test_conversions() -> None:
    for x in (0, 5, 255, -1, -129):
        same(casts, np.int64(x), 2.75)
        same(casts, np.int64(x), -0.1)


@jit.compiled
def bits(flags, x, narrow):  # type: ignore[no-untyped-def]
    count = 0
    for i in range(len(flags)):
        count += flags[i]
        flags[i] = x[i] > 2
        flags[i] |= x[i] == 0
        narrow[i] = x[i] & 0xFF
        count += narrow[i] == 3
    return count


def test_elements_of_all_types() -> None:
    x = np.arange(6)
    for dtype in (np.uint8, np.int16, np.int32, np.uint32, np.int64, np.float32, np.float64):
        same(bits, np.array([True, False] * 3), x, np.zeros(6, dtype))


@jit.compiled
def compared(x, y):  # type: ignore[no-untyped-def]
    return x == y, x != y, x < y, x <= y, x > y, x >= y


def test_integers_of_any_types_compare() -> None:
    dtypes = (np.uint8, np.int8, np.uint32, np.int32, np.uint64, np.int64)
    for one in dtypes:
        for other in dtypes:
            for x in (0, 3, 127, np.iinfo(one).max, np.iinfo(one).min):
                for y in (0, 3, 100, np.iinfo(other).max, np.iinfo(other).min):
                    wanted = (x == y, x != y, x < y, x <= y, x > y, x >= y)
                    assert compared(one(x), other(y)) == wanted, (one, x, other, y)


@jit.compiled(inline=True)
def first_of(x):  # type: ignore[no-untyped-def]
    if x.dtype == np.float32:
        return np.float64(x[0]) + 0.5
    return x[0]


@jit.compiled
def of_two_types(x, y):  # type: ignore[no-untyped-def]
    return first_of(x), first_of(y)


def test_branches_on_types_are_decided_when_compiled() -> None:
    same(of_two_types, np.arange(3), np.ones(2, np.float32))


@jit.compiled
def seven(x):  # type: ignore[no-untyped-def]
    return x.sum()


@jit.compiled
def mixed(x):  # type: ignore[no-untyped-def]
    found = 0
    found = x * 0.5
    return found + 1


@jit.compiled
def endless(n):  # type: ignore[no-untyped-def]
    if n > 0:
        return 1
    n += 1


@jit.compiled
def escaping(n):  # type: ignore[no-untyped-def]
    return np.zeros(n)


@jit.compiled
def both(x):  # type: ignore[no-untyped-def]
    return np.uint64(1) + x


@jit.compiled
def unknown(x):  # type: ignore[no-untyped-def]
    return x + nowhere  # type: ignore[name-defined]  # noqa: F821


@pytest.mark.parametrize(
    ("function", "argument", "said"),
    [
        (seven, np.arange(3), "a call of sum"),
        (mixed, 1, "found has the type int64, and is given float64"),
        (endless, 1, "the end is reached without a result"),
        (escaping, 1, "an array that ends with this function is returned"),
        (both, 1, "uint64 and int64 do not mix"),
        (unknown, 1, "nowhere is not known"),
        (unknown, "text", "compiled functions take no str"),
        (unknown, 1j, "compiled functions take no complex"),
    ],
)
def test_what_is_not_in_the_language(function: Any, argument: object, said: str) -> None:
    with pytest.raises(TypeError, match=said) as caught:
        function(argument)
    if not said.startswith("compiled functions"):
        line = function.source.function.__code__.co_firstlineno
        where = str(caught.value).split(": in ")[0]
        assert where.startswith(__file__) and 0 < int(where.rpartition(":")[2]) - line < 5


def test_a_wrong_number_of_arguments() -> None:
    with pytest.raises(TypeError, match="mixed takes 1 arguments, and 2 are given"):
        mixed(1, 2)


@jit.compiled
def large(n):  # type: ignore[no-untyped-def]
    return inner_large(n)


@jit.compiled
def inner_large(n):  # type: ignore[no-untyped-def]
    room = np.empty(n, np.int8)
    for i in range(min(n, 3)):
        room[i] = i
    return n + room[0]


def test_no_memory_is_an_error() -> None:
    assert large(10) == 10
    with pytest.raises(MemoryError, match="large has no memory"):
        large(1 << 60)


def test_too_large_integers_are_an_error() -> None:
    with pytest.raises(OverflowError):
        made(1 << 64)
