"""Which tensors of a file are trained, and why: by what the exporter tells, by names, uses and numbers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

import foreplan as fp
from foreplan.frontend.onnx import from_onnx
from foreplan.graph import Kind
from tests.frontend.onnx.models import model, node, random

P, C, B, F = Kind.PARAMETER, Kind.CONSTANT, Kind.BUFFER, Kind.FROZEN
ADJACENT = np.kron(np.eye(4, dtype=np.float32), np.ones((2, 2), np.float32))  # [8, 8], symmetric, mostly zeros
ANGLES = np.outer(np.arange(6), 10_000.0 ** -(np.arange(0, 8, 2) / 8))
SINES = np.stack([np.sin(ANGLES), np.cos(ANGLES)], -1).reshape(6, 8).astype(np.float32)
CAUSAL = np.triu(np.full((6, 6), -1e9, np.float32), 1)


def kinds_of(
    nodes: list[onnx.NodeProto],
    constants: Mapping[str, np.ndarray],
    shape: tuple[int, ...] = (2, 6, 8),
    output: str = "y",
    producer: str = "",
    told: Mapping[str, str] | None = None,
    **choice: list[str],
) -> dict[str, Kind]:
    proto = model(nodes, {"x": shape}, [output], dict(constants))
    proto.producer_name = producer
    for name, kind in (told or {}).items():
        info = helper.make_tensor_value_info(name, 1, constants[name].shape)
        info.metadata_props.add(key="pkg.torch.export.graph_signature.InputSpec.kind", value=kind)
        proto.graph.value_info.append(info)
    graph = from_onnx(proto, **choice)
    assert all(value.why for value in graph.stored if value.name in constants and value.dtype.is_float)
    return {value.name: value.kind for value in graph.stored if value.name in constants}


@pytest.mark.parametrize("name, kind", [("layers.0.weight", P), ("val_3", P), ("onnx::MatMul_12", P), ("w", P)])
def test_a_matrix_of_a_product_is_trained_whatever_it_is_called(name: str, kind: Kind) -> None:
    assert kinds_of([node("MatMul", f"x {name}", "y")], {name: random(8, 5)}) == {name: kind}


@pytest.mark.parametrize(
    "name, kind",
    [
        ("attn.scale", P),
        ("norm.offset", P),
        ("val_3", C),
        ("onnx::Add_12", P),
        ("/attn/Constant_output_0", C),
        ("b", P),
    ],
)
def test_what_is_added_or_multiplied_is_trained_where_a_module_calls_it_so(name: str, kind: Kind) -> None:
    """Of other files a vector, or what stands in the file, is a bias or a gain."""
    for op in ("Add", "Mul"):
        assert kinds_of([node(op, f"x {name}", "y")], {name: random(8)}) == {name: kind}


@pytest.mark.parametrize("op", ["Sub", "Div", "Pow", "Min"])
def test_what_a_module_has_by_name_is_trained_in_any_op(op: str) -> None:
    assert kinds_of([node(op, "x mixer.gate", "y")], {"mixer.gate": random(8)}) == {"mixer.gate": P}
    assert kinds_of([node(op, "x shift", "y")], {"shift": random(8)}) == {"shift": C}
    assert kinds_of([node(op, "x shift", "y")], {"shift": random(8)}, producer="pytorch") == {"shift": P}


@pytest.mark.parametrize("op", ["Exp", "Neg", "Softplus", "Sigmoid"])
def test_what_is_computed_from_a_modules_tensor_makes_a_parameter_of_it(op: str) -> None:
    """CLIP's logit_scale, Mamba's A."""
    nodes = [node(op, "m.A_log", "a"), node("Mul", "x a", "y")]
    for shape in ((8,), ()):
        assert kinds_of(nodes, {"m.A_log": random(*shape)}) == {"m.A_log": P}


@pytest.mark.parametrize(
    "name, numbers",
    [
        ("attn.attn_mask", random(6, 6)),
        ("rotary.cos_cached", random(6, 8)),
        ("encoder.pe", random(6, 8)),
        ("gcn.adj", random(6, 8)),
        ("positions.table", SINES),
        ("gcn.links", ADJACENT[:6]),
        ("decoder.bias", CAUSAL),
    ],
)
def test_tables_and_masks_that_modules_have_are_not_trained(name: str, numbers: np.ndarray) -> None:
    nodes = [node("Add", f"x {name}", "y")]
    shape = (2, *numbers.shape)
    assert kinds_of(nodes, {name: numbers}, shape) == {name: C}
    assert kinds_of(nodes, {name: numbers}, shape, train=[name]) == {name: P}


def test_a_learned_bias_with_a_row_of_padding_is_no_mask() -> None:
    """Such as of the distances of atoms, for each head (Ying and others, 2021)."""
    bias, slopes = random(13, 16), -np.abs(np.arange(13)[:, None] - np.arange(16)) * np.float32(0.25)
    for numbers, kind in ((bias, P), (slopes, C)):
        numbers[0] = -np.inf
        assert kinds_of([node("Add", "x m.far.weight", "y")], {"m.far.weight": numbers}, (2, 13, 16)) == {
            "m.far.weight": kind
        }


@pytest.mark.parametrize("scale", [np.float32(0.0187), random(1), random(5)])
@pytest.mark.parametrize("between", ["scales", "products"])
def test_a_scale_of_a_matrix_of_integers_is_not_trained(scale: np.ndarray, between: str) -> None:
    """As ONNX Runtime writes dynamic quantisation, and with one scale after the other."""
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"]),
        node("MatMulInteger", "q fc.weight_quantized z", "i"),
        node("Cast", "i", "f", to=1),
        node("Mul", "s fc.weight_scale" if between == "scales" else "f fc.weight_scale", "t"),
        node("Mul", "f t" if between == "scales" else "t s", "u"),
        node("Add", "u fc.bias", "y"),
    ]
    integers = (50 * random(8, 5)).astype(np.int8)
    constants = {"fc.weight_quantized": integers, "fc.weight_scale": scale, "fc.bias": random(5)}
    found = kinds_of(nodes, constants)
    assert (found.get("fc.weight_scale", C), found["fc.bias"]) == (C, P)  # one number is no tensor of the graph


def test_a_symmetric_matrix_is_a_table() -> None:
    full = random(8, 8)
    for numbers, kind in ((full, P), (full + full.T, C), (np.eye(8, dtype=np.float32), C)):
        assert kinds_of([node("MatMul", "x net.mixing", "y")], {"net.mixing": numbers}) == {"net.mixing": kind}


@pytest.mark.parametrize("name", ["block.bias", "val_1", "b"])
@pytest.mark.parametrize("between", ["", "Reshape", "Cast"])
def test_what_is_added_to_scores_is_a_mask_but_a_bias_is_none(name: str, between: str) -> None:
    nodes = [node("Add", f"x {name}", "s"), node("Softmax", "s", "y", axis=-1)]
    more: dict[str, np.ndarray] = {}
    if between == "Reshape":
        nodes = [nodes[0], node("Reshape", "s to", "r"), node("Softmax", "r", "y", axis=-1)]
        more = {"to": np.array([2, 48])}
    elif between == "Cast":
        nodes = [nodes[0], node("Cast", "s", "r", to=1), node("Softmax", "r", "y", axis=-1)]
    assert kinds_of(nodes, {name: random(6, 8)} | more)[name] == C
    wanted = C if name == "val_1" else P
    assert kinds_of(nodes, {name: random(8)} | more)[name] == wanted


def test_a_table_of_relative_positions_is_trained_though_it_reaches_scores() -> None:
    nodes = [node("Gather", "attn.table places", "b"), node("Add", "x b", "s"), node("Softmax", "s", "y", axis=-1)]
    constants = {"attn.table": random(11, 8), "places": np.array([3, 1, 0, 2, 5, 4])}
    assert kinds_of(nodes, constants)["attn.table"] == P


def test_a_graph_of_many_ways_to_a_softmax_is_walked_once() -> None:
    width, depth = 30, 6
    nodes, before = [node("Add", "x table", "s")], ["s"] * width
    for layer in range(depth):
        after = [f"a{layer}.{i}" for i in range(width)]
        nodes += [helper.make_node("Sum", before, [name]) for name in after]
        before = after
    nodes.append(node("Relu", before[0], "y"))
    assert kinds_of(nodes, {"table": random(6, 8)}) == {"table": P}


def test_a_node_with_fewer_inputs_than_its_op_has_is_refused_and_no_crash() -> None:
    body = helper.make_graph([], "body", [], [])
    proto = model([helper.make_node("Add", ["c"], ["y"], extra=body)], {"x": (2, 8)}, ["y"], {"c": random(8)})
    with pytest.raises(fp.ForeplanError):
        from_onnx(proto)


@pytest.mark.parametrize("op", ["Less", "Greater", "Equal"])
def test_what_is_only_compared_is_not_trained(op: str) -> None:
    nodes = [node(op, "x net.limit", "c"), node("Cast", "c", "f", to=1), node("Mul", "x f", "y")]
    assert kinds_of(nodes, {"net.limit": random(8)}) == {"net.limit": C}
    nodes.append(node("Add", "y net.limit", "z"))
    assert kinds_of(nodes, {"net.limit": random(8)}, output="z") == {"net.limit": P}


def test_what_the_exporter_tells_counts_before_names_and_uses() -> None:
    nodes = [node("MatMul", "x a.weight", "h"), node("Add", "h a.mask", "y")]
    constants = {"a.weight": random(8, 8), "a.mask": random(8)}
    told = {"a.weight": "BUFFER", "a.mask": "PARAMETER"}
    assert kinds_of(nodes, constants, told=told) == {"a.weight": C, "a.mask": P}


def test_norms_without_scale_and_shift_have_none_to_train() -> None:
    """An exporter writes ones and zeros in their place."""
    nodes = [node("LayerNormalization", "x val_1 val_2", "y")]
    unit = {"val_1": np.ones(8, np.float32), "val_2": np.zeros(8, np.float32)}
    assert kinds_of(nodes, unit) == {"val_1": C, "val_2": C}
    assert kinds_of(nodes, {"val_1": random(8), "val_2": random(8)}) == {"val_1": P, "val_2": P}
    nodes = [node("LayerNormalization", "x n.weight n.bias", "y")]
    named = {"n.weight": np.ones(8, np.float32), "n.bias": np.zeros(8, np.float32)}
    assert kinds_of(nodes, named) == {"n.weight": P, "n.bias": P}


def test_products_of_constants_are_tables_and_no_weights() -> None:
    """Rotary positions: frequencies times places, then a cosine."""
    nodes = [node("MatMul", "t f", "a"), node("Cos", "a", "c"), node("Mul", "x c", "y")]
    constants = {"t": np.arange(6, dtype=np.float32).reshape(6, 1), "f": random(1, 8)}
    proto = model(nodes, {"x": (2, 6, 8)}, ["y"], constants)
    assert not from_onnx(proto).parameters


def test_biases_inside_functions_are_trained_as_outside() -> None:
    body = helper.make_function(
        "my",
        "Dense",
        ["x", "w", "b"],
        ["y"],
        [node("MatMul", "x w", "h"), node("Add", "h b", "y")],
        [helper.make_opsetid("", 18)],
    )
    for names in (("fc.weight", "fc.bias"), ("w", "b")):
        call = helper.make_node("Dense", ["x", *names], ["y"], domain="my")
        constants = dict(zip(names, (random(8, 5), random(5))))
        proto = model([call], {"x": (2, 8)}, ["y"], constants, functions=[body], domains=["my"])
        assert {value.name for value in from_onnx(proto).parameters} == set(names)


def test_a_function_called_twice_uses_what_it_is_given_each_time() -> None:
    body = helper.make_function(
        "my", "Shift", ["x", "b"], ["y"], [node("Add", "x b", "y")], [helper.make_opsetid("", 18)]
    )
    calls = [
        helper.make_node("Shift", ["x", "mean"], ["h"], domain="my"),
        helper.make_node("Shift", ["h", "x"], ["y"], domain="my"),
    ]
    proto = model(calls, {"x": (2, 8)}, ["y"], {"mean": random(8)}, functions=[body], domains=["my"])
    assert [value.name for value in from_onnx(proto).parameters] == ["mean"]


def test_patterns_have_the_last_word() -> None:
    nodes = [node("MatMul", "x a.weight", "h"), node("Add", "h a.bias", "y")]
    constants = {"a.weight": random(8, 8), "a.bias": random(8)}
    assert kinds_of(nodes, constants, freeze=["a"]) == {"a.weight": F, "a.bias": F}
    assert kinds_of(nodes, constants, freeze=["*"], train=["*.bias"]) == {"a.weight": F, "a.bias": P}
    with pytest.raises(fp.UsageError, match="no weight of the model is called 'b'; there are 'a'"):
        kinds_of(nodes, constants, freeze=["b"])


def test_one_number_that_a_module_trains_is_no_part_of_an_expression() -> None:
    assert kinds_of([node("Mul", "x net.alpha", "y")], {"net.alpha": np.float32([0.5]).reshape(())}) == {"net.alpha": P}
    graph = from_onnx(model([node("Mul", "x half", "y")], {"x": (2, 8)}, ["y"], {"half": np.float32([0.5])}))
    assert not graph.stored


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="needs /proc/self/io, where Linux counts what is read")
def test_most_of_a_large_weight_stays_unread(tmp_path: Path) -> None:
    path, n = tmp_path / "model.onnx", 1024
    onnx.save(model([node("MatMul", "x net.weight", "y")], {"x": (3, n)}, ["y"], {"net.weight": random(n, n)}), path)
    code = (
        "import os, pathlib, sys; from foreplan.frontend.onnx.tables import table_like\n"
        "from foreplan.frontend.onnx.load import load_model; path = pathlib.Path(sys.argv[1])\n"
        "def read(): return int(open('/proc/self/io').read().split('read_bytes: ')[1].split()[0])\n"
        "(tensor,) = load_model(path).proto.graph.initializer; file = os.open(path, os.O_RDONLY); os.fsync(file)\n"
        "os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED); before = read()\n"
        "assert table_like(tensor, path) == ''; print(read() - before)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert int(done.stdout) <= 0.2 * 4 * n * n


def test_large_tables_are_known_by_few_of_their_numbers(tmp_path: Path) -> None:
    nodes = [node("MatMul", "net.links x", "y")]
    wide = np.kron(np.eye(300, dtype=np.float32), np.ones((2, 2), np.float32))
    for numbers, kind in ((wide, C), (random(600, 600), P)):
        path = tmp_path / "model.onnx"
        onnx.save(model(nodes, {"x": (600, 3)}, ["y"], {"net.links": numbers}), path)
        (found,) = [value for value in from_onnx(path).stored if value.name == "net.links"]
        assert found.kind is kind


# What an exporter has lost.


def notes_of(nodes: list[onnx.NodeProto], constants: Mapping[str, np.ndarray], shape: tuple[int, ...]) -> list[str]:
    proto = model(nodes, {"x": shape}, ["y"], dict(constants))
    if "ids" in constants:
        proto.graph.input[0].type.tensor_type.elem_type = onnx.TensorProto.INT64
    return list(from_onnx(proto).notes)


@pytest.mark.parametrize("weight, folded", [("onnx::Conv_12", True), ("stem.conv.weight", False), ("w", False)])
def test_weights_of_convolutions_that_the_exporter_computed_are_told(weight: str, folded: bool) -> None:
    constants = {weight: random(4, 3, 3, 3), **{f"bn.{name}": np.ones(4, np.float32) for name in "abcd"}}
    (note,) = notes_of([node("Conv", f"x {weight}", "y")], constants, (1, 3, 8, 8)) or [""]
    assert ("batch normalisation is probably folded" in note) == folded
    kept = [node("Conv", f"x {weight}", "h"), node("BatchNormalization", "h bn.a bn.b bn.c bn.d", "y")]
    assert not notes_of(kept, constants, (1, 3, 8, 8))


def test_weights_of_convolutions_that_are_told_of_less_than_others_are_folded() -> None:
    proto = model(
        [node("Conv", "x c.weight c.bias", "y")],
        {"x": (1, 3, 8, 8)},
        ["y"],
        {"c.weight": random(4, 3, 3, 3), "c.bias": random(4)},
    )
    info = helper.make_tensor_value_info("c.bias", 1, (4,))
    info.metadata_props.add(key="pkg.torch.export.graph_signature.InputSpec.kind", value="PARAMETER")
    proto.graph.value_info.append(info)
    (note,) = from_onnx(proto).notes
    assert "1 of 1 convolutions, such as 'c.weight'" in note


def test_what_the_exporter_computed_is_told_where_it_is_no_weight() -> None:
    """From a parameter that is sliced or squashed, or from a table: the file does not say."""
    for name, told in (("val_3", True), ("block.shift", False)):
        found = notes_of([node("Add", f"x {name}", "y")], {name: random(8)}, (2, 8))
        assert [note for note in found if f"has computed '{name}'" in note] == found and bool(found) == told
    assert not notes_of([node("Mul", "x val_3", "y")], {"val_3": np.float32([2.0])}, (2, 8))


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("change, tied", [(0.0, True), (1e-3, False)])
@pytest.mark.parametrize("rows", [9, 700])
def test_embeddings_that_stand_in_the_file_twice_are_told(turned: bool, change: float, tied: bool, rows: int) -> None:
    table = random(rows, 4)
    other = table + np.float32(change)
    nodes = [node("Gather", "emb.weight x", "h")]
    nodes += [node("MatMul", "h head", "y")] if turned else [node("Gemm", "h head", "y", transB=1)]
    shape = (3, 5) if turned else (3,)
    proto = model(nodes, {"x": shape}, ["y"], {"emb.weight": table, "head": other.T.copy() if turned else other})
    proto.graph.input[0].type.tensor_type.elem_type = onnx.TensorProto.INT64
    found = from_onnx(proto).notes
    assert bool(found) == tied and (not tied or "'emb.weight' and 'head' hold the same numbers" in found[0])


# What an exporter has merged.


ONES, ZEROS = np.ones(8, np.float32), np.zeros(8, np.float32)


def stored_of(nodes: list[onnx.NodeProto], constants: Mapping[str, np.ndarray], shape: tuple[int, ...]) -> fp.Graph:
    proto = model(nodes, {"x": shape}, ["y"], dict(constants))
    proto.producer_name = "pytorch"
    before = proto.SerializeToString()
    graph = from_onnx(proto)
    assert proto.SerializeToString() == before  # the caller's model stays as it is
    return graph


def test_fresh_norms_that_share_tensors_are_trained_each_by_itself() -> None:
    nodes = [node("LayerNormalization", "x n1.weight n1.bias", "a"), node("Relu", "a", "b")]
    nodes.append(node("LayerNormalization", "b n1.weight n1.bias", "y"))
    graph = stored_of(nodes, {"n1.weight": ONES, "n1.bias": ZEROS}, (2, 8))
    assert {value.name for value in graph.parameters} == {"n1.weight", "n1.bias", "y.weight", "y.bias"}
    assert "merged tensors that were equal; 'y.weight', 'y.bias' have" in graph.notes[0]
    used = {"n1.weight": random(8), "n1.bias": random(8)}
    assert {value.name for value in stored_of(nodes, used, (2, 8)).parameters} == set(used)


def test_fresh_batch_norm_whose_scale_is_its_variance_keeps_statistics() -> None:
    nodes = [node("BatchNormalization", "x bn.weight bn.bias bn.bias bn.weight", "y")]
    graph = stored_of(nodes, {"bn.weight": ONES, "bn.bias": ZEROS}, (2, 8, 3))
    kinds = {value.name: value.kind for value in graph.stored}
    assert kinds == {"bn.weight": P, "bn.bias": P, "bn.running_mean": B, "bn.running_var": B}
    step = fp.compile(graph, fp.losses.mean, fp.optim.SGD(0.1))
    session = step.bind()
    session.step({"x": random(2, 8, 3) + 3.0})
    assert (session.stored["bn.running_mean"] != 0).all() and (session.parameters["bn.bias"] != 0).all()


def test_names_that_an_identity_keeps_are_tensors_of_their_own() -> None:
    nodes = [
        node("Identity", "n1.weight", "n2.weight"),
        node("Mul", "x n1.weight", "a"),
        node("Mul", "a n2.weight", "y"),
    ]
    for numbers in (ONES, random(8)):
        graph = stored_of(nodes, {"n1.weight": numbers}, (2, 8))
        assert [value.name for value in graph.parameters] == ["n1.weight", "n2.weight"]
    inside = [node("Identity", "n1.weight", "/copy/Identity_output_0"), node("Mul", "x /copy/Identity_output_0", "y")]
    assert [value.name for value in stored_of(inside, {"n1.weight": ONES}, (2, 8)).parameters] == ["n1.weight"]


@pytest.mark.parametrize(
    "sources, kind",
    [
        (["pos", "val_4"], P),
        (["clone", "encoder.scale", "val_4"], P),
        (["mul_3", "slice_4", "val_4"], C),
        (["rotary.inv_freq", "arange"], C),
        ([], C),
    ],
)
def test_what_was_computed_from_a_parameter_is_trained(sources: list[str], kind: Kind) -> None:
    """The exporter lists all that it computed with, results of its own included."""
    proto = model([node("Mul", "x slice_1", "y")], {"x": (2, 6, 8)}, ["y"], {"slice_1": random(6, 8)})
    proto.producer_name = "pytorch"
    info = helper.make_tensor_value_info("slice_1", 1, (6, 8))
    info.metadata_props.add(key="pkg.onnxscript.optimizer.folded_from", value=str(sources))
    told = helper.make_tensor_value_info("y", 1, (2, 6, 8))
    told.metadata_props.add(key="pkg.torch.export.graph_signature.InputSpec.kind", value="PARAMETER")
    proto.graph.value_info.extend([info, told])
    (value,) = from_onnx(proto).stored
    assert value.kind is kind
