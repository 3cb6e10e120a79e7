"""Recurrent layers against ONNX Runtime, gradients against differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import foreplan as fp
from foreplan.base.errors import ShapeError, UnsupportedError
from foreplan.graph import Builder, Fill, GraphBuilder, Kind, TensorType, Value, as_dtype
from foreplan.ops.loop import Loop
from foreplan.ops.matmul import MatMul
from foreplan.ops.recurrent import activation, gru, lstm, rnn
from foreplan.ops.unstack import Unstack
from tests.frontend.onnx.models import by_onnxruntime, model, node
from tests.ops.check import built, check_vjp, run_op
from tests.profile import pick, values

T, N, I, H = 4, 3, 5, 2  # noqa: E741
GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
BUILDS: dict[str, Callable[..., Any]] = {"RNN": rnn, "GRU": gru, "LSTM": lstm}
SLOTS = ("x", "w", "r", "bias", "lengths", "initial_h", "initial_c", "peephole")


def _arrays(kind: str, ways: int, *names: str, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    rows = GATES[kind] * H
    shapes = {
        "x": (T, N, I),
        "w": (ways, rows, I),
        "r": (ways, rows, H),
        "bias": (ways, 2 * rows),
        "initial_h": (ways, N, H),
        "initial_c": (ways, N, H),
        "peephole": (ways, 3 * H),
    }
    found = {n: rng.standard_normal(shapes[n]).astype(np.float32) for n in ("x", "w", "r", *names) if n != "lengths"}
    if "lengths" in names:
        found["lengths"] = np.array([2, 4, 1], np.int32)
    return found


def _runtime(kind: str, arrays: dict[str, np.ndarray], **attributes: Any) -> list[np.ndarray]:
    read = " ".join(slot if slot in arrays else "-" for slot in SLOTS[: 8 if kind == "LSTM" else 6])
    names = ["y", "h", "c"][: 3 if kind == "LSTM" else 2]
    layer = node(kind, read, " ".join(names), hidden_size=H, **attributes)
    constants = {name: x for name, x in arrays.items() if name != "x"}
    found = by_onnxruntime(model([layer], {"x": arrays["x"].shape}, names, constants, 17), x=arrays["x"])
    return [found[name] for name in names]


def _ours(kind: str, arrays: dict[str, np.ndarray], **options: Any) -> list[np.ndarray]:
    return built(lambda b, *values: BUILDS[kind](b, **dict(zip(arrays, values)), **options), *arrays.values())


def _compare(kind: str, arrays: dict[str, np.ndarray], attributes: dict[str, Any], **options: Any) -> None:
    for got, expected in zip(_ours(kind, arrays, **options), _runtime(kind, arrays, **attributes), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("kind", GATES)
def test_directions_with_and_without_lengths(kind: str, direction: str) -> None:
    ways = 2 if direction == "bidirectional" else 1
    states = ("initial_h", "initial_c") if kind == "LSTM" else ("initial_h",)
    for names in ((), *pick((), (), (("bias",), ("bias", *states))), ("bias", "lengths", *states)):
        arrays = _arrays(kind, ways, *names)
        _compare(kind, arrays, {"direction": direction}, direction=direction)


def test_gru_that_resets_behind_the_product() -> None:
    for names in ((), ("bias", "initial_h")):
        _compare("GRU", _arrays("GRU", 1, *names), {"linear_before_reset": 1}, linear_before_reset=True)


def test_lstm_peepholes_clipping_and_coupled_gates() -> None:
    arrays = _arrays("LSTM", 1, "bias", "initial_h", "initial_c", "peephole")
    _compare("LSTM", arrays, {})
    _compare("LSTM", arrays, {"clip": 0.4}, limit=0.4)
    _compare("LSTM", _arrays("LSTM", 1, "bias"), {"input_forget": 1}, input_forget=True)


ACTIVATIONS: list[tuple[str, float | None, float | None]] = [
    ("Relu", None, None),
    ("Tanh", None, None),
    ("Sigmoid", None, None),
    ("Affine", 0.7, 0.2),
    ("LeakyRelu", 0.1, None),
    ("ThresholdedRelu", 0.3, None),
    ("ScaledTanh", 0.8, 1.2),
    ("HardSigmoid", 0.3, 0.4),
    ("Elu", 0.9, None),
    ("Softsign", None, None),
    ("Softplus", None, None),
]


@pytest.mark.parametrize(("name", "alpha", "beta"), ACTIVATIONS)
def test_activations(name: str, alpha: float | None, beta: float | None) -> None:
    attributes: dict[str, Any] = {"activations": [name]}
    if alpha is not None:
        attributes["activation_alpha"] = [alpha]
    if beta is not None:
        attributes["activation_beta"] = [beta]
    _compare("RNN", _arrays("RNN", 1, "bias"), attributes, activations=[activation(name, alpha, beta)])


@pytest.mark.parametrize("kind", GATES)
def test_batch_first(kind: str) -> None:
    states = ("initial_h", "initial_c") if kind == "LSTM" else ("initial_h",)
    arrays = _arrays(kind, 2, "bias", *states)
    y, *finals = _runtime(kind, arrays, direction="bidirectional")
    turned = {n: a.swapaxes(0, 1) if n in ("x", *states) else a for n, a in arrays.items()}
    turned = {n: np.ascontiguousarray(a) for n, a in turned.items()}
    got = _ours(kind, turned, direction="bidirectional", layout=1)
    np.testing.assert_allclose(got[0], y.transpose(2, 0, 1, 3), rtol=1e-4, atol=1e-5)
    for state, expected in zip(got[1:], finals, strict=True):
        np.testing.assert_allclose(state, expected.swapaxes(0, 1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("kind", "masked"), values(reversed(GATES), [True, False]))
def test_differences(kind: str, masked: bool) -> None:
    names = ("x", "w", "r", "bias", *(("lengths",) if masked else ()))
    rng, rows = np.random.default_rng(3), GATES[kind] * H
    shapes = ((3, 2, 2), (1, rows, 2), (1, rows, H), (1, 2 * rows))
    arrays = [rng.standard_normal(shape) for shape in shapes] + [np.array([1, 3], np.int32)] * masked

    def build(b: Builder, *values: Value) -> list[Value]:
        return list(BUILDS[kind](b, **dict(zip(names, values)), direction="reverse" if masked else "forward"))

    check_vjp(build, *arrays, samples=6)


def test_unstack() -> None:
    x = np.random.default_rng(0).standard_normal((3, 2, 4))
    for got, expected in zip(run_op(Unstack(), x), x, strict=True):
        np.testing.assert_array_equal(got, expected)
    check_vjp(lambda b, v: b.node(Unstack(), v), x)
    check_vjp(lambda b, v: b.node(Unstack(), v)[1], x)


def test_what_does_not_fit_is_refused() -> None:
    b = GraphBuilder()
    x, w, r = (
        b.input(n, TensorType(as_dtype("float32"), shape))
        for n, shape in (("x", (T, N, I)), ("w", (1, H, I)), ("r", (1, H, H)))
    )
    with pytest.raises(ShapeError, match="the w of"):
        gru(b, x, w, r)
    with pytest.raises(ShapeError, match="direction"):
        rnn(b, x, w, r, direction="sideways")
    with pytest.raises(UnsupportedError, match="no recurrent activation"):
        activation("Swish")


LAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    "rnn": ("RNN", {}),
    "lstm": ("LSTM", {}),
    "gru": ("GRU", {}),
    "gru that resets behind the product": ("GRU", {"linear_before_reset": True}),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_backward_computes_no_product_of_forward_again(layer: str) -> None:
    """What a product gives is kept, or something of its size whose derivative does not need it."""
    kind, options = LAYERS[layer]
    b, width, rows = GraphBuilder("layer"), 64, 64 * GATES[kind]
    types = {name: TensorType(as_dtype("float32"), shape) for name, shape in (("x", (T, N, I)), ("w", (1, rows, I)))}
    types |= {"r": types["x"].with_shape((1, rows, width)), "bias": types["x"].with_shape((1, 2 * rows))}
    x = b.input("x", types.pop("x"))
    values = {"x": x, **{name: b.store(name, type, Kind.PARAMETER, Fill(0.1)) for name, type in types.items()}}
    y, *_ = BUILDS[kind](b, **values, **options)
    step = fp.compile(b.finish({"y": y}), fp.losses.mean, fp.optim.SGD(0.1), target="numpy").graph
    bodies = [node.op.graph for node in step.nodes if isinstance(node.op, Loop)]
    forward, again = (
        [node for node in body.nodes if isinstance(node.op, MatMul) and node.op.transpose_b] for body in bodies
    )
    assert len(forward) == (2 if layer == "gru" else 1) and not again


@pytest.mark.parametrize("kind", BUILDS)
def test_layers_of_one_shape_are_one_loop(kind: str) -> None:
    """Whatever their names: so its text is read once, for a hundred layers too."""
    b, loops = GraphBuilder("layers"), []
    for layer in range(2):
        b.scope = f"layer{layer}/"
        arrays = _arrays(kind, 1, "bias", seed=layer)
        values = {
            name: b.input(f"{name}{layer}", TensorType(as_dtype("float32"), x.shape)) for name, x in arrays.items()
        }
        BUILDS[kind](b, **values)
        loops.append(next(node.op for node in reversed(b.nodes) if isinstance(node.op, Loop)))
    assert loops[0] == loops[1] and loops[0].graph is loops[1].graph
