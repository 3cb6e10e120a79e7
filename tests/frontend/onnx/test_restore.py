"""Files of PyTorch's exporters made as the module has it: what they have merged, doubled, left out or renamed.

The metadata are those that files of torch 2.13 have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import pytest
from onnx import helper

import foreplan as fp
from foreplan.base.errors import ModelError
from foreplan.frontend.onnx import from_onnx
from foreplan.graph import Graph, Kind
from tests.frontend.onnx.models import kinds, model, node, random, run

P, C, B = Kind.PARAMETER, Kind.CONSTANT, Kind.BUFFER
ONES, ZEROS = np.ones(8, np.float32), np.zeros(8, np.float32)
LINEAR, NORM = "torch.ops.aten.linear.default", "torch.ops.aten.layer_norm.default"


def called(made: onnx.NodeProto, value: str, op: str, args: str, scope: str = "", kind: str = "") -> onnx.NodeProto:
    """A node with the call that it was made of: `%value = op(args)`, in a module of a path and of a class."""
    written = f"%{value} : [num_users=1] = call_function[target={op}](args = ({args},), kwargs = {{}})"
    made.metadata_props.add(key="pkg.torch.onnx.fx_node", value=written)
    made.metadata_props.add(key="pkg.torch.onnx.name_scopes", value=str(["", scope, value]))
    if kind:
        made.metadata_props.add(key="pkg.torch.onnx.class_hierarchy", value=str(["Model", kind, op]))
    return made


def exported(
    nodes: Sequence[onnx.NodeProto],
    constants: Mapping[str, np.ndarray],
    parameters: str,
    buffers: str = "",
    folded: Mapping[str, str] | None = None,
    changes: Mapping[str, str] | None = None,
    shape: tuple[int, ...] = (3, 8),
    old: bool = False,
) -> onnx.ModelProto:
    """A file of the exporter.

    Args:
        parameters: names in the module; those in the program have `p_`, and `_` for dots.
        buffers: so too, with `b_`.
        folded: tensor of the file → what the exporter has computed it from.
        changes: result → the buffer whose next content it is.
        old: write the signature as PyTorch did up to 2.6.
    """
    proto = model(nodes, {"x": shape}, ["y"], dict(constants))
    proto.producer_name = "pytorch"
    lines, specs = [], []
    for number, (prefix, kind, names) in enumerate((("p", "PARAMETER", parameters), ("b", "BUFFER", buffers))):
        for name in names.split():
            short = f"{prefix}_{name.replace('.', '_')}"
            lines.append(f"{short}: {kind} target='{name}'")
            arg = f"arg=TensorArgument(name='{short}')"
            specs.append(f"InputSpec(kind=<InputKind.{kind}: {number + 2}>, {arg}, target='{name}', persistent=None)")
    lines += ["x: USER_INPUT", "", "# outputs"]
    lines += [f"{name}: BUFFER_MUTATION target='{buffer}'" for name, buffer in (changes or {}).items()]
    text = (
        f"ExportGraphSignature(input_specs=[{', '.join(specs)}])" if old else "\n# inputs\n" + "\n".join(lines) + "\n"
    )
    proto.graph.metadata_props.add(key="pkg.torch.export.ExportedProgram.graph_signature", value=text)
    for name, source in (folded or {}).items():
        told = helper.make_tensor_value_info(name, 1, constants[name].shape)
        told.metadata_props.add(key="pkg.onnxscript.optimizer.folded_from", value=str(source.split()))
        proto.graph.value_info.append(told)
    return proto


def restored(proto: onnx.ModelProto) -> Graph:
    """The imported file, which stays as it is."""
    before = proto.SerializeToString()
    graph = from_onnx(proto)
    assert proto.SerializeToString() == before
    return graph


def trained(proto: onnx.ModelProto) -> set[str]:
    return {value.name for value in restored(proto).parameters}


# Merged tensors.


def two_layers(second: str, scope: str = "b", old: bool = False) -> onnx.ModelProto:
    """A layer `a`, and one that reads the same matrix and the same bias; its call names `second`."""
    nodes = [
        called(node("MatMul", "x val_0", "h"), "linear", LINEAR, "%x, %p_a_weight, %p_a_bias", "a"),
        called(node("Add", "h a.bias", "linear"), "linear", LINEAR, "%x, %p_a_weight, %p_a_bias", "a"),
        called(node("MatMul", "linear val_0", "g"), "linear_1", LINEAR, f"%linear, {second}", scope),
        called(node("Add", "g a.bias", "y"), "linear_1", LINEAR, f"%linear, {second}", scope),
    ]
    constants = {"val_0": random(8, 8), "a.bias": random(8)}
    return exported(nodes, constants, "a.weight a.bias b.weight b.bias", folded={"val_0": "a.weight"}, old=old)


@pytest.mark.parametrize("old", [False, True])
def test_a_copy_of_a_layer_has_tensors_of_its_own_under_their_names(old: bool) -> None:
    graph = restored(two_layers("%p_b_weight, %p_b_bias", old=old))
    assert {value.name for value in graph.parameters} == {"val_0", "a.bias", "b.weight.val_0", "b.bias"}
    whys = {value.name: value.why for value in graph.parameters}
    assert whys["b.bias"] == "a parameter, as the exporter says"
    assert whys["b.weight.val_0"] == "computed by the exporter from 'b.weight'"
    assert graph.notes == (
        "the exporter has merged tensors that were equal; 'b.weight.val_0', 'b.bias' have their own content again",
    )


@pytest.mark.parametrize("second", ["%p_a_weight, %p_a_bias", "%t, %alias"])
def test_what_the_module_ties_stays_tied(second: str) -> None:
    """The calls name the tensors of `a`, or none, and nothing says that `b` has any that are read."""
    assert trained(two_layers(second)) == {"val_0", "a.bias"}


@pytest.mark.parametrize("bias, apart", [("%p_b_bias", True), ("%alias", False)])
def test_what_is_computed_before_its_call_is_of_the_module_that_it_stands_in(bias: str, apart: bool) -> None:
    """`x @ self.weight.t()`: the call names the turned matrix. What is never read may be another name."""
    found = trained(two_layers(f"%t_1, {bias}"))
    assert ("b.weight.val_0" in found) == apart == ("b.bias" in found)


def test_statistics_that_are_merged_with_scales_are_told_by_the_order_of_the_call() -> None:
    args = "%x, %p_n_weight, %p_n_bias, %b_n_mean, %b_n_var, True, 0.1, 1e-05"
    norm = node("BatchNormalization", "x n.weight n.bias n.bias n.weight", "y")
    call = called(norm, "batch", "torch.ops.aten._native_batch_norm_legit_functional.default", args, "n")
    proto = exported([call], {"n.weight": ONES, "n.bias": ZEROS}, "n.weight n.bias", "n.mean n.var", shape=(3, 8, 4))
    assert kinds(restored(proto)) == {"n.weight": P, "n.bias": P, "n.mean": B, "n.var": B}


def test_a_fresh_norm_that_is_called_twice_is_one() -> None:
    nodes = [
        called(node("LayerNormalization", "x n.weight n.bias", "h"), "h", NORM, "%x, [8], %p_n_weight, %p_n_bias", "n"),
        called(node("LayerNormalization", "h n.weight n.bias", "g"), "g", NORM, "%h, [8], %p_n_weight, %p_n_bias", "n"),
        called(node("LayerNormalization", "g n.weight n.bias", "y"), "y", NORM, "%g, [8], %p_m_weight, %p_m_bias", "m"),
    ]
    proto = exported(nodes, {"n.weight": ONES, "n.bias": ZEROS}, "n.weight n.bias m.weight m.bias")
    assert trained(proto) == {"n.weight", "n.bias", "m.weight", "m.bias"}


def test_norms_whose_calls_another_tool_has_dropped_are_taken_for_two() -> None:
    nodes = [node("LayerNormalization", "x n.weight n.bias", "h"), node("LayerNormalization", "h n.weight n.bias", "y")]
    proto = exported(nodes, {"n.weight": ONES, "n.bias": ZEROS}, "n.weight n.bias m.weight m.bias")
    assert trained(proto) == {"n.weight", "n.bias", "y.weight", "y.bias"}


def test_numbers_of_a_call_that_are_merged_with_a_parameter_are_not_trained() -> None:
    """A normalisation without scale: the exporter writes ones, and merges them with the scale of another one."""
    nodes = [
        called(node("LayerNormalization", "x n.weight n.bias", "h"), "h", NORM, "%x, [8], %p_n_weight, %p_n_bias", "n"),
        called(node("LayerNormalization", "h n.weight", "y"), "y", NORM, "%h, [8]", "m"),
    ]
    proto = exported(nodes, {"n.weight": ONES, "n.bias": ZEROS}, "n.weight n.bias")
    assert kinds(restored(proto)) == {"n.weight": P, "n.bias": P, "y.weight": C}


def test_a_norm_that_is_folded_into_a_product_tells_nothing_of_its_weight() -> None:
    """The product has the call of the normalisation. The module ties the matrix, and has two normalisations: what they
    add is zero, and left out.
    """
    op = "torch.ops.aten._native_batch_norm_legit_functional.default"
    nodes = [node("Gemm", "x a.weight", "h"), node("Gemm", "h a.weight", "y")]
    for made, value, name in zip(nodes, "hy", "nm"):
        called(made, value, op, f"%linear, %p_{name}_weight, %p_{name}_bias, True, 0.1, 1e-05", name)
    proto = exported(nodes, {"a.weight": random(8, 8)}, "a.weight n.weight n.bias m.weight m.bias")
    assert trained(proto) == {"a.weight", "n.bias", "m.bias"}


def split_layers(common: str) -> onnx.ModelProto:
    """Two layers that are copies: each multiplies `x` by the second half of a matrix, and by the first half."""
    views = "torch.ops.aten.mul.Tensor"
    nodes = [
        node("Split", "a.w", "w0 w1", axis=1, num_outputs=2),
        called(node("MatMul", "x w1", "k"), "linear", LINEAR, "%x, %getitem_1", "a"),
        called(node("MatMul", "x w0", "q"), "linear_1", LINEAR, "%x, %getitem", "a"),
        called(node("Mul", "q k", "h"), "mul", views, "%linear_1, %linear", "a"),
        called(node("MatMul", "h w0", "r"), "linear_3", LINEAR, "%mul, %getitem_2", "b"),
        called(node("Mul", f"r {common}", "g"), "mul_1", views, "%linear_3, %linear_2", "b"),
        called(node("Add", "g b.bias", "y"), "y", "torch.ops.aten.add.Tensor", "%mul_1, %p_b_bias", "b"),
    ]
    return exported(nodes, {"a.w": random(8, 16), "b.bias": random(8)}, "a.w b.w b.bias")


def test_nodes_that_are_merged_with_the_tensors_that_they_read_are_done_for_each_layer() -> None:
    """As a decoder multiplies the memory in each layer: `b` has lost its product with `x`, and its Split."""
    proto = split_layers("k")
    graph = restored(proto)
    assert {value.name for value in graph.parameters} == {"a.w", "b.w", "b.bias"}
    x, w, bias = random(3, 8), random(8, 16), random(8)
    h = (x @ w[:, :8]) * (x @ w[:, 8:])
    np.testing.assert_allclose(run(graph, x=x)["y"], (h @ w[:, :8]) * (x @ w[:, 8:]) + bias, rtol=1e-4, atol=1e-4)
    step = fp.compile(graph, fp.losses.mean, fp.optim.SGD(0.01))
    session = step.bind()
    session.step({"x": x})
    ones = np.full((3, 8), 1 / 24, np.float32)  # the gradient of the mean
    r, k = h @ w[:, :8], x @ w[:, 8:]
    wanted = np.concatenate([h.T @ (ones * k), x.T @ (ones * r)], 1)
    np.testing.assert_allclose((w - session.parameters["b.w"]) / 0.01, wanted, rtol=2e-3, atol=2e-4)


def test_nodes_of_layers_that_share_their_tensors_stay_one() -> None:
    proto = split_layers("k")
    text = proto.graph.metadata_props[0]
    text.value = text.value.replace("p_b_w: PARAMETER target='b.w'\n", "")
    graph = restored(proto)
    assert {value.name for value in graph.parameters} == {"a.w", "b.bias"}
    assert [made.op.name for made in graph.nodes].count("matmul") == 3


def of_torchscript(tied_bias: bool) -> onnx.ModelProto:
    """Two layers, the second one a copy; or only its matrix is that of the first one."""
    nodes = [
        node("Identity", "onnx::MatMul_20", "onnx::MatMul_21", "Identity_0"),
        node("Identity", "layers.0.bias", "layers.1.bias", "Identity_1"),
        node("MatMul", "x onnx::MatMul_20", "a", "/layers.0/MatMul"),
        node("Add", "a layers.0.bias", "b", "/layers.0/Add"),
        node("MatMul", "b onnx::MatMul_21", "c", "/layers.1/MatMul"),
        node("Add", "c layers.1.bias", "y", "/layers.1/Add"),
    ]
    constants = {"onnx::MatMul_20": random(8, 8), "layers.0.bias": random(8) if tied_bias else ZEROS}
    proto = model(nodes, {"x": (3, 8)}, ["y"], constants)
    proto.producer_name = "pytorch"
    return proto


def test_a_matrix_of_a_copied_layer_is_one_of_its_own_in_files_of_torchscript() -> None:
    names = {"onnx::MatMul_20", "layers.0.bias", "layers.1.bias"}
    assert trained(of_torchscript(True)) == names | {"onnx::MatMul_21"}
    assert trained(of_torchscript(False)) == names  # zeros prove no copy: the matrix may be tied


@pytest.mark.parametrize("kept", ["onnx::Conv_5", "norm.bias"])
@pytest.mark.parametrize("second, apart", [("/b/Conv", True), ("/a/Conv_1", False)])
def test_biases_of_zeros_are_apart_in_files_of_torchscript_where_paths_differ(
    kept: str, second: str, apart: bool
) -> None:
    """As biases of convolutions into which fresh normalisations were folded. A layer that is called twice has one."""
    nodes = [
        node("Identity", kept, "onnx::Conv_6", "Identity_0"),
        node("Conv", f"x a.weight {kept}", "h", "/a/Conv"),
        node("Conv", "h b.weight onnx::Conv_6", "y", second),
    ]
    proto = model(
        nodes, {"x": (1, 8, 9)}, ["y"], {kept: ZEROS, "a.weight": random(8, 8, 1), "b.weight": random(8, 8, 1)}
    )
    proto.producer_name = "pytorch"
    assert trained(proto) - {"a.weight", "b.weight"} == ({kept, "onnx::Conv_6"} if apart else {kept})


@pytest.mark.parametrize("name, kind", [("onnx::Mul_9", P), ("/n/Constant_output_0", C)])
def test_a_scale_of_ones_that_torchscript_turned_is_trained(name: str, kind: Kind) -> None:
    """A fresh group normalisation: its scale follows it, as [channels, 1]."""
    nodes = [node("InstanceNormalization", "x s b", "h"), node("Mul", f"h {name}", "y")]
    proto = model(nodes, {"x": (2, 8, 4)}, ["y"], {"s": ONES, "b": ZEROS, name: ONES[:, None]})
    proto.producer_name = "pytorch"
    assert kinds(restored(proto))[name] is kind


# What is left out, doubled, or renamed.


@pytest.mark.parametrize(
    "op, call, args, weight, extent, attributes",
    [
        ("Gemm", "linear", "%x, %p_a_weight, %p_a_bias", (5, 8), 5, {"transB": 1}),
        ("Gemm", "addmm", "%p_a_bias, %x, %p_a_weight", (8, 5), 5, {}),
        ("Conv", "conv1d", "%x, %p_a_weight, %p_a_bias", (6, 4, 3), 6, {"group": 2}),
        (
            "Conv",
            "_native_batch_norm_legit_functional",
            "%c, %p_n_weight, %p_a_bias, %b_m, %b_v",
            (6, 4, 3),
            6,
            {"group": 2},
        ),
        ("ConvTranspose", "conv_transpose1d", "%x, %p_a_weight, %p_a_bias", (8, 3, 3), 6, {"group": 2}),
    ],
)
def test_a_bias_of_zeros_that_is_left_out_is_trained(
    op: str, call: str, args: str, weight: tuple[int, ...], extent: int, attributes: dict[str, int]
) -> None:
    made = called(node(op, "x a.weight", "y", **attributes), "y", f"torch.ops.aten.{call}.default", args, "a")
    shape = (3, 8) if op == "Gemm" else (3, 8, 9)
    graph = restored(exported([made], {"a.weight": random(*weight)}, "a.weight a.bias", shape=shape))
    assert {value.name: value.shape for value in graph.parameters}["a.bias"] == (extent,)
    assert graph.notes == ("the exporter has left out biases of zeros; 'a.bias' are there again",)
    plain = exported([made], {"a.weight": random(*weight)}, "a.weight", "a.bias", shape=shape)
    assert trained(plain) == {"a.weight"}
    x = random(*shape)
    np.testing.assert_array_equal(run(graph, x=x)["y"], run(restored(plain), x=x)["y"])


@pytest.mark.parametrize("rows", [9, 3000])
@pytest.mark.parametrize("change, tied", [(0.0, True), (1e-3, False)])
def test_a_table_that_is_tied_to_the_head_is_one(rows: int, change: float, tied: bool) -> None:
    """Every number is compared: one that differs is another tensor."""
    table = random(rows, 8)
    turned = np.ascontiguousarray(table.T)
    turned[3, rows // 2] += np.float32(change)
    nodes = [node("Gather", "emb.weight ids", "h"), node("MatMul", "h t", "g"), node("Add", "g x", "y")]
    constants = {"emb.weight": table, "t": turned, "ids": np.array([1, 2, 3])}
    graph = restored(exported(nodes, constants, "emb.weight", folded={"t": "emb.weight"}, shape=(3, rows)))
    assert {value.name for value in graph.parameters} == ({"emb.weight"} if tied else {"emb.weight", "t"})
    assert any("written tensors a second time: 't' is 'emb.weight'" in note for note in graph.notes) == tied


def test_a_bias_that_is_repeated_is_the_bias() -> None:
    """A recurrent layer without a first state adds the bias of its hidden state to the first step."""
    bias = random(8)
    nodes = [node("Add", "x linear_1", "h"), node("Add", "h a.bias", "y")]
    constants = {"a.bias": bias, "linear_1": np.tile(bias, (1, 3, 1))}
    proto = exported(nodes, constants, "a.bias a.weight", folded={"linear_1": "a.bias a.weight"}, shape=(1, 3, 8))
    assert trained(proto) == {"a.bias"}
    x = random(1, 3, 8)
    np.testing.assert_allclose(run(restored(proto), x=x)["y"], x + 2 * bias, rtol=1e-5, atol=1e-6)


def test_files_of_torchscript_are_tied_by_their_numbers() -> None:
    table = random(9, 8)
    nodes = [node("Gather", "emb.weight ids", "h"), node("MatMul", "h onnx::MatMul_7", "g"), node("Add", "g x", "y")]
    constants = {"emb.weight": table, "onnx::MatMul_7": table.T.copy(), "ids": np.array([1, 2, 3])}
    proto = model(nodes, {"x": (3, 9)}, ["y"], constants)
    assert trained(proto) == {"emb.weight", "onnx::MatMul_7"}  # another tool's: it may have two
    proto.producer_name = "pytorch"
    assert trained(proto) == {"emb.weight"}


def shadowed(args: str) -> onnx.ModelProto:
    nodes = [
        called(node("Sub", "x mean", "h"), "sub", "torch.ops.aten.sub.Tensor", "%x, %b_mean", ""),
        called(node("ReduceMean", "h", "mean", keepdims=1), "mean", "torch.ops.aten.mean.dim", "%sub, [1]", ""),
        called(node("Sub", "h mean", "y"), "sub_1", "torch.ops.aten.sub.Tensor", args, ""),
    ]
    return exported(nodes, {"mean": random(8)}, "", "mean")


def test_a_result_that_has_the_name_of_a_buffer_is_told_apart_by_its_readers() -> None:
    graph = restored(shadowed("%sub, %mean"))
    h = random(3, 8) - random(8)
    np.testing.assert_allclose(run(graph, x=random(3, 8))["y"], h - h.mean(keepdims=True), rtol=1e-4, atol=1e-5)
    assert graph.notes == (
        "the exporter calls a result 'mean', as the module calls a tensor; it is 'mean.result' here",
    )
    for args in ("%sub, %alias", "%mean, %b_mean"):
        with pytest.raises(ModelError, match="'mean' is given twice"):
            from_onnx(shadowed(args))


# Roles.


def test_what_is_computed_from_a_buffer_is_not_trained() -> None:
    nodes = [node("MatMul", "x val_3", "y")]
    for parameters, kind in (("a.weight", C), ("a.weight fb", P)):
        buffers = "fb" if kind is C else ""
        proto = exported(nodes, {"val_3": random(8, 4)}, parameters, buffers, folded={"val_3": "zeros fb"})
        assert kinds(restored(proto)) == {"val_3": kind}


@pytest.mark.parametrize("kind, stops", [("torch.nn.utils.parametrizations._SpectralNorm", True), ("Own", False)])
def test_no_gradient_comes_back_from_the_iteration_of_spectral_norm(kind: str, stops: bool) -> None:
    """y = w v (w v): its result `u` is the next content of a buffer."""
    op = "torch.ops.aten.mul.Tensor"
    nodes = [
        called(node("Mul", "w v", "u"), "u", op, "%p_w, %b_v", "a", kind),
        called(node("Mul", "w u", "h"), "mul", op, "%p_w, %u", "a", kind),
        called(node("Mul", "x h", "y"), "mul_1", op, "%x, %mul", "a"),
    ]
    w, v, x = random(8, seed=1), random(8, seed=2), random(1, 8)
    graph = restored(exported(nodes, {"w": w, "v": v}, "w", "v", changes={"u": "v"}, shape=(1, 8)))
    assert graph.notes == ("the module gives 'v' another content in each step of training: here it stays",)
    session = fp.compile(graph, fp.losses.mean, fp.optim.SGD(1.0)).bind()
    session.step({"x": x})
    wanted = (1 if stops else 2) * w * v * x[0] / 8
    np.testing.assert_allclose(w - session.parameters["w"], wanted, rtol=1e-4, atol=1e-6)


def test_what_torchscript_computed_is_trained_where_no_rule_gives_its_numbers() -> None:
    angles = np.outer(np.arange(3, 11), 10_000.0 ** -(np.arange(0, 8, 2) / 8))
    pairs = np.stack([np.sin(angles), np.cos(angles)], -1).reshape(8, 8)
    halves = np.concatenate([np.sin(angles), np.cos(angles)], 1) * 0.1
    rising = np.sort(random(8))
    tables = {"pairs": pairs, "halves": halves, "rising": rising, "few": random(4), "two": np.repeat(random(8), 2)}
    tables |= {
        "mask": np.triu(np.ones((8, 8))),
        "learned": random(8, 8),
        "gains": random(8),
        "long": random(700, 64) * 0.02,
    }
    learned = ("learned", "gains", "long")
    for name, table in tables.items():
        constants = {"onnx::Add_9": table.astype(np.float32)}
        proto = model([node("Add", "x onnx::Add_9", "y")], {"x": (3, *table.shape)}, ["y"], constants)
        proto.producer_name = "pytorch"
        graph = restored(proto)
        assert kinds(graph) == {"onnx::Add_9": P if name in learned else C}, name
        told = "filled as by training: trained" if name in learned else "in no weight's place: not trained"
        assert [told in note for note in graph.notes] == [True], name


def test_a_bias_of_scores_that_torchscript_computed_is_trained_where_heads_differ() -> None:
    """Relative positions: each head has numbers of its own, which places share. ALiBi has one slope a head."""
    apart = np.abs(np.subtract.outer(np.arange(8), np.arange(8)))
    learned = random(4, 15)[:, np.subtract.outer(np.arange(8), np.arange(8)) + 7]
    alibi = -apart * 2.0 ** -np.arange(1, 5).reshape(4, 1, 1)
    squares = -(apart**2) * np.float32([0.3, 0.1, 0.7, 0.2]).reshape(4, 1, 1)
    causal = np.triu(np.full((4, 8, 8), -100.0), 1)
    windows = np.where(random(4, 8, 8) > 0, 0.0, -100.0)
    nodes = [node("Add", "x onnx::Add_9", "s"), node("Softmax", "s", "y", axis=-1)]
    for bias, kind in ((learned, P), (alibi, C), (squares, C), (causal, C), (windows, C), (learned + causal, C)):
        proto = model(nodes, {"x": (2, 4, 8, 8)}, ["y"], {"onnx::Add_9": bias.astype(np.float32)[None]})
        proto.producer_name = "pytorch"
        assert kinds(restored(proto)) == {"onnx::Add_9": kind}


@pytest.mark.parametrize("name, cosine, kind", [("B", "Cos", C), ("proj.weight", "Cos", P), ("B", "Sin", P)])
def test_a_basis_of_random_features_is_not_trained(name: str, cosine: str, kind: Kind) -> None:
    nodes = [
        node("MatMul", f"x {name}", "h"),
        node("Mul", "h two", "a"),
        node("Sin", "a", "s"),
        node(cosine, "a", "c"),
        node("Concat", "s c", "y", axis=-1),
    ]
    proto = model(nodes, {"x": (3, 2)}, ["y"], {name: random(2, 8), "two": np.array(2.0, np.float32)})
    proto.producer_name = "pytorch"
    assert kinds(restored(proto))[name] is kind
