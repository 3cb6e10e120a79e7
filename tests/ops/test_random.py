"""Random numbers against Random123's known answers, against the documented formulas element by element, and in law."""

from __future__ import annotations

import math

import numpy as np
import pytest

from foreplan.base.errors import ShapeError
from foreplan.graph import Builder, Fill, GraphBuilder, Kind, TensorType, Value, as_dtype
from foreplan.ops.blocks import carve, carve_bytes
from foreplan.ops.random import COUNTERS, STATE, Dropout, Random, dropout, philox4x32, philox_pieces, random
from tests.ops.check import check_vjp, evaluate, run_op, type_of

RNG = np.random.default_rng(0)
SEED, STEP = 0x0123456789ABCDEF, 0xFEDCBA9876543210
AT = np.array([SEED, STEP], np.uint64)

# philox4x32, 10 rounds: (counter, key, result), from kat_vectors of the Random123 library.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words_of(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def generate(counters: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    words = counters.astype(np.uint32)
    pieces = philox_pieces(len(words))
    philox4x32(words, key, carve(np.empty(carve_bytes(*pieces), np.uint8), *pieces))
    return words


def stream_words(count: int, stream: int) -> np.ndarray:
    """The first words of a stream, as the module's docstring defines them."""
    counters = np.zeros((-(-count // 4), 4), np.uint32)
    counters[:, 0] = np.arange(len(counters))
    counters[:, 1], counters[:, 2], counters[:, 3] = stream, STEP & 0xFFFFFFFF, STEP >> 32
    return generate(counters, (SEED & 0xFFFFFFFF, SEED >> 32)).reshape(-1)[:count]


@pytest.mark.parametrize("counter,key,result", KNOWN)
def test_known_answers(counter: str, key: str, result: str) -> None:
    k0, k1 = words_of(key)
    many = np.tile(np.array(words_of(counter), np.uint32), (5, 1))
    assert (generate(many, (k0, k1)) == np.array(words_of(result), np.uint32)).all()


def test_uniform_is_as_documented() -> None:
    words = stream_words(40, 7).astype(np.uint64)
    (x,) = run_op(Random("uniform", (3, 13), "float32", 7), AT)
    np.testing.assert_array_equal(x.reshape(-1), ((words[:39] >> 8) / 2**24).astype(np.float32))
    (x,) = run_op(Random("uniform", (4, 5), "float64", 7), AT)
    np.testing.assert_array_equal(x.reshape(-1), ((words[::2] + (words[1::2] << 32)) >> 11) / 2**53)
    (x,) = run_op(Random("uniform", (1000,), "float32", low=-3.0, high=5.0), AT)
    assert x.min() >= -3 and x.max() < 5 and x.max() - x.min() > 7.9


def test_normal_is_as_documented() -> None:
    words = stream_words(44, 1).astype(np.uint64)
    u, v = words[0::2] / 2**32 + 2.0**-33, words[1::2] / 2**32
    wanted = np.stack([np.sqrt(-2 * np.log(u)) * f(2 * math.pi * v) for f in (np.cos, np.sin)], 1).reshape(-1)
    (x,) = run_op(Random("normal", (43,), "float32", 1), AT)
    np.testing.assert_allclose(x, wanted[:43], rtol=1e-5, atol=1e-6)
    pairs = (words[::2] + (words[1::2] << 32)) >> 11
    u, v = pairs[0::2] / 2**53 + 2.0**-54, pairs[1::2] / 2**53
    wanted = np.stack([np.sqrt(-2 * np.log(u)) * f(2 * math.pi * v) for f in (np.cos, np.sin)], 1).reshape(-1)
    (x,) = run_op(Random("normal", (21,), "float64", 1, mean=2.0, std=3.0), AT)
    np.testing.assert_allclose(x, 2 + 3 * wanted[:21], rtol=1e-12, atol=1e-12)


def test_bernoulli_is_as_documented() -> None:
    words = stream_words(30, 2)
    for p in (0.0, 0.1, 0.9, 1.0):
        for dtype in ("bool", "float32", "uint8"):
            (x,) = run_op(Random("bernoulli", (5, 6), dtype, 2, p=p), AT)
            np.testing.assert_array_equal(x.reshape(-1), words / 2**32 < p)


@pytest.mark.parametrize("distribution", ["uniform", "normal", "bernoulli"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_an_element_depends_on_its_place_alone(distribution: str, dtype: str) -> None:
    long = 4 * COUNTERS * 2 + 5
    (whole,) = run_op(Random(distribution, (long,), dtype), AT)
    for size in (0, 1, 7, 4 * COUNTERS + 1):
        (start,) = run_op(Random(distribution, (size,), dtype), AT)
        np.testing.assert_allclose(start, whole[:size], rtol=1e-6)
    for other in (Random(distribution, (long,), dtype, 1),):
        assert (run_op(other, AT)[0] != whole).mean() > 0.4
    for state in ([SEED, STEP + 1], [SEED + 1, STEP], [SEED, STEP ^ 1 << 63]):
        assert (run_op(Random(distribution, (long,), dtype), np.array(state, np.uint64))[0] != whole).mean() > 0.4


def test_laws() -> None:
    import scipy.stats

    n = 200_000
    for dtype in ("float32", "float64"):
        (x,) = run_op(Random("uniform", (n,), dtype), AT)
        assert scipy.stats.kstest(x, "uniform").pvalue > 1e-3
        (x,) = run_op(Random("normal", (n,), dtype), AT)
        assert scipy.stats.kstest(x, "norm").pvalue > 1e-3
        assert abs(np.corrcoef(x[:-1], x[1:])[0, 1]) < 0.01
    (x,) = run_op(Random("bernoulli", (n,), "bool", p=0.3), AT)
    assert scipy.stats.binomtest(int(x.sum()), n, 0.3).pvalue > 1e-3


def test_half_precision_rounds_float32() -> None:
    (wide,) = run_op(Random("normal", (50,), "float32"), AT)
    (narrow,) = run_op(Random("normal", (50,), "float16"), AT)
    np.testing.assert_array_equal(narrow, wide.astype(np.float16))


class Streams:
    """What a training pass hands to `for_training`."""

    def __init__(self, b: Builder) -> None:
        self.state = b.store("rng", STATE, Kind.STATE, Fill(1))
        self.streams = iter(range(100))

    def update(self, stored: Value, new: Value) -> None:
        raise AssertionError("dropout has no running statistics")

    def random_state(self) -> Value:
        return self.state

    def next_stream(self) -> int:
        return next(self.streams)


def test_dropout_in_inference_is_the_identity() -> None:
    check_vjp(lambda b, x: dropout(b, x, 0.3), RNG.standard_normal((4, 5)))
    b = GraphBuilder()
    x = b.input("x", type_of(np.zeros(3)))
    assert dropout(b, x, 0.0) is x
    dropout(b, x, 0.3)
    assert [node.op for node in b.nodes] == [Dropout(0.3)]


@pytest.mark.parametrize("ratio", [0.0, 0.25, 1.0])
def test_dropout_in_training(ratio: float) -> None:
    x = RNG.standard_normal((100, 50)) + 5
    b = GraphBuilder()
    made = Dropout(ratio).for_training(b, [b.input("x", type_of(x))], Streams(b))
    assert made is not None
    (y,) = made
    found = evaluate(b.finish({"y": y}), {"x": x}, {"rng": AT})[y]
    kept = found != 0
    np.testing.assert_allclose(found[kept], (x / (1 - ratio))[kept] if ratio < 1 else [])
    assert abs(kept.mean() - (1 - ratio)) < 0.02

    def build(b: Builder, x: Value) -> Value:
        made = Dropout(ratio).for_training(b, [x], Streams(b))
        assert made is not None
        return made[0]

    if ratio > 0:
        check_vjp(build, x[:4, :6])


def test_dropout_of_whole_items_in_training() -> None:
    """All elements of an index of the first axis are kept, or none."""
    x = RNG.standard_normal((2000, 3, 2)) + 5

    def build(b: Builder, x: Value) -> Value:
        made = Dropout(0.25, whole_items=True).for_training(b, [x], Streams(b))
        assert made is not None
        return made[0]

    b = GraphBuilder()
    y = build(b, b.input("x", type_of(x)))
    found = evaluate(b.finish({"y": y}), {"x": x}, {"rng": AT})[y]
    kept = found[:, 0, 0] != 0
    np.testing.assert_allclose(found, np.where(kept[:, None, None], x / 0.75, 0))
    assert abs(kept.mean() - 0.75) < 0.04
    check_vjp(build, x[:8])


def test_refusals() -> None:
    b = GraphBuilder()
    seed = b.input("seed", TensorType(as_dtype("uint64"), (1,)))
    with pytest.raises(ShapeError, match="state of random numbers"):
        random(b, seed, "uniform", (3,))
    with pytest.raises(ValueError, match="must be floating-point"):
        Random("normal", (3,), "int32")
    with pytest.raises(ValueError, match="distribution must be"):
        Random("cauchy", (3,))
    with pytest.raises(ValueError, match="ratio must be"):
        Dropout(1.5)
