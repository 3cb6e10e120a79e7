"""What attributes say: each form of a constant, axes at their ends, equations, and other spellings of ONNX's domain."""

from __future__ import annotations

import string
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from foreplan.base.errors import ForeplanError, ModelError, ShapeError, UnsupportedError
from foreplan.frontend import from_onnx
from foreplan.frontend.onnx.load import NEWEST_OPSET, OLDEST_OPSET
from tests.frontend.onnx.models import by_onnxruntime, model, node, random, run
from tests.profile import pick


@pytest.mark.parametrize(
    ("attribute", "expected"),
    [
        ({"value_float": 2.5}, np.array(2.5, np.float32)),
        ({"value_floats": [0.5, -1.25]}, np.array([0.5, -1.25], np.float32)),
        ({"value_int": -7}, np.array(-7, np.int64)),
        ({"value_ints": [3, 1, 2]}, np.array([3, 1, 2], np.int64)),
        ({"value": numpy_helper.from_array(np.array([[True, False]]))}, np.array([[True, False]])),
    ],
)
def test_a_constant_in_each_attribute(attribute: dict[str, Any], expected: np.ndarray) -> None:
    graph = from_onnx(model([node("Constant", "", "c", **attribute), node("Relu", "x", "y")], {"x": (2,)}, ["c", "y"]))
    found = run(graph, x=random(2))["c"]
    assert (found.dtype, found.shape, found.tobytes()) == (expected.dtype, expected.shape, expected.tobytes())


def test_a_constant_of_no_number_is_refused() -> None:
    for attribute, told in (({"value_string": "a"}, "value_string"), ({}, "nothing")):
        with pytest.raises(UnsupportedError, match=f"it holds {told}, and foreplan reads"):
            from_onnx(model([node("Constant", "", "c", "con", **attribute)], {"x": (2,)}, ["c"]))


@pytest.mark.parametrize("value", [None, np.array([3], np.int64), np.array([0.5], np.float32)])
def test_what_a_shape_is_filled_with(value: np.ndarray | None) -> None:
    attributes = {} if value is None else {"value": numpy_helper.from_array(value)}
    proto = model([node("ConstantOfShape", "s", "y", **attributes)], {"x": (1,)}, ["y"], {"s": np.array([2, 3])})
    expected = np.full((2, 3), 0.0 if value is None else value[0], np.float32 if value is None else value.dtype)
    found = run(from_onnx(proto), x=random(1))["y"]
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("size", [0, 2])
def test_a_shape_is_filled_with_one_number(size: int) -> None:
    value = numpy_helper.from_array(np.ones(size, np.float32))
    made = model([node("ConstantOfShape", "s", "y", value=value)], {"x": (1,)}, ["y"], {"s": np.array([2, 3])})
    with pytest.raises(ModelError, match="its value must be one number"):
        from_onnx(made)


@pytest.mark.parametrize(
    ("op", "inputs"), [("Softmax", "x"), ("LogSoftmax", "x"), ("Hardmax", "x"), ("Concat", "x x"), ("ArgMax", "x")]
)
def test_axes_end_where_the_tensor_does(op: str, inputs: str) -> None:
    x = random(2, 3)
    for axis in (-2, -1, 0, 1):
        proto = model([node(op, inputs, "y", axis=axis)], {"x": (2, 3)}, ["y"])
        np.testing.assert_allclose(run(from_onnx(proto), x=x)["y"], by_onnxruntime(proto, x=x)["y"], rtol=1e-5)
    for axis in (-3, 2):
        with pytest.raises(ShapeError, match=f"no axis {axis}"):
            from_onnx(model([node(op, inputs, "y", axis=axis)], {"x": (2, 3)}, ["y"]))


def test_onnx_s_domain_has_two_names() -> None:
    """Also where an op is its function's body, whose attributes have the op's defaults."""
    for op, attributes in (("Relu", {}), ("MeanVarianceNormalization", {}), ("Celu", {"alpha": 2.0}), ("Celu", {})):
        protos = [
            model([node(op, "x", "y", domain=name, **attributes)], {"x": (1, 2, 3, 4)}, ["y"])
            for name in ("", "ai.onnx")
        ]
        x = random(1, 2, 3, 4)
        wanted, found = (run(from_onnx(proto), x=x)["y"] for proto in protos)
        np.testing.assert_array_equal(found, wanted)
        np.testing.assert_allclose(found, by_onnxruntime(protos[0], x=x)["y"], rtol=1e-4, atol=1e-5)


def test_defaults_of_attributes_are_those_of_the_domain_that_is_meant() -> None:
    """`HannWindow` by its function's body, whose `periodic` is 1; a model's own `Selu` has no alpha of ONNX's."""
    protos = [
        model(
            [node("HannWindow", "n", "w", domain=name), node("Mul", "x w", "y")], {"x": (5,)}, ["y"], {"n": np.array(5)}
        )
        for name in ("", "ai.onnx")
    ]
    for proto in protos:
        found = run(from_onnx(proto), x=np.ones(5, np.float32))["y"]
        np.testing.assert_allclose(found, np.sin(np.pi * np.arange(5) / 5) ** 2, atol=1e-6)
    leaky = node("LeakyRelu", "x", "y")
    leaky.attribute.append(onnx.AttributeProto(name="alpha", ref_attr_name="alpha", type=onnx.AttributeProto.FLOAT))
    body = helper.make_function("own", "Selu", ["x"], ["y"], [leaky], [helper.make_opsetid("", 18)], ["alpha"])
    proto = model([node("Selu", "x", "y", domain="own")], {"x": (3,)}, ["y"], functions=[body], domains=["own"])
    found = run(from_onnx(proto), x=np.array([-1, 0, 2], np.float32))["y"]
    np.testing.assert_allclose(found, [-0.01, 0, 2], rtol=1e-6)


@pytest.mark.parametrize(("opset", "age"), [(OLDEST_OPSET - 1, "older"), (NEWEST_OPSET + 1, "newer")])
def test_opsets_just_beyond_those_that_are_read(opset: int, age: str) -> None:
    proto = model([node("Relu", "x", "y")], {"x": (2,)}, ["y"])
    proto.opset_import[0].version = opset
    with pytest.raises(UnsupportedError, match=f"opset {opset} is {age} than"):
        from_onnx(proto)


def test_how_a_loss_is_reduced_is_one_of_three() -> None:
    nodes = [node("SoftmaxCrossEntropyLoss", "x t", "y", "loss", reduction="most")]
    with pytest.raises(ModelError, match="reduction must be none, sum or mean, and is 'most'"):
        from_onnx(model(nodes, {"x": (2, 3)}, ["y"], {"t": np.array([0, 2])}))


LABELS = st.text(alphabet="abCd", max_size=3)


@st.composite
def terms(draw: st.DrawFn) -> str:
    text = draw(LABELS)
    at = draw(st.integers(0, len(text)))
    return text[:at] + "..." + text[at:] if draw(st.integers(0, 2)) == 0 else text


@settings(max_examples=pick(20, 50, 150), deadline=None)
@given(
    st.lists(terms(), min_size=1, max_size=3),
    st.one_of(st.none(), terms()),
    st.lists(st.integers(-1, 2), min_size=3, max_size=3),
)
def test_equations_mean_what_numpy_s_do(written: list[str], result: str | None, more: list[int]) -> None:
    """Ranks that fit, and now and then one more or less; what NumPy refuses is refused."""
    extents = dict(zip(string.ascii_letters, (2, 3, 4, 1) * 13))
    arrays = []
    for i, (term, extra) in enumerate(zip(written, more)):
        named = [extents[label] for label in term.replace("...", "")]
        ellipsis = [5, 2][2 - max(0, extra) :] if "..." in term else []
        at = term.find("...") if "..." in term else len(named)
        shape = [*named[:at], *ellipsis, *named[at:]]
        shape += [2] if "..." not in term and extra == 2 else []
        arrays.append(random(*shape, seed=i))
    equation = ",".join(written) + ("" if result is None else "->" + result)
    feeds = {f"x{i}": array for i, array in enumerate(arrays)}
    proto = model(
        [node("Einsum", " ".join(feeds), "y", equation=equation)], {k: v.shape for k, v in feeds.items()}, ["y"]
    )
    try:
        expected = np.einsum(equation, *(array.astype(np.float64) for array in arrays))
    except ValueError:
        if result is not None and "..." not in result and "..." in equation:
            return  # PyTorch sums over the axes of an ellipsis that the result lacks, and so does foreplan
        with pytest.raises(ForeplanError):
            from_onnx(proto)
        return
    found = run(from_onnx(proto), **feeds)["y"]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def pooled(extent: int, taps: int, step: int, pads: tuple[int, int]) -> onnx.ModelProto:
    attributes = {"kernel_shape": [taps], "strides": [step], "pads": list(pads), "ceil_mode": 1}
    return model([node("LpPool", "x", "y", p=2, **attributes)], {"x": (1, 2, extent)}, ["y"])


@settings(max_examples=pick(10, 25, 60), deadline=None)
@given(st.integers(4, 9), st.integers(1, 3), st.integers(1, 3), st.tuples(st.integers(0, 1), st.integers(0, 1)))
def test_windows_that_hang_over_are_there_with_ceil_mode(
    extent: int, taps: int, step: int, pads: tuple[int, int]
) -> None:
    """By the definition: as many windows as begin within the padded axis' first part, each of what it sees."""
    if max(pads) >= taps:
        return
    x = random(1, 2, extent)
    wide = np.pad(x.astype(np.float64), ((0, 0), (0, 0), (pads[0], pads[1] + step)))
    count = -(-(extent + sum(pads) - taps) // step) + 1
    starts = [i * step for i in range(count) if i * step < extent + pads[0]]
    expected = [np.sqrt((wide[..., start : start + taps] ** 2).sum(-1)) for start in starts]
    found = run(from_onnx(pooled(extent, taps, step, pads)), x=x)["y"]
    np.testing.assert_allclose(found, np.stack(expected, -1), rtol=1e-5, atol=1e-6)


def test_negative_places_of_a_scatter_count_from_the_end() -> None:
    indices = np.array([[[-1, 0], [0, -2]], [[1, 1], [-2, -1]]])
    proto = model([node("ScatterND", "x i u", "y")], {"x": (3, 4), "u": (2, 2)}, ["y"], {"i": indices})
    x, u = random(3, 4), random(2, 2, seed=1)
    expected = x.copy()
    expected[indices[..., 0], indices[..., 1]] = u
    np.testing.assert_array_equal(run(from_onnx(proto), x=x, u=u)["y"], expected)


def test_a_place_of_a_scatter_has_no_more_numbers_than_axes() -> None:
    proto = model([node("ScatterND", "x i u", "y")], {"x": (3,), "u": (2,)}, ["y"], {"i": np.zeros((2, 2), np.int64)})
    with pytest.raises(ShapeError, match="do not fit"):
        from_onnx(proto)


@pytest.mark.parametrize("mode", ["NOTSET", "SAME_UPPER", "SAME_LOWER"])
@pytest.mark.parametrize("wanted", [None, [9], [12]])
def test_a_stated_shape_of_a_transposed_convolution_comes_first(mode: str, wanted: list[int] | None) -> None:
    attributes: dict[str, Any] = {"strides": [2], "auto_pad": mode}
    attributes |= {} if wanted is None else {"output_shape": wanted}
    proto = model([node("ConvTranspose", "x w", "y", **attributes)], {"x": (1, 2, 5), "w": (2, 3, 4)}, ["y"])
    feeds = {"x": random(1, 2, 5), "w": random(2, 3, 4)}
    found = run(from_onnx(proto), **feeds)["y"]
    assert found.shape[2] == (wanted[0] if wanted else 12 if mode == "NOTSET" else 10)
    np.testing.assert_allclose(found, by_onnxruntime(proto, **feeds)["y"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("outputs", ["y", "y mean", "y mean inverse", "y - inverse"])
def test_statistics_of_a_layer_norm_that_are_asked_for(outputs: str) -> None:
    names = [name for name in outputs.split() if name != "-"]
    made = node("LayerNormalization", "x s", outputs.replace("-", "_"), axis=1)
    made.output[:] = ["" if name == "_" else name for name in made.output]
    proto = model([made], {"x": (3, 4), "s": (4,)}, names)
    x, s = random(3, 4), random(4)
    mean = x.mean(1, keepdims=True)
    inverse = 1 / np.sqrt(x.var(1, keepdims=True) + 1e-5)
    wanted = {"y": (x - mean) * inverse * s, "mean": mean, "inverse": inverse}
    found = run(from_onnx(proto), x=x, s=s)
    assert list(found) == names
    for name in names:
        np.testing.assert_allclose(found[name], wanted[name], rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("op", ["RNN", "GRU", "LSTM"])
def test_sums_of_a_recurrent_cell_are_clipped(op: str) -> None:
    gates = {"RNN": 1, "GRU": 3, "LSTM": 4}[op]
    constants = {"w": 3 * random(1, gates * 2, 3), "r": 3 * random(1, gates * 2, 2, seed=1)}
    protos = [
        model([node(op, "x w r", "y", hidden_size=2, **more)], {"x": (4, 2, 3)}, ["y"], constants)
        for more in ({}, {"clip": 0.25})
    ]
    x = random(4, 2, 3)
    free, clipped = (run(from_onnx(proto), x=x)["y"] for proto in protos)
    np.testing.assert_allclose(clipped, by_onnxruntime(protos[1], x=x)["y"], rtol=1e-4, atol=1e-5)
    assert np.abs(free - clipped).max() > 0.05


def test_the_number_of_a_top_k_is_an_input_from_opset_10_on() -> None:
    x = random(2, 5)
    wanted = -np.sort(-x, axis=1)[:, :3]
    old = model([node("TopK", "x", "y i", k=3, axis=1)], {"x": (2, 5)}, ["y"], opset=9)
    new = [
        model([node("TopK", "x k", "y i", axis=1)], {"x": (2, 5)}, ["y"], {"k": np.array([3])}, opset=opset)
        for opset in (10, 11, 18)
    ]
    for proto in (old, *new):
        np.testing.assert_array_equal(run(from_onnx(proto), x=x)["y"], wanted)


def test_an_extent_of_0_in_the_file_may_be_given_otherwise() -> None:
    """Old exporters write 0 for what they do not know."""
    proto = model([node("Relu", "x", "y")], {"x": (0, 3)}, ["y"])
    assert from_onnx(proto, shapes={"x": (4, 3)}).inputs[0].shape == (4, 3)
    with pytest.raises(ShapeError, match="is 3 in the file, and shapes= gives 5"):
        from_onnx(proto, shapes={"x": (4, 5)})


@pytest.mark.parametrize("shape", [(3, 5), (5,), (1, 1), (3, 1), (2, 1, 3, 1), (3, 2)])
@pytest.mark.parametrize("kind", [np.float32, np.bool_])
@pytest.mark.parametrize("opset", [23, 24])
def test_a_mask_of_attention_is_broadcast_and_from_opset_24_on_padded(
    shape: tuple[int, ...], kind: type, opset: int
) -> None:
    """Opset 24: the last axis "can also be shorter and will be padded with negative infinity". Extent 1 is shorter."""
    mask = random(*shape) if kind is np.float32 else random(*shape) > -0.5
    mask[..., 0] = True  # every query has a key
    feeds = {"q": random(2, 4, 3, 4), "k": random(2, 2, 5, 4, seed=1), "v": random(2, 2, 5, 4, seed=2)}
    proto = model(
        [node("Attention", "q k v m", "y")], {k: x.shape for k, x in feeds.items()}, ["y"], {"m": mask}, opset
    )
    if shape[-1] == 2 and opset == 23:
        with pytest.raises(ShapeError, match="do not broadcast"):
            from_onnx(proto)
        return
    graph = from_onnx(proto)
    assert ("attention" in {made.op.name for made in graph.nodes}) == (shape[-1] == 5 or opset == 23)
    if opset == 23:
        wide = np.ascontiguousarray(np.broadcast_to(mask, (*shape[:-1], 5)))
        proto.graph.initializer[0].CopyFrom(numpy_helper.from_array(wide, "m"))
    (wanted,) = ReferenceEvaluator(proto).run(None, feeds)
    np.testing.assert_allclose(run(graph, **feeds)["y"], wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mask", [np.array(0.5, np.float32), np.array([[[[[0.5]]]]], np.float32)])
def test_a_mask_of_no_axes_or_too_many_is_refused(mask: np.ndarray) -> None:
    feeds = {"q": (1, 2, 3, 4), "k": (1, 2, 5, 4), "v": (1, 2, 5, 4)}
    with pytest.raises(ShapeError):
        from_onnx(model([node("Attention", "q k v m", "y")], feeds, ["y"], {"m": mask}, 23))


@pytest.mark.parametrize(
    ("equation", "shape", "told"),
    [
        ("ab->a", (2,), r"the term 'ab' of 'ab->a' does not fit an operand with 1 axes"),
        ("a->a", (2, 3), r"the term 'a' of 'a->a' does not fit an operand with 2 axes"),
        ("a...bc->a", (2, 3), r"the term 'a...bc' of .* does not fit an operand with 2 axes"),
        ("ab->ac", (2, 3), "'ab->ac' has an index that no operand has, or one twice"),
        ("ab->aba", (2, 3), "'ab->aba' has an index that no operand has, or one twice"),
        ("ab,a->b", (2, 3), "is for 2 operands, and there are 1"),
    ],
)
def test_equations_that_do_not_fit_are_named(equation: str, shape: tuple[int, ...], told: str) -> None:
    with pytest.raises(ForeplanError, match=told):
        from_onnx(model([node("Einsum", "x", "y", equation=equation)], {"x": shape}, ["y"]))


@pytest.mark.parametrize(
    ("op", "index", "attributes"),
    [
        ("Gather", [0, 3], {"axis": 0}),
        ("Gather", [[1], [-5]], {"axis": 1}),
        ("GatherND", [[0, 4]], {}),
        ("GatherND", [[-4, 0], [0, 0]], {}),
        ("ScatterND", [[0, 4]], {}),
        ("ScatterElements", [[3]], {"axis": 0}),
    ],
)
def test_indices_that_a_file_holds_are_held_against_their_axis(
    op: str, index: list[Any], attributes: dict[str, Any]
) -> None:
    """They were taken modulo the axis, and ONNX Runtime ends with an error."""
    weights = {"i": np.array(index), "u": np.ones((1, 1) if op == "ScatterElements" else 1, np.float32)}
    proto = model(
        [node(op, "x i u" if op.startswith("S") else "x i", "y", "at", **attributes)], {"x": (3, 4)}, ["y"], weights
    )
    with pytest.raises(Exception, match=r"out of data bounds|invalid ind"):
        by_onnxruntime(proto, x=random(3, 4))
    with pytest.raises(ForeplanError, match=r"node 'at' .*the index -?\d is outside an axis of \d elements"):
        from_onnx(proto)


def test_places_among_known_extents_are_held_against_them() -> None:
    steps = [node("Shape", "x", "s"), node("Gather", "s i", "g", "at"), node("Reshape", "x g", "y")]
    with pytest.raises(ForeplanError, match=r"node 'at' .*the index 3 is outside an axis of 2 elements"):
        from_onnx(model(steps, {"x": (3, 4)}, ["y"], {"i": np.array([0, 3])}))
