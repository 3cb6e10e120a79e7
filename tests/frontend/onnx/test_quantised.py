"""Quantised tensors: products as ONNX Runtime computes them, and weights that a file holds in few bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import foreplan as fp
from foreplan.frontend import from_onnx
from foreplan.graph import Array, Graph, Stored
from tests.frontend.onnx.models import info, node, random, run
from tests.oracle.peers import onnxruntime
from tests.profile import pick

Drawn = tuple[onnx.NodeProto, dict[str, np.ndarray], int]  # the node, its inputs, the type of its output
TYPES = {"uint8": TensorProto.UINT8, "int8": TensorProto.INT8}


def integers(rng: Random, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    limits = np.iinfo(dtype)
    drawn = np.random.default_rng(rng.getrandbits(32)).integers(limits.min, limits.max + 1, shape)
    return drawn.astype(dtype)


def zero(rng: Random, dtype: str, *shape: int) -> np.ndarray:
    """Zero points in the middle of a type's range."""
    return integers(rng, shape, dtype) // 4


def scale(rng: Random, *shape: int) -> np.ndarray:
    return np.random.default_rng(rng.getrandbits(32)).uniform(0.002, 0.05, shape).astype(np.float32)


def matmul_integer(rng: Random) -> Drawn:
    m, k, n, left = rng.randint(1, 5), rng.choice([3, 8, 300]), rng.randint(1, 5), rng.choice(list(TYPES))
    given = {"a": integers(rng, (2, m, k), left), "b": integers(rng, (k, n), "uint8"), "za": zero(rng, left)}
    given["zb"] = zero(rng, "uint8", n) if rng.random() < 0.5 else zero(rng, "uint8")
    return node("MatMulInteger", "a b za zb", "y"), given, TensorProto.INT32


def conv_integer(rng: Random) -> Drawn:
    channels, filters, kernel = rng.randint(1, 3), rng.randint(1, 4), rng.randint(1, 3)
    given = {
        "x": integers(rng, (2, channels, 6, 5), "uint8"),
        "w": integers(rng, (filters, channels, kernel, kernel), "uint8"),
        "zx": zero(rng, "uint8"),
        "zw": zero(rng, "uint8"),
    }
    made = node("ConvInteger", "x w zx zw", "y", pads=[rng.randint(0, 1) for _ in range(4)], strides=[1, 2])
    return made, given, TensorProto.INT32


def qlinear_matmul(rng: Random) -> Drawn:
    m, k, n, dtype = rng.randint(1, 5), rng.choice([3, 8, 300]), rng.randint(1, 5), rng.choice(list(TYPES))
    columns = (n,) if rng.random() < 0.5 else ()
    given = {
        "a": integers(rng, (m, k), dtype),
        "sa": scale(rng),
        "za": zero(rng, dtype),
        "b": integers(rng, (k, n), dtype),
        "sb": scale(rng, *columns),
        "zb": zero(rng, dtype, *columns),
        "sy": scale(rng),
        "zy": zero(rng, dtype),
    }
    return node("QLinearMatMul", " ".join(given), "y"), given, TYPES[dtype]


def qlinear_conv(rng: Random) -> Drawn:
    channels, filters, kernel, dtype = rng.randint(1, 3), rng.randint(1, 4), rng.randint(1, 3), "uint8"
    each = (filters,) if rng.random() < 0.5 else ()
    given = {
        "x": integers(rng, (2, channels, 6, 5), dtype),
        "sx": scale(rng),
        "zx": zero(rng, dtype),
        "w": integers(rng, (filters, channels, kernel, kernel), "int8"),
        "sw": scale(rng, *each),
        "zw": np.zeros(each, np.int8),
        "sy": scale(rng),
        "zy": zero(rng, dtype),
    }
    if rng.random() < 0.5:
        given["bias"] = np.random.default_rng(rng.getrandbits(32)).integers(-3000, 3000, filters).astype(np.int32)
    made = node("QLinearConv", " ".join(given), "y", pads=[rng.randint(0, 1) for _ in range(4)], strides=[2, 1])
    return made, given, TYPES[dtype]


def model_of(drawn: Drawn) -> onnx.ModelProto:
    """The first input is data, all others are constants."""
    made, given, dtype = drawn
    (name, x), *others = given.items()
    graph = helper.make_graph(
        [made],
        "small",
        [info(name, x.shape, TYPES[x.dtype.name])],
        [info("y", None, dtype)],
        [numpy_helper.from_array(array, other) for other, array in others],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


@pytest.mark.parametrize("draw", [matmul_integer, conv_integer, qlinear_matmul, qlinear_conv])
@pytest.mark.parametrize("seed", range(pick(2, 5, 100)))
def test_products_are_what_onnx_runtime_gives(draw: Callable[[Random], Drawn], seed: int) -> None:
    drawn = draw(Random(seed))
    proto, (name, x) = model_of(drawn), next(iter(drawn[1].items()))
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    (expected,) = session.run(["y"], {name: x})
    graph = from_onnx(proto)
    found = run(graph, **{name: x})["y"], fp.compile(graph, target="cpu:threads=1").bind().step({name: x}).outputs["y"]
    for got in found:
        assert got.dtype == expected.dtype
        off = np.abs(got.astype(np.int64) - expected.astype(np.int64))
        # A quotient that lies in the middle of two integers may be rounded to either: scales are multiplied in turns.
        assert off.max() <= (0 if draw in (matmul_integer, conv_integer) else 1)
        assert (off > 0).mean() <= 0.02


STORED = {"FLOAT8E4M3FN": "float8_e4m3fn", "FLOAT8E5M2": "float8_e5m2", "INT4": "int4", "UINT4": "uint4",
          "FLOAT4E2M1": "float4_e2m1fn", "INT2": "int2"}  # fmt: skip
PLACES = ["memory", "file", "beside"]


def stored_model(kind: str, codes: np.ndarray) -> onnx.ModelProto:
    """y = x · (scale of each column times the weight), the weight in few bits."""
    tensor = numpy_helper.from_array(codes, "w")
    nodes = [
        node("DequantizeLinear", "w s", "f", "restore", axis=1),
        node("Transpose", "w", "t", perm=[1, 0]),
        node("MatMul", "x f", "y"),
        node("Cast", "t", "c", to=TensorProto.FLOAT),
    ]
    rows, columns = codes.shape
    scales = numpy_helper.from_array(np.linspace(0.5, 2, columns, dtype=np.float32), "s")
    outputs = [info("y", None), info("c", (columns, rows))]
    graph = helper.make_graph(nodes, "stored", [info("x", (2, rows))], outputs, [tensor, scales])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 25)])


def imported(proto: onnx.ModelProto, place: str, folder: Path) -> Graph:
    if place == "memory":
        return from_onnx(proto)
    path = folder / "m.onnx"
    beside = place == "beside"
    onnx.save(proto, path, save_as_external_data=beside, location="w.bin", size_threshold=0)
    return from_onnx(path)


@pytest.mark.parametrize("kind", STORED)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("shape", [(3, 5), (97, 61)])
def test_weights_in_few_bits_stay_as_the_file_has_them(
    tmp_path: Path, kind: str, place: str, shape: tuple[int, int]
) -> None:
    dtype = np.dtype(getattr(ml_dtypes, STORED[kind]))
    few = {"INT4": (-8, 8), "UINT4": (0, 16), "INT2": (-2, 2)}.get(kind)
    drawn = random(*shape) if few is None else np.random.default_rng(0).integers(*few, shape).astype(np.int8)
    codes = drawn.astype(dtype)
    graph = imported(stored_model(kind, codes), place, tmp_path)
    numbers, x = codes.astype(np.float32), random(2, shape[0])
    y = x @ (numbers * np.linspace(0.5, 2, shape[1], dtype=np.float32))
    for target in ("numpy", "cpu:threads=1"):
        found = fp.compile(graph, target=target).bind().step({"x": x}).outputs
        np.testing.assert_allclose(found["y"], y, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(found["c"], numbers.T)
    if shape[0] > 10:
        (weight,) = (value for value in graph.stored if value.name == "w")
        bits = {"INT4": 4, "UINT4": 4, "FLOAT4E2M1": 4, "INT2": 2}.get(kind, 8)
        assert weight.type.nbytes == -(-codes.size * bits // 8)
        assert isinstance(weight.init, Array if place == "memory" and bits < 8 else (Stored, Array))
        assert place == "memory" or isinstance(weight.init, Stored)


def test_a_tensor_with_too_few_bytes_is_refused() -> None:
    proto = stored_model("INT4", np.zeros((67, 41), ml_dtypes.int4))
    proto.graph.initializer[0].raw_data = proto.graph.initializer[0].raw_data[:-1]
    with pytest.raises(fp.ModelError, match="initializer 'w'"):
        from_onnx(proto)
