"""Ops of com.microsoft: ONNX Runtime's results, and gradients beside central differences in float64."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import foreplan as fp
from foreplan.base.errors import UnsupportedError
from foreplan.frontend import from_onnx
from foreplan.graph.value import Kind
from tests.frontend.onnx.models import info, kinds, node, random, same_as_onnxruntime
from tests.profile import pick

Drawn = tuple[onnx.NodeProto, dict[str, np.ndarray]]
DOMAIN = "com.microsoft"


def op(name: str, inputs: str, outputs: str, **attributes: object) -> onnx.NodeProto:
    made = node(name, inputs, outputs, "it", domain=DOMAIN, **attributes)
    made.output[:] = ["" if part == "-" else part for part in made.output]
    return made


def model_of(drawn: onnx.NodeProto, arrays: dict[str, np.ndarray], double: bool = False) -> onnx.ModelProto:
    """Floats are inputs, all else constants."""
    float_type = TensorProto.DOUBLE if double else TensorProto.FLOAT
    floats = {name: x for name, x in arrays.items() if x.dtype.kind == "f"}
    graph = helper.make_graph(
        [drawn],
        "small",
        [info(name, x.shape, float_type) for name, x in floats.items()],
        [info(name, None, float_type) for name in drawn.output if name],
        [numpy_helper.from_array(x, name) for name, x in arrays.items() if name not in floats],
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid(DOMAIN, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def gelu(rng: Random) -> Drawn:
    return op("Gelu", "x", "y"), {"x": 2 * random(rng.randint(1, 5), 7)}


def bias_gelu(rng: Random) -> Drawn:
    width = rng.randint(1, 9)
    return op("BiasGelu", "x c", "y"), {"x": random(2, 3, width), "c": random(width)}


def fast_gelu(rng: Random) -> Drawn:
    width = rng.randint(1, 9)
    if rng.random() < 0.5:
        return op("FastGelu", "x", "y"), {"x": random(2, width)}
    return op("FastGelu", "x c", "y"), {"x": random(2, 3, width), "c": random(width)}


def quick_gelu(rng: Random) -> Drawn:
    attributes = {"alpha": rng.uniform(0.5, 3)} if rng.random() < 0.5 else {}
    return op("QuickGelu", "x", "y", **attributes), {"x": random(3, rng.randint(1, 9))}


def fused_matmul(rng: Random) -> Drawn:
    m, k, n = (rng.randint(1, 6) for _ in range(3))
    left, right = rng.randint(0, 1), rng.randint(0, 1)
    a, b = random(2, k, m) if left else random(2, m, k), random(2, n, k) if right else random(2, k, n)
    return op("FusedMatMul", "a b", "y", transA=left, transB=right, alpha=rng.uniform(0.1, 2)), {"a": a, "b": b}


def skip_norm(rng: Random) -> Drawn:
    shape = (2, rng.randint(1, 4), rng.randint(2, 9))
    given = {"x": random(*shape), "skip": random(*shape, seed=1), "gamma": random(shape[-1])}
    beta, bias = rng.random() < 0.5, rng.random() < 0.5
    given |= {"beta": random(shape[-1], seed=2)} if beta else {}
    given |= {"bias": random(shape[-1], seed=3)} if bias else {}
    names = f"x skip gamma {'beta' if beta else '-'} {'bias' if bias else ''}"
    return op("SkipLayerNormalization", names, "y - - total", epsilon=rng.uniform(1e-6, 1e-2)), given


def skip_rms_norm(rng: Random) -> Drawn:
    shape = (2, rng.randint(1, 4), rng.randint(2, 9))
    given = {"x": random(*shape), "skip": random(*shape, seed=1), "gamma": random(shape[-1])}
    given |= {"bias": random(shape[-1], seed=3)} if rng.random() < 0.5 else {}
    made = op("SkipSimplifiedLayerNormalization", " ".join(given), "y - - total", epsilon=rng.uniform(1e-6, 1e-2))
    return made, given


def rotary(rng: Random) -> Drawn:
    batch, length, heads, half = 2, rng.randint(1, 5), rng.randint(1, 3), rng.randint(1, 4)
    partly, rows = rng.random() < 0.5, 9
    depth = 2 * half + (2 * rng.randint(1, 3) if partly else 0)
    ids = [np.array([rng.randint(0, 3)]), np.array(rng.choices(range(rows), k=batch * length)).reshape(batch, length)]
    first_heads = rng.random() < 0.5
    shape = (batch, heads, length, depth) if first_heads else (batch, length, heads * depth)
    angles = random(rows, half)
    given = {"x": random(*shape), "at": rng.choice(ids), "cos": np.cos(angles), "sin": np.sin(angles)}
    sizes = {"num_heads": heads, "rotary_embedding_dim": 2 * half} if partly else {}
    return op("RotaryEmbedding", "x at cos sin", "y", interleaved=rng.randint(0, 1), **sizes), given


def masks(rng: Random, batch: int, queries: int, keys: int) -> dict[str, np.ndarray]:
    """A mask that leaves a key to every query, or none."""
    lengths = np.array([rng.randint(1, keys) for _ in range(batch)], np.int32)
    kept = np.arange(keys) < lengths[:, None]
    grid = np.broadcast_to(kept[:, None], (batch, queries, keys))
    found = [lengths, kept.astype(np.int32), grid.astype(np.int32)]
    return {} if rng.random() < 0.25 else {"mask": rng.choice(found)}


def attention(rng: Random) -> Drawn:
    batch, length, heads, depth = 2, rng.randint(1, 5), rng.randint(1, 3), rng.randint(1, 4)
    width, inner = rng.randint(1, 6), heads * depth
    given = {"x": random(batch, length, width), "w": random(width, 3 * inner), "c": random(3 * inner)}
    causal = rng.randint(0, 1)
    mask = {} if causal else masks(rng, batch, length, length)
    names = f"x w c {'mask' if mask else ''}"
    return op("Attention", names, "y", num_heads=heads, unidirectional=causal), given | mask


def multi_head_attention(rng: Random) -> Drawn:
    batch, queries, keys, heads = 2, rng.randint(1, 4), rng.randint(1, 5), rng.randint(1, 3)
    inner = heads * rng.randint(1, 4)
    given = {"q": random(batch, queries, inner), "k": random(batch, keys, inner), "v": random(batch, keys, inner)}
    given |= {"c": random(3 * inner)} if rng.random() < 0.5 else {}
    mask = masks(rng, batch, queries, keys)
    names = f"q k v {'c' if 'c' in given else '-'} {'mask' if mask else ''}"
    return op("MultiHeadAttention", names, "y", num_heads=heads), given | mask


DRAWS: list[Callable[[Random], Drawn]] = [
    *(gelu, bias_gelu, fast_gelu, quick_gelu, fused_matmul, skip_norm, skip_rms_norm),
    *(rotary, attention, multi_head_attention),
]


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("seed", range(pick(1, 6, 40)))
def test_gives_what_onnx_runtime_gives(draw: Callable[[Random], Drawn], seed: int) -> None:
    made, arrays = draw(Random(seed))
    same_as_onnxruntime(model_of(made, arrays), **{name: x for name, x in arrays.items() if x.dtype.kind == "f"})


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("seed", range(pick(1, 1, 10)))
def test_gradients_are_differences(draw: Callable[[Random], Drawn], seed: int) -> None:
    made, arrays = draw(Random(seed + 100))
    given = {name: x.astype(np.float64) for name, x in arrays.items() if x.dtype.kind == "f"}
    proto = model_of(made, arrays, double=True)
    del proto.graph.output[1:]
    graph = from_onnx(proto)
    first, rng = proto.graph.output[0].name, np.random.default_rng(seed)
    weights = rng.standard_normal(graph.outputs[first].shape)
    forward = fp.compile(graph, target="numpy").bind()
    given_weights = fp.spec(weights.shape, "float64")

    def loss(y: fp.frontend.Tensor, g: fp.frontend.Tensor = given_weights) -> fp.frontend.Tensor:
        return (y * g).sum()

    step = fp.compile(graph, loss=loss, gradients=list(given), target="numpy").bind()
    found = step.step(given | {"g": weights}).gradients
    for name, x in given.items():
        direction, size = rng.standard_normal(x.shape), 1e-6
        ends = [forward.step(given | {name: x + sign * size * direction}).outputs[first] for sign in (1, -1)]
        expected = float(((ends[0] - ends[1]) * weights).sum()) / (2 * size)
        assert float((found[name] * direction).sum()) == pytest.approx(expected, rel=1e-5, abs=1e-7), name


def test_weights_in_their_places_are_trained() -> None:
    made, arrays = attention(Random(3))
    proto = model_of(made, arrays)
    for name in ("w", "c"):
        proto.graph.initializer.append(numpy_helper.from_array(arrays[name], name))
    kept = [value for value in proto.graph.input if value.name == "x"]
    del proto.graph.input[:]
    proto.graph.input.extend(kept)
    assert kinds(from_onnx(proto)) | {"w": Kind.PARAMETER, "c": Kind.PARAMETER} == kinds(from_onnx(proto))


def test_a_cache_is_refused_by_name() -> None:
    arrays = {name: random(1, 2, 4) for name in ("q", "k", "v")} | {"past": random(1, 2, 3, 2)}
    made = op("MultiHeadAttention", "q k v - - - past past", "y", num_heads=2)
    with pytest.raises(UnsupportedError, match=r"node 'it' \(MultiHeadAttention\).*past_key.*without use_cache"):
        from_onnx(model_of(made, arrays))
