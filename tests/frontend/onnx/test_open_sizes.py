"""Open sizes of inputs: one error names them all, with a line to paste that works."""

from __future__ import annotations

import re
import shlex
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from foreplan.base.errors import ForeplanError, ShapeError, ValueNeededError
from foreplan.cli.settings import parse_shapes, parse_values
from foreplan.frontend import from_onnx
from tests.frontend.onnx.models import branch, info, model, node, random, run

NAMES = ["input_ids", "x.1", "onnx::Flatten_0", "serving default", "a/b:0", "it's", "wav", "p2o-1"]
SYMBOLS = ["batch", "batch", "seq", "height", "s77", "past + seq", "?", "-1", None, 3, 8]


def pasted(error: ForeplanError) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments that a message tells; its flags tell the same."""
    python, line = re.findall(r" (?:with|needs) ((?:shapes|values)=.*?) \((--.*?)\)(?:;|,|\.)", str(error))[-1]
    told: dict[str, Any] = eval(f"dict({python})", {})
    flags = shlex.split(line)
    by_flag = {
        key: [flags[i + 1] for i in range(0, len(flags), 2) if flags[i] == f"--{key}"] for key in ("shapes", "values")
    }
    assert parse_shapes(tuple(by_flag["shapes"])) == told.get("shapes")
    assert parse_values(tuple(by_flag["values"])) == told.get("values")
    return told.get("shapes", {}), told.get("values", {})


@pytest.mark.parametrize("seed", range(20))
def test_a_drawn_model_is_imported_by_the_line_of_its_one_error(seed: int) -> None:
    """Ranks, symbols, names and inputs whose values are needed are drawn."""
    draw = np.random.default_rng(seed)
    count = int(draw.integers(1, 5))
    names = [str(name) for name in draw.permutation(NAMES)[:count]]
    inputs: dict[str, Any] = {}
    for name in names:
        inputs[name] = [SYMBOLS[i] for i in draw.integers(0, len(SYMBOLS), draw.integers(1, 5))]
    if draw.random() < 0.3:
        inputs[names[0]] = None
    inputs[names[-1]] = ["batch", *(inputs[names[-1]] or [])[1:]]
    nodes, axes = [], [f"axes{i}" for i in range(draw.integers(0, 3))]
    for i, name in enumerate(names):
        nodes.append(onnx.helper.make_node("ReduceMean", [name], [f"m{i}"], keepdims=0))
    for i, name in enumerate(axes):
        nodes.append(onnx.helper.make_node("Unsqueeze", [names[0], name], [f"u{i}"]))
        nodes.append(onnx.helper.make_node("ReduceMean", [f"u{i}"], [f"n{i}"], keepdims=0))
    total = [f"m{i}" for i in range(count)] + [f"n{i}" for i in range(len(axes))]
    nodes.append(onnx.helper.make_node("Sum", total, ["y"]))
    proto = model(nodes, inputs, ["y"])
    proto.graph.input.extend(info(name, (1,), TensorProto.INT64) for name in axes)
    with pytest.raises(ShapeError, match="sizes of inputs are open") as caught:
        from_onnx(proto)
    message = str(caught.value)
    assert all(
        repr(name) in message
        for name, dims in inputs.items()
        if dims is None or {str, type(None)} & set(map(type, dims))
    )
    assert all(
        f"{symbol}" in message for dims in inputs.values() for symbol in dims or () if symbol in ("batch", "seq")
    )
    shapes, values = pasted(caught.value)
    assert list(values) == axes and "with which it can be imported" in message
    graph = from_onnx(proto, shapes=shapes, values=values)
    for value in graph.inputs:
        dims = inputs[value.name]
        assert dims is None or len(dims) == len(value.shape)
        assert dims is None or all(n == dim for n, dim in zip(value.shape, dims) if isinstance(dim, int))
    del shapes[next(iter(shapes))]
    with pytest.raises(ShapeError, match="sizes of inputs are open"):
        from_onnx(proto, shapes=shapes, values=values)


def settings(*, wide: int) -> onnx.ModelProto:
    """A model for sound of `wide` numbers, whose rate chooses among branches of other shapes."""
    then, other = (
        branch(name, node("Slice", f"x zero {to} one", name), outputs=name)
        for name, to in (("t", "two"), ("e", "four"))
    )
    nodes = [
        node("MatMul", "x w", "h"),
        node("Reshape", "rate first", "r"),
        node("Equal", "r fast", "c"),
        node("If", "c", "y", "choice", then_branch=then, else_branch=other),
        node("ReduceSum", "h axes", "z"),
    ]
    constants = {"w": random(wide, 2), "fast": np.array([16000]), "first": np.array([1])}
    constants |= {name: np.array([n]) for name, n in {"zero": 0, "one": 1, "two": 2, "four": 4}.items()}
    proto = model(nodes, {"x": ("n", "sequence")}, ["y", "z"], constants)
    proto.graph.input.extend([info("rate", (), TensorProto.INT64), info("axes", (1,), TensorProto.INT64)])
    return proto


def test_values_that_are_needed_are_in_the_same_line() -> None:
    """The size that a weight decides is found by trying, and the rate by what it is compared with."""
    proto = settings(wide=512)
    with pytest.raises(ShapeError) as caught:
        from_onnx(proto)
    shapes, values = pasted(caught.value)
    assert shapes == {"x": (1, 512)} and values == {"rate": 16000, "axes": [1]}
    assert "'x' is float32[n, sequence]" in str(caught.value) and "with which it can be imported" in str(caught.value)
    assert from_onnx(proto, shapes=shapes, values=values).outputs["y"].shape == (1, 2)
    with pytest.raises(ValueNeededError) as needed:
        from_onnx(proto, shapes=shapes)
    assert needed.value.inputs == ("rate", "axes") and pasted(needed.value) == ({}, values)
    with pytest.raises(ValueNeededError) as needed:
        from_onnx(proto, shapes=shapes, values={"rate": 8000})
    assert needed.value.inputs == ("axes",)


def test_a_line_whose_numbers_do_not_fit_says_less() -> None:
    with pytest.raises(ShapeError) as caught:
        from_onnx(settings(wide=13))
    assert "the numbers are examples" in str(caught.value) and "with which" not in str(caught.value)
    assert list(pasted(caught.value)[0]) == ["x"]


def test_the_line_keeps_what_was_given_and_leaves_out_what_follows() -> None:
    proto = model(
        [node("ReduceMean", f"{name}", f"m_{name}", keepdims=0) for name in "abcd"]
        + [node("Sum", "m_a m_b m_c m_d", "y")],
        {"a": ("k",), "b": ("n", 3, "k"), "c": ("n", "t"), "d": ("t", "n")},
        ["y"],
    )
    with pytest.raises(ShapeError) as caught:
        from_onnx(proto, shapes={"a": (7,)})
    shapes, _ = pasted(caught.value)
    assert shapes == {"a": (7,), "b": (1, 3, 7), "c": (1, 128)}
    assert all(
        each in str(caught.value)
        for each in ("'b' is float32[n, 3, k]", "'c' is float32[n, t]", "'d' is float32[t, n]")
    )
    assert "'a' is" not in str(caught.value)
    assert from_onnx(proto, shapes=shapes).inputs[3].shape == (128, 1)


@pytest.mark.parametrize(
    ("dims", "shape"),
    [
        (("n", 3, "h", "w"), (1, 3, 224, 224)),
        (("n", None, None, 3), (1, 224, 224, 3)),
        (("batch_size", "sequence_length"), (1, 128)),
        (("batch", "samples"), (1, 16000)),
        (("unk__7", "unk__8", 96), (1, 128, 96)),
        (("DynamicDimension.0", 3, 48, "DynamicDimension.1"), (1, 3, 48, 224)),
        (("batch", 8, "past_sequence_length + 1", 64), (1, 8, 17, 64)),
        (None, (1, 3, 224, 224)),
    ],
)
def test_examples_are_of_the_size_that_such_axes_have(dims: Any, shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError) as caught:
        from_onnx(model([node("Relu", "x", "y")], {"x": dims}, ["y"]))
    assert pasted(caught.value)[0] == {"x": shape}


def test_a_batch_is_bound_where_its_symbol_stands() -> None:
    """A state has the batch in its second axis, and the time may be first."""
    weights = {"w": random(1, 16, 3), "r": random(1, 16, 4)}
    layer = node("LSTM", "x w r - - h c", "y", hidden_size=4)
    states = {"h": (1, "batch", 4), "c": (1, "batch", 4)}
    proto = model([layer], {**states, "x": ("seq", "batch", 3), "z": ("batch", 5)}, ["y"], weights)
    graph = from_onnx(proto, shapes={"x": (6, 2, 3)}, batch=2)
    assert [value.shape for value in graph.inputs] == [(1, 2, 4), (1, 2, 4), (6, 2, 3), (2, 5)]
    with pytest.raises(ShapeError, match="axis 1 of input 'x' is 3 in shapes= and 2 in batch="):
        from_onnx(proto, shapes={"x": (6, 3, 3)}, batch=2)
    arrays = {"h": random(1, 2, 4), "c": random(1, 2, 4), "x": random(6, 2, 3), "z": random(2, 5)}
    assert run(graph, **arrays)["y"].shape == (6, 1, 2, 4)


def test_inputs_of_one_kind_are_told_together() -> None:
    """The caches of a language model, one for each layer: their shapes follow from two inputs."""
    names = [f"past.{i}.{part}" for i in range(12) for part in ("key", "value")]
    inputs: dict[str, Any] = {"ids": ("batch", "seq"), **dict.fromkeys(names, ("batch", 2, "past_seq", 4))}
    nodes = [node("ReduceMean", name, f"m{i}", keepdims=0) for i, name in enumerate(inputs)]
    proto = model([*nodes, node("Sum", " ".join(f"m{i}" for i in range(25)), "y")], inputs, ["y"])
    with pytest.raises(ShapeError) as caught:
        from_onnx(proto)
    told = "'past.0.key', 'past.0.value', 'past.1.key', 'past.1.value' and 20 more are float32[batch, 2, past_seq, 4]"
    assert told in str(caught.value)
    shapes, _ = pasted(caught.value)
    assert shapes == {"ids": (1, 128), "past.0.key": (1, 2, 16, 4)}
    assert from_onnx(proto, shapes=shapes).inputs[-1].shape == (1, 2, 16, 4)
