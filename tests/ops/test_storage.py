"""Elements that are only stored, beside ml_dtypes: numbers from codes and codes from numbers, on every engine."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import foreplan as fp
from foreplan.base.errors import ShapeError
from foreplan.graph import GraphBuilder, TensorType, Value, as_dtype
from foreplan.graph.types import DTYPES
from foreplan.ops.map import elementwise
from foreplan.ops.storage import BITS, Bitcast, bitcast, decoded, encoded, packed_extent, unpacked
from tests.gpu.compiled import needs_gcc
from tests.gpu.test_training import on_the_cpu
from tests.ops.check import built, refused, run_op
from tests.profile import pick

STORED = [name for name, dtype in DTYPES.items() if dtype.is_storage]
FLOATS = [name for name in STORED if name.startswith("float") and "e8m0" not in name]
INTEGERS = [name for name in STORED if "int" in name]


def numbers(seed: int) -> np.ndarray:
    """Float32 of all sizes, ties and neighbours of what float8 holds among them."""
    rng = np.random.default_rng(seed)
    drawn = rng.standard_normal(400) * 10.0 ** rng.integers(-7, 7, 400)
    held = [np.arange(256, dtype=np.uint8).view(as_dtype(name).numpy).astype(np.float32) for name in FLOATS[:4]]
    exact = np.unique(np.concatenate(held)[np.isfinite(np.concatenate(held))])
    ties = (exact[1:] + exact[:-1]) / 2
    near = np.nextafter(ties, rng.choice([-np.inf, np.inf], ties.size).astype(np.float32))
    return np.concatenate([drawn, exact, ties, near, [0.0, -0.0, np.inf, -np.inf, np.nan]]).astype(np.float32)


def bits(x: np.ndarray) -> np.ndarray:
    return x.view(np.uint8)


@pytest.mark.parametrize("name", STORED)
def test_every_code_has_its_number(name: str) -> None:
    codes = np.arange(1 << BITS.get(name, 8), dtype=np.uint8).view(as_dtype(name).numpy)
    (got,) = built(decoded, codes)
    np.testing.assert_array_equal(got, codes.astype(np.int8 if name in INTEGERS else np.float32))


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_numbers_are_rounded_to_the_nearest(name: str, dtype: str) -> None:
    with np.errstate(all="ignore"):
        x = numbers(0).astype(as_dtype(dtype).numpy)
        expected = x.astype(np.float64).astype(as_dtype(name).numpy)
    (got,) = built(lambda b, x: encoded(b, x, as_dtype(name), saturate=False), x)
    nan = np.isnan(expected.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(got.astype(np.float32)), nan)
    np.testing.assert_array_equal(bits(got)[~nan], bits(expected)[~nan])


@pytest.mark.parametrize("name", FLOATS)
def test_large_numbers_saturate(name: str) -> None:
    x, dtype = numbers(1), as_dtype(name).numpy
    most = np.float32(ml_dtypes.finfo(dtype).max)
    (got,) = built(lambda b, x: encoded(b, x, as_dtype(name)), x)
    finite = ~np.isnan(x)
    np.testing.assert_array_equal(bits(got)[finite], bits(np.clip(x, -most, most).astype(dtype))[finite])
    if name != "float4_e2m1fn":
        assert np.isnan(got.astype(np.float32)[~finite]).all()


@pytest.mark.parametrize("rounding", ["up", "down", "nearest"])
def test_powers_of_two_are_rounded_as_asked(rounding: str) -> None:
    rng = np.random.default_rng(2)
    fraction, power = rng.choice([1.0, 1.25, 1.4375, 1.5, 1.75], 300), rng.integers(-120, 120, 300)
    x = (fraction * 2.0**power).astype(np.float32)
    up = {"up": fraction > 1, "down": fraction < 0, "nearest": fraction >= 1.5}[rounding]
    (got,) = built(lambda b, x: encoded(b, x, as_dtype("float8_e8m0fnu"), rounding=rounding), x)
    np.testing.assert_array_equal(got.astype(np.float32), 2.0 ** (power + up).astype(np.float32))
    (ends,) = built(
        lambda b, x: encoded(b, x, as_dtype("float8_e8m0fnu")),
        np.array([0, 2.0**-127, 3e38, np.inf, np.nan], np.float32),
    )
    assert bits(ends).tolist() == [0, 0, 254, 255, 255]


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_keep_their_lowest_bits(name: str) -> None:
    x = np.arange(-40, 40)
    for given in (x.astype(np.int32), x.astype(np.float32)):
        (got,) = built(lambda b, x: encoded(b, x, as_dtype(name)), given)
        np.testing.assert_array_equal(
            got.astype(np.int8), x.astype(np.int8).astype(as_dtype(name).numpy).astype(np.int8)
        )


@pytest.mark.parametrize("name", BITS)
@pytest.mark.parametrize("shape", [(3, 5), (1,), (4, 4), (2, 0), (7,)])
def test_packed_codes_are_taken_apart(name: str, shape: tuple[int, ...]) -> None:
    size, many = int(np.prod(shape)), BITS[name]
    codes = np.random.default_rng(3).integers(0, 1 << many, size).astype(np.uint8)
    spread = np.unpackbits(codes[:, None], axis=1, bitorder="little", count=many) if size else codes
    packed = np.packbits(spread.reshape(-1), bitorder="little")
    assert packed.size == packed_extent(as_dtype(name), size)
    (got,) = built(lambda b, x: unpacked(b, x, as_dtype(name), shape), packed)
    np.testing.assert_array_equal(bits(got), codes.reshape(shape))


def compiled(target: str) -> fp.Compiled:
    """Numbers to codes, and codes to numbers."""
    b = GraphBuilder("stored")
    x = b.input("x", TensorType(as_dtype("float32"), (numbers(4).size,)))
    outputs: dict[str, Value] = {}
    for name in pick(STORED[2:3], ["float8_e4m3fnuz", "float8_e8m0fnu", "int4"], STORED):
        number = elementwise(b, lambda x: x * 1.0 + 0.0, x) if name not in INTEGERS else x
        codes = encoded(b, number, as_dtype(name))
        outputs |= {name: codes, f"{name}.numbers": decoded(b, codes)}
    return fp.compile(b.finish(outputs), target=target)


@needs_gcc
def test_engines_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    x = numbers(4)
    x = x[np.argsort(np.abs(x) > 100)]  # integers beyond a type's range differ
    x[np.abs(x) > 100] = 5.0
    sessions = [compiled("numpy").bind(), compiled("cpu:threads=1").bind()]
    sessions.append(on_the_cpu(monkeypatch, partial(compiled("cuda:h100").bind)))
    first, *others = (session.step({"x": x}).outputs for session in sessions)
    for other in others:
        for name, expected in first.items():
            np.testing.assert_array_equal(other[name].view(np.uint8), expected.view(np.uint8), err_msg=name)


def test_a_plan_file_keeps_what_is_read_as_another_type(tmp_path: Path) -> None:
    step = compiled("numpy")
    step.save(tmp_path / "codes.plan")
    x, again = numbers(4), fp.load_plan(tmp_path / "codes.plan")
    for name, expected in step.bind().step({"x": x}).outputs.items():
        got = again.bind().step({"x": x}).outputs[name]
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(bits(got), bits(expected), err_msg=name)


def test_stored_elements_are_not_computed_with() -> None:
    b = GraphBuilder("wrong")
    x = b.input("x", TensorType(as_dtype("int4"), (3,)))
    with pytest.raises(ShapeError, match="elements are only stored"):
        elementwise(b, lambda x: x + x, x)


@pytest.mark.parametrize("old, new", [("float32", "int32"), ("uint16", "bfloat16"), ("float64", "uint64")])
def test_bits_are_read_as_another_type(old: str, new: str) -> None:
    raw = np.random.default_rng(5).integers(0, 256, (3, 5 * as_dtype(old).itemsize), np.uint8)
    x = raw.view(as_dtype(old).numpy)
    (got,) = run_op(Bitcast(as_dtype(new)), x)
    assert got.dtype == as_dtype(new).numpy
    np.testing.assert_array_equal(got.view(np.uint8), raw)


def test_bytes_of_another_size_are_refused() -> None:
    refused("are not those of", Bitcast(as_dtype("int64")), "float32[2]")
    refused("are not those of", Bitcast(as_dtype("uint8")), "bool[2]")


def test_the_same_type_is_the_same_value() -> None:
    b = GraphBuilder("same")
    x = b.input("x", TensorType(as_dtype("int4"), (3,)))
    assert bitcast(b, x, x.dtype) is x is encoded(b, x, x.dtype)
