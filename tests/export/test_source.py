"""Imported files written again: as they were, with the weights of a session."""

from __future__ import annotations

import pickle
import shutil

import ml_dtypes
import numpy as np
import pytest

import foreplan as fp
from foreplan.base.errors import ModelError, UnsupportedError
from foreplan.export import save
from foreplan.graph import Graph
from foreplan.passes.select import SelectOutputs
from tests.export.runtime import near, run
from tests.oracle.peers import onnx
from tests.profile import pick

RNG = np.random.default_rng(7)
X = RNG.normal(size=(4, 12)).astype(np.float32)
TARGET = np.arange(4) % 5


def tensor(name, array):
    return onnx.numpy_helper.from_array(array, name)


def weights(*shape, dtype=np.float32):
    return (RNG.normal(size=shape) / 4).astype(dtype)


def classifier(**changes):
    """A model with what exporters write: a Constant, a ConstantOfShape, an unread tensor, a table, names, metadata."""
    h = onnx.helper
    given = {"w1": weights(12, 30), "w2": weights(30, 5), "table": weights(40, 30), "unread": weights(7)} | changes
    kind = h.np_dtype_to_tensor_dtype(given["w1"].dtype)
    ones = tensor("", np.ones(1, given["w1"].dtype))
    table = onnx.helper.make_tensor_value_info("places", onnx.TensorProto.INT64, ["N"])
    nodes = [
        h.make_node("Cast", ["x"], ["narrow"], "first", to=kind),
        h.make_node("MatMul", ["narrow", "w1"], ["a"], "fc1", doc_string="a product"),
        h.make_node("Constant", [], ["shift"], "c", value=tensor("inner", weights(30, dtype=given["w1"].dtype))),
        h.make_node("Add", ["a", "shift"], ["b"], "add"),
        h.make_node("Constant", [], ["shape"], "s", value_ints=[30]),
        h.make_node("ConstantOfShape", ["shape"], ["gain"], "g", value=ones),
        h.make_node("Mul", ["b", "gain"], ["c"], "mul"),
        h.make_node("Gather", ["table", "places"], ["rows"], "look up"),
        h.make_node("Add", ["c", "rows"], ["d"], "add rows"),
        h.make_node("Relu", ["d"], ["e"], "relu"),
        h.make_node("MatMul", ["e", "w2"], ["f"], "fc2"),
        h.make_node("Cast", ["f"], ["y"], "last", to=onnx.TensorProto.FLOAT),
    ]
    inputs = [h.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["N", 12]), table]
    outputs = [h.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["N", 5])]
    told = [h.make_tensor_value_info("a", kind, ["N", 30])]
    held = [tensor(name, array) for name, array in given.items()]
    graph = h.make_graph(nodes, "the model", inputs, outputs, held, "said of it", told)
    model = h.make_model(graph, opset_imports=[h.make_opsetid("", 17)], producer_name="somebody", ir_version=8)
    h.set_model_props(model, {"labels": "cat, dog"})
    return model


INPUTS = {"x": X, "places": np.array([3, 0, 39, 7])}


def trained(model, **options):
    """A session that has been trained, and the graph."""
    graph = model if isinstance(model, Graph) else fp.from_onnx(model, batch=4)
    options = {"train": ["gain"]} | options
    session = fp.compile(graph, fp.losses.cross_entropy, fp.optim.Momentum(0.5), **options).bind()
    for _ in range(3):
        session.step({**INPUTS, "target": TARGET})
    return session, graph


def outputs(session, graph):
    """Of the model with the session's weights, in foreplan."""
    other = fp.compile(graph, train=["gain"]).bind()
    for name in other.parameters:
        other.parameters[name] = session.parameters[name].astype(other.parameters[name].dtype)
    return other.step(INPUTS).outputs["y"]


def contents(model):
    """Tensors by name, of initializers and of Constants."""
    found = {each.name: onnx.numpy_helper.to_array(each) for each in model.graph.initializer}
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                found[node.output[0]] = onnx.numpy_helper.to_array(attribute.t)
    return found


def bare(model):
    """A model without the contents of its tensors, and without the node that becomes another one."""
    copy = onnx.ModelProto.FromString(model.SerializeToString())
    for each in copy.graph.initializer:
        for field in ("raw_data", "float_data", "external_data", "data_location"):
            each.ClearField(field)
    for node in copy.graph.node:
        if node.name in ("g", "c"):
            node.Clear()
    return copy


@pytest.mark.parametrize("form", ["path", "proto", "external"])
def test_a_file_is_as_it_was_but_for_its_weights(form, tmp_path):
    model = classifier()
    path = tmp_path / "model.onnx"
    onnx.save(onnx.ModelProto.FromString(model.SerializeToString()), path, save_as_external_data=form == "external")
    session, graph = trained(pickle.loads(pickle.dumps(fp.from_onnx(model if form == "proto" else path, batch=4))))
    files = session.to_onnx(tmp_path / "out.onnx")
    written = onnx.load(tmp_path / "out.onnx")
    assert [each.name for each in files] == ["out.onnx"] + ["out.onnx.data"] * (form == "external")
    assert bare(written) == bare(model)
    before, after = contents(model), contents(written)
    assert before.keys() == after.keys()
    same = {name for name in before if np.array_equal(np.broadcast_to(before[name], after[name].shape), after[name])}
    assert same == {"unread"}
    assert all(np.array_equal(after[name], array) for name, array in session.parameters.items())
    assert near(run(tmp_path / "out.onnx", INPUTS)["y"], outputs(session, graph))


def test_frozen_weights_and_those_that_a_step_does_not_read_stay(tmp_path):
    model = classifier()
    onnx.save(model, tmp_path / "model.onnx")
    session, _ = trained(tmp_path / "model.onnx", freeze=["w1", "shift"])
    session.to_onnx(tmp_path / "out.onnx")
    before, after = contents(model), contents(onnx.load(tmp_path / "out.onnx"))
    assert np.array_equal(before["w1"], after["w1"]) and np.array_equal(before["shift"], after["shift"])
    assert not np.array_equal(before["w2"], after["w2"])


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_narrow_weights_go_back_in_their_own_type(dtype, tmp_path):
    names = {"w1": (12, 30), "w2": (30, 5), "table": (40, 30)}
    onnx.save(classifier(**{name: weights(*shape, dtype=dtype) for name, shape in names.items()}), tmp_path / "m.onnx")
    session, _ = trained(tmp_path / "m.onnx")
    session.to_onnx(tmp_path / "out.onnx")
    after = contents(onnx.load(tmp_path / "out.onnx"))
    assert session.parameters["w1"].dtype == np.float32
    assert after["w1"].dtype == dtype and np.array_equal(after["w1"], session.parameters["w1"].astype(dtype))
    assert after["shift"].dtype == dtype and after["gain"].dtype == dtype


def test_a_weight_too_large_for_the_files_type_is_named(tmp_path):
    names = {"w1": (12, 30), "w2": (30, 5), "table": (40, 30)}
    session, _ = trained(classifier(**{name: weights(*shape, dtype=np.float16) for name, shape in names.items()}))
    session.parameters["w2"] = np.full((30, 5), 1e6, np.float32)
    for form in ("model", "graph"):
        with pytest.raises(UnsupportedError, match=r"'w2' holds 1e\+06.*float16"):
            session.to_onnx(tmp_path / "out.onnx", form)
    assert not (tmp_path / "out.onnx").exists()


def test_merged_tensors_are_written_apart(tmp_path):
    """PyTorch's exporter has merged the scales of two normalisations; training moves them apart."""
    h = onnx.helper
    norm = {"axis": -1, "epsilon": 1e-5}
    nodes = [
        h.make_node("LayerNormalization", ["x", "n1.weight", "n1.bias"], ["a"], **norm),
        h.make_node("MatMul", ["a", "fc.weight"], ["b"]),
        h.make_node("LayerNormalization", ["b", "n1.weight", "n1.bias"], ["y"], **norm),
    ]
    held = {"n1.weight": np.ones(5, np.float32), "n1.bias": np.zeros(5, np.float32), "fc.weight": weights(5, 5)}
    graph = h.make_graph(
        nodes,
        "g",
        [h.make_tensor_value_info("x", 1, [4, 5])],
        [h.make_tensor_value_info("y", 1, [4, 5])],
        [tensor(name, array) for name, array in held.items()],
    )
    model = h.make_model(graph, opset_imports=[h.make_opsetid("", 17)], producer_name="pytorch", ir_version=8)
    graph = fp.from_onnx(model)
    session = fp.compile(graph, fp.losses.cross_entropy, fp.optim.SGD(0.5)).bind()
    for _ in range(3):
        session.step({"x": X[:, :5], "target": TARGET})
    session.to_onnx(tmp_path / "out.onnx")
    assert contents(onnx.load(tmp_path / "out.onnx")).keys() == session.parameters.keys()
    other = fp.compile(graph).bind()
    for name in other.parameters:
        other.parameters[name] = session.parameters[name]
    wanted = other.step({"x": X[:, :5]}).outputs["y"]
    assert len(session.parameters) == 5 and near(run(tmp_path / "out.onnx", {"x": X[:, :5]})["y"], wanted)


def test_a_model_that_was_cut_is_written_as_a_graph(tmp_path):
    graph = SelectOutputs(["e"])(fp.from_onnx(classifier(), batch=4))
    session = fp.compile(graph).bind()
    session.to_onnx(tmp_path / "out.onnx")
    assert near(run(tmp_path / "out.onnx", INPUTS)["e"], session.step(INPUTS).outputs["e"])
    assert onnx.load(tmp_path / "out.onnx").producer_name == "foreplan"


def body(nodes, outputs, inputs=(), held=()):
    values = [onnx.helper.make_tensor_value_info(name, kind, shape) for name, kind, shape in (*inputs, *outputs)]
    return onnx.helper.make_graph(nodes, "body", values[: len(inputs)], values[len(inputs) :], list(held))


def matrix(how, name):
    """Nodes and initializers that hold a matrix of some size in the way of some exporter."""
    h, array = onnx.helper, weights(6, 6)
    if how == "initializer":
        return [], [tensor(name, array)]
    if how == "large":  # its bytes stay in the file
        wide = tensor(f"{name}_wide", weights(6, 300))
        return [h.make_node("MatMul", [wide.name, f"{name}_back"], [name])], [
            wide,
            tensor(f"{name}_back", weights(300, 6)),
        ]
    if how == "constant":
        return [h.make_node("Constant", [], [name], value=tensor("", array))], []
    shape, ones = h.make_node("Constant", [], [f"{name}_shape"], value_ints=[6, 6]), tensor("", np.ones(1, np.float32))
    return [shape, h.make_node("ConstantOfShape", [f"{name}_shape"], [name], value=ones)], []


def product(draw, given, read, depth=0):
    """A body that multiplies by a matrix of its own, perhaps in a loop or within a branch of its own."""
    h, held = onnx.helper, []
    nodes, last = [], read
    for i in range(2):
        name = f"{given}{i}"
        what = draw.choice(["product", "loop", "if"] if depth < 2 else ["product"])
        if what == "product":
            made, more = matrix(draw.choice(["initializer", "constant", "filled", "large"]), f"w{name}")
            nodes += [*made, h.make_node("MatMul", [last, f"w{name}"], [name])]
            held += more
        elif what == "loop":
            made, more = matrix(draw.choice(["initializer", "constant", "filled", "large"]), f"w{name}")
            made += [
                h.make_node("MatMul", [f"{name}_in", f"w{name}"], [f"{name}_p"]),
                h.make_node("Tanh", [f"{name}_p"], [f"{name}_out"]),
            ]
            made.append(h.make_node("Identity", ["go"], ["on"]))
            carried = [("i", 7, []), ("go", 9, []), (f"{name}_in", 1, [4, 6])]
            inner = body(made, [("on", 9, []), (f"{name}_out", 1, [4, 6])], carried, more)
            nodes.append(h.make_node("Loop", ["count", "yes", last], [name], body=inner))
        else:
            branches = {
                key: product(draw, f"{key[0]}{name}", last, depth + 1) for key in ("then_branch", "else_branch")
            }
            nodes.append(h.make_node("If", [str(draw.choice(["yes", "no", "positive"]))], [name], **branches))
        last = name
    nodes.append(h.make_node("Tanh", [last], [given]))
    return body(nodes, [(given, 1, [4, 6])], (), held)


@pytest.mark.parametrize("seed", range(pick(1, 3, 8)))
def test_weights_of_branches_and_loops_go_back_into_them(seed, tmp_path):
    """Drawn branches and loops within each other, also chosen by data; a loop holds one for all its steps."""
    draw, h = np.random.default_rng(seed), onnx.helper
    known = {"count": np.array(2), "yes": np.array(True), "no": np.array(False), "zero": np.zeros((), np.float32)}
    inner, branches = (
        product(draw, "y", "x"),
        {"then_branch": product(draw, "p", "x"), "else_branch": product(draw, "z", "x")},
    )
    graph = h.make_graph(
        [
            h.make_node("ReduceMean", ["x"], ["mean"], keepdims=0),
            h.make_node("Greater", ["mean", "zero"], ["positive"]),
            h.make_node("If", ["positive"], ["b"], "choice", **branches),
            *inner.node,
            h.make_node("Add", ["y", "b"], ["sum"]),
        ],
        "g",
        [h.make_tensor_value_info("x", 1, [4, 6])],
        [h.make_tensor_value_info("sum", 1, [4, 6])],
        [*(tensor(name, array) for name, array in known.items()), *inner.initializer],
    )
    model = h.make_model(graph, opset_imports=[h.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, tmp_path / "in.onnx")
    graph = fp.from_onnx(tmp_path / "in.onnx")
    for given in (X[:, :6], -X[:, :6]):
        x = {"x": given + np.sign(given.mean())}
        session = fp.compile(graph, fp.losses.mse, fp.optim.SGD(0.5), target="numpy").bind()
        for _ in range(2):
            session.step({**x, "target": np.zeros((4, 6), np.float32)})
        session.to_onnx(tmp_path / "out.onnx")
        other = fp.compile(graph, target="numpy").bind()
        assert near(run(tmp_path / "in.onnx", x)["sum"], other.step(x).outputs["sum"])
        changed = [name for name in other.parameters if (session.parameters[name] != other.parameters[name]).any()]
        assert changed
        for name in other.parameters:
            other.parameters[name] = session.parameters[name]
        assert near(run(tmp_path / "out.onnx", x)["sum"], other.step(x).outputs["sum"])
        assert not near(run(tmp_path / "in.onnx", x)["sum"], other.step(x).outputs["sum"])
        again = fp.compile(fp.from_onnx(tmp_path / "out.onnx"), target="numpy").bind()
        assert all((again.parameters[name] == session.parameters[name]).all() for name in changed)


def test_a_weight_of_a_function_is_named(tmp_path):
    """Its calls have become weights of their own, and the file has one."""
    h = onnx.helper
    nodes = [
        h.make_node("Constant", [], ["within"], value=tensor("", weights(6, 6))),
        h.make_node("MatMul", ["state", "within"], ["next"]),
    ]
    function = h.make_function("own", "step", ["state"], ["next"], nodes, [h.make_opsetid("", 17)])
    graph = h.make_graph(
        [h.make_node("step", ["x"], ["a"], domain="own"), h.make_node("step", ["a"], ["y"], domain="own")],
        "g",
        [h.make_tensor_value_info("x", 1, [4, 6])],
        [h.make_tensor_value_info("y", 1, [4, 6])],
    )
    imports = [h.make_opsetid("", 17), h.make_opsetid("own", 1)]
    model = h.make_model(graph, opset_imports=imports, ir_version=8, functions=[function])
    session = fp.compile(fp.from_onnx(model), fp.losses.cross_entropy, fp.optim.SGD(0.5)).bind()
    (unchanged,) = session.to_onnx(tmp_path / "out.onnx")
    assert onnx.load(unchanged) == model
    session.step({"x": X[:, :6], "target": TARGET})
    with pytest.raises(UnsupportedError, match=r"no place for .*within.*form='graph'"):
        session.to_onnx(tmp_path / "no.onnx")
    session.to_onnx(tmp_path / "graph.onnx", "graph")
    assert run(tmp_path / "graph.onnx", {"x": X[:, :6]})["y"].shape == (4, 6)


def test_a_file_that_is_gone_or_another_one_is_said(tmp_path):
    """What a session holds is written without it."""
    path, kept = tmp_path / "model.onnx", tmp_path / "kept.onnx"
    onnx.save(classifier(unread=weights(7)), path)
    shutil.copy(path, kept)
    session, _ = trained(path)
    path.unlink()
    session.to_onnx(tmp_path / "out.onnx")
    onnx.save(classifier(unread=weights(700)), path)
    session, _ = trained(path)
    shutil.copy(kept, path)
    with pytest.raises(ModelError, match=r"does not hold the tensor 'unread'.*another file"):
        session.to_onnx(tmp_path / "no.onnx")
    path.unlink()
    with pytest.raises(ModelError, match=r"does not hold the tensor 'unread'.*there is no such file"):
        session.to_onnx(tmp_path / "no.onnx")
    assert not (tmp_path / "no.onnx").exists()


@pytest.mark.parametrize("external", [False, True])
def test_a_file_may_be_written_in_its_own_place(external, tmp_path):
    path, beside = tmp_path / "model.onnx", {"location": "model.onnx.data", "size_threshold": 0}
    onnx.save(classifier(unread=weights(700)), path, save_as_external_data=external, **beside if external else {})
    session, graph = trained(path)
    wanted = outputs(session, graph)
    session.to_onnx(path)
    assert near(run(path, INPUTS)["y"], wanted)


@pytest.mark.parametrize("place", ["model", "graph", "node", "tensor"])
def test_texts_that_are_none_stay_as_they_are(place, tmp_path):
    model = classifier()
    at = {"model": model, "graph": model.graph, "node": model.graph.node[0], "tensor": model.graph.initializer[0]}
    at[place].doc_string = "WRITTEN IN"
    broken = model.SerializeToString().replace(b"WRITTEN IN", b"WR\xff\xfeTEN\x80IN")
    (tmp_path / "model.onnx").write_bytes(broken)
    for given in (tmp_path / "model.onnx", onnx.ModelProto.FromString(broken)):
        session, _ = trained(given)
        session.to_onnx(tmp_path / "out.onnx")
        assert b"WR\xff\xfeTEN\x80IN" in (tmp_path / "out.onnx").read_bytes()


@pytest.mark.parametrize("form", ["model", "graph"])
def test_large_weights_go_to_a_file_beside_the_model(form, tmp_path, monkeypatch):
    session, graph = trained(classifier())
    monkeypatch.setattr(save, "MOST_BYTES", 4000)
    files = session.to_onnx(tmp_path / "out.onnx", form)
    assert [each.name for each in files] == ["out.onnx", "out.onnx.data"]
    assert files[0].stat().st_size < 4000 < files[1].stat().st_size
    assert near(run(tmp_path / "out.onnx", INPUTS)["y"], outputs(session, graph))


def test_a_large_constant_goes_back_into_its_node_without_the_file(tmp_path):
    path = tmp_path / "model.onnx"
    model = classifier()
    node = model.graph.node.add(op_type="Constant", name="large", output=["large"])
    node.attribute.append(onnx.helper.make_attribute("value", tensor("", weights(12, 30))))
    model.graph.node.insert(0, model.graph.node.pop())
    (product,) = [each for each in model.graph.node if each.name == "fc1"]
    product.input[1] = "large"
    del model.graph.initializer[0]
    onnx.save(model, path)
    session, _ = trained(path)
    path.unlink()
    session.to_onnx(tmp_path / "out.onnx")
    after = contents(onnx.load(tmp_path / "out.onnx"))
    assert np.array_equal(after["large"], session.parameters["large"]) and "large" in session.parameters
