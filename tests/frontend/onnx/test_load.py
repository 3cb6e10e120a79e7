"""Files: weights stay where they are, and whatever is wrong with a file is said in a sentence."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import foreplan
from foreplan.base.errors import ForeplanError, ModelError, ShapeError, UnsupportedError, UsageError
from foreplan.frontend import from_onnx
from foreplan.frontend.onnx import wire
from foreplan.graph import Array, Graph, Stored
from foreplan.graph.value import Kind
from tests.frontend.onnx.models import model, node, random, run

WEIGHT = random(64, 32, seed=1)


def linear(raw: bool = True) -> onnx.ModelProto:
    proto = model([node("Gemm", "x w b", "y", "fc")], {"x": (2, 64)}, ["y"], {"w": WEIGHT, "b": WEIGHT[0]})
    if not raw:
        tensor = proto.graph.initializer[0]
        tensor.ClearField("raw_data")
        tensor.float_data.extend(WEIGHT.reshape(-1).tolist())
    return proto


def save(proto: onnx.ModelProto, path: Path) -> Path:
    path.write_bytes(proto.SerializeToString())
    return path


def weight(graph: Graph, name: str = "w") -> object:
    (found,) = (value for value in graph.stored if value.name == name)
    return found.init


@pytest.mark.parametrize("raw", [True, False])
def test_weights_stay_in_the_file(tmp_path: Path, raw: bool) -> None:
    path = save(linear(raw), tmp_path / "linear.onnx")
    graph = from_onnx(path)
    stored = weight(graph)
    assert isinstance(stored, Stored) and stored.path == path
    assert path.read_bytes()[stored.offset :].startswith(WEIGHT.tobytes())
    assert isinstance(weight(graph, "b"), Array)  # 128 bytes
    x = random(2, 64)
    np.testing.assert_allclose(run(graph, x=x)["y"], x @ WEIGHT + WEIGHT[0], rtol=1e-5, atol=1e-5)


def test_importing_reads_no_byte_of_a_large_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(linear(), tmp_path / "linear.onnx")
    start = path.read_bytes().index(WEIGHT.tobytes())
    read = np.zeros(path.stat().st_size, bool)

    class Watched:
        """The file's bytes, which notes which of them are asked for."""

        def __init__(self, data: bytes) -> None:
            self.data = data

        def __len__(self) -> int:
            return len(self.data)

        def __getitem__(self, at: int | slice) -> int | bytes:
            read[at] = True
            return self.data[at]

    skeleton = wire.skeleton
    monkeypatch.setattr("foreplan.frontend.onnx.load.skeleton", lambda data: skeleton(Watched(data[:])))  # type: ignore
    monkeypatch.setattr(Stored, "fill", lambda *_: pytest.fail("the weight was read"))
    from_onnx(path)
    assert not read[start : start + WEIGHT.nbytes].any()
    assert read[:start].any()


def test_a_file_of_many_gigabytes_is_imported_from_its_first_bytes(tmp_path: Path) -> None:
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[1 << 20, 4096])
    proto = model([node("Gemm", "x w", "y")], {"x": (1, 1 << 20)}, ["y"])
    nbytes = 16 << 30
    field = wire.encode(9 << 3 | 2) + wire.encode(nbytes)
    head = tensor.SerializeToString() + field
    graph_head = proto.graph.SerializeToString() + wire.encode(5 << 3 | 2) + wire.encode(len(head) + nbytes) + head
    proto.ClearField("graph")
    path = tmp_path / "large.onnx"
    start = proto.SerializeToString() + wire.encode(7 << 3 | 2) + wire.encode(len(graph_head) + nbytes)
    path.write_bytes(start + graph_head)
    os.truncate(path, len(start + graph_head) + nbytes)  # sparse: the disk holds a few hundred bytes
    stored = weight(from_onnx(path))
    assert isinstance(stored, Stored)
    assert (stored.offset, stored.type.nbytes) == (len(start + graph_head), nbytes)


def test_a_model_in_memory_keeps_its_arrays() -> None:
    init = weight(from_onnx(linear()))
    assert isinstance(init, Array)
    np.testing.assert_array_equal(init.array, WEIGHT)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_constants_of_nodes_and_of_branches_stay_in_the_file_too(tmp_path: Path, dtype: str) -> None:
    import ml_dtypes

    held = WEIGHT.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    constant = helper.make_node("Constant", [], ["c"], name="held", value=numpy_helper.from_array(held, "c"))
    then = helper.make_graph([constant], "then", [], [onnx.ValueInfoProto(name="c")])
    nodes = [
        helper.make_node("Constant", [], ["w"], value=numpy_helper.from_array(held, "w")),
        node("If", "yes", "t", "choice", then_branch=then, else_branch=then),
        node("Add", "w t", "y"),
    ]
    path = save(model(nodes, {}, ["y"], {"yes": np.array(True)}), tmp_path / "constants.onnx")
    graph = from_onnx(path)
    assert [type(value.init) for value in graph.stored] == [Stored, Stored]
    got = run(graph)["y"]
    assert got.dtype == held.dtype
    np.testing.assert_array_equal(got, held + held)


def external(folder: Path, location: str = "weights.bin", **entries: str) -> Path:
    proto = linear()
    tensor = proto.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in {"location": location, "offset": "64", "length": str(WEIGHT.nbytes), **entries}.items():
        tensor.external_data.add(key=key, value=value)
    (folder / "weights.bin").write_bytes(bytes(64) + WEIGHT.tobytes())
    return save(proto, folder / "external.onnx")


def test_external_data_stay_in_their_file(tmp_path: Path) -> None:
    graph = from_onnx(external(tmp_path))
    stored = weight(graph)
    assert isinstance(stored, Stored) and stored.path.name == "weights.bin" and stored.offset == 64
    x = random(2, 64)
    np.testing.assert_allclose(run(graph, x=x)["y"], x @ WEIGHT + WEIGHT[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"location": "../weights.bin"}, "beside the model"),
        ({"location": "/etc/passwd"}, "beside the model"),
        ({"location": ""}, "beside the model"),
        ({"location": "a/../../weights.bin"}, "beside the model"),
        ({"location": "link"}, "leads out of"),
        ({"location": "gone.bin"}, "cannot be read"),
        ({"location": "."}, "is not a file"),
        ({"offset": "65"}, "lie outside"),
        ({"offset": "-1"}, "whole numbers"),
        ({"length": "8"}, "8 are given"),
    ],
)
def test_external_data_elsewhere_are_refused(tmp_path: Path, entries: dict[str, str], message: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "weights.bin").write_bytes(bytes(1 << 20))
    (folder / "link").symlink_to(tmp_path / "weights.bin")
    with pytest.raises(ModelError, match=message) as caught:
        from_onnx(external(folder, **entries))
    assert "initializer 'w'" in str(caught.value)


def test_external_data_of_a_model_in_memory_have_no_folder(tmp_path: Path) -> None:
    proto = onnx.load(external(tmp_path), load_external_data=False)
    with pytest.raises(ModelError, match="path of the model"):
        from_onnx(proto)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\x00" * 100, "not an ONNX model"),
        (b"<html><body>404: not found</body></html>" * 40, "not an ONNX model"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n", "Git LFS pointer"),
        (b"PK\x03\x04" + bytes(range(256)) * 8, "not an ONNX model"),
        (b"\x08\x08", "has no graph"),
        (os.urandom(4096), "not an ONNX model"),
    ],
)
def test_other_files_are_refused_by_path(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "broken.onnx"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=message) as caught:
        from_onnx(path)
    assert str(path) in str(caught.value)


def test_paths_that_are_no_files(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such file"):
        from_onnx(tmp_path / "gone.onnx")
    with pytest.raises(ModelError, match="not an ONNX model but a folder"):
        from_onnx(tmp_path)
    with pytest.raises(UsageError, match=r"takes a path or an onnx\.ModelProto"):
        from_onnx(7)  # type: ignore[arg-type]


@pytest.mark.parametrize("length", [1, 20, 100, 300, 1500, 5000, 8500])
def test_a_truncated_file_is_refused(tmp_path: Path, length: int) -> None:
    whole = save(linear(), tmp_path / "linear.onnx").read_bytes()
    path = tmp_path / "short.onnx"
    path.write_bytes(whole[: min(length, len(whole) - 1)])
    with pytest.raises(ModelError, match=r"short\.onnx"):
        from_onnx(path)


def test_damaged_files_give_a_graph_or_a_sentence(tmp_path: Path) -> None:
    nodes = [
        node("Conv", "x w", "c", "conv", pads=[1, 1, 1, 1]),
        node("Relu", "c", "r"),
        node("Reshape", "r s", "f"),
        node("Gemm", "f v", "y", transB=1),
    ]
    constants = {"w": random(4, 3, 3, 3), "s": np.array([2, -1]), "v": random(5, 4 * 36)}
    whole = model(nodes, {"x": (2, 3, 6, 6)}, ["y"], constants).SerializeToString()
    rng = np.random.default_rng(0)
    path = tmp_path / "damaged.onnx"
    refused = 0
    for _ in range(200):
        data = bytearray(whole)
        for at in rng.integers(len(data), size=rng.integers(1, 4)):
            data[at] = rng.integers(256)
        path.write_bytes(data)
        try:
            from_onnx(path)
        except ForeplanError as error:
            refused += 1
            assert "damaged.onnx" in str(error) or "node" in str(error)
    assert refused > 10


def test_nodes_in_a_circle_are_named() -> None:
    nodes = [node("Add", "x c", "a", "first"), node("Relu", "a", "b", "second"), node("Neg", "b", "c", "third")]
    with pytest.raises(ModelError, match="circle") as caught:
        from_onnx(model(nodes, {"x": (2,)}, ["c"]))
    assert all(name in str(caught.value) for name in ("first", "second", "third"))


def test_nodes_in_another_order_are_sorted() -> None:
    nodes = [node("Relu", "a", "y"), node("Neg", "x", "a")]
    x = random(3)
    np.testing.assert_array_equal(run(from_onnx(model(nodes, {"x": (3,)}, ["y"])), x=x)["y"], np.maximum(-x, 0))


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([node("Relu", "z", "y", "act")], "act.*'z'"),
        ([node("Relu", "x", "z")], "the graph reads 'y'"),
        ([node("Relu", "x", "y"), node("Neg", "x", "y")], "two nodes give the tensor 'y'"),
        ([node("Relu", "x", "y"), node("Neg", "y", "x", "neg")], "'x' is given twice.*'neg'"),
        ([node("Conv", "x x", "y", "conv", strides="no")], "conv.*strides.*ints"),
        ([node("Conv", "x", "y", "conv")], "conv.*input 1 is missing"),
        ([node("Conv", "x x", "y", "conv")], "conv"),
        ([node("Concat", "", "y", "cat", axis=0)], "cat"),
        ([node("Reshape", "", "y", "shape")], "shape.*input . is missing"),
        ([node("ConstantOfShape", "", "y", "filled")], "filled.*input 0 is missing"),
        ([node("ConstantOfShape", "x", "", "filled"), node("Relu", "x", "y")], "filled"),
        ([node("Concat", "x x", "y", "cat")], "cat.*'axis' is missing"),
        ([node("Softmax", "x", "y", "soft", axis=9)], "soft.*no axis 9"),
        ([node("Transpose", "x", "y", "turn", perm=[0, 0])], "turn.*not distinct"),
    ],
)
def test_wrong_nodes_are_named(nodes: list[onnx.NodeProto], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        from_onnx(model(nodes, {"x": (2, 3)}, ["y"]))


def test_a_node_that_onnx_cannot_write_out_is_named() -> None:
    """Its function body is made by ONNX, which raises errors of its own kinds."""
    made = node("SequenceMap", "x", "y", "each", body=7)
    with pytest.raises(UnsupportedError, match="each"):
        from_onnx(model([made], {"x": (2, 3)}, ["y"]))


def test_a_wrong_type_is_named() -> None:
    proto = model([node("MatMul", "x i", "y", "product")], {"x": (2, 3)}, ["y"], {"i": np.ones((3, 4), np.int64)})
    with pytest.raises(ModelError, match="product"):
        from_onnx(proto)
    proto = linear()
    proto.graph.initializer[0].dims[0] = 65
    with pytest.raises(ModelError, match="initializer 'w'"):
        from_onnx(proto)
    proto = linear()
    proto.graph.initializer[0].ClearField("raw_data")
    with pytest.raises(ModelError, match="stripped of its weights"):
        from_onnx(proto)


@pytest.mark.parametrize("opset", [0, 999])
def test_an_opset_out_of_range_is_refused(opset: int) -> None:
    with pytest.raises(UnsupportedError, match=rf"opset {opset} .* \('?.*Relu.*convert_version"):
        from_onnx(model([node("Relu", "x", "y")], {"x": (2,)}, ["y"], opset=opset))


def test_unknown_ops_and_domains_are_named() -> None:
    with pytest.raises(UnsupportedError, match=r"node 'odd' \(Frobnicate\).*opset 18"):
        from_onnx(model([node("Frobnicate", "x", "y", "odd")], {"x": (2,)}, ["y"]))
    own = helper.make_node("Relu", ["x"], ["y"], name="own", domain="my.domain")
    with pytest.raises(UnsupportedError, match=r"own.*my\.domain\.Relu"):
        from_onnx(model([own], {"x": (2,)}, ["y"], domains=["my.domain"]))
    with pytest.raises(UnsupportedError, match=r"imports no opset of the domain 'my\.domain'"):
        from_onnx(model([own], {"x": (2,)}, ["y"]))


def test_inputs_and_weights_without_arithmetic_are_refused() -> None:
    proto = model([node("Identity", "x", "y")], {}, ["y"])
    proto.graph.input.append(helper.make_tensor_value_info("x", TensorProto.STRING, (2,)))
    with pytest.raises(UnsupportedError, match=r"input 'x'.*STRING"):
        from_onnx(proto)
    proto = model([node("Identity", "s", "y")], {}, ["y"])
    proto.graph.initializer.append(helper.make_tensor("s", TensorProto.STRING, (1,), [b"text"]))
    with pytest.raises(UnsupportedError, match=r"initializer 's'.*STRING"):
        from_onnx(proto)
    proto = model([node("Identity", "q", "y")], {}, ["y"])
    proto.graph.input.append(helper.make_tensor_sequence_value_info("q", TensorProto.FLOAT, None))
    with pytest.raises(UnsupportedError, match="input 'q' is declared as sequence"):
        from_onnx(proto)


def test_the_onnx_package_is_imported_by_the_first_import_of_a_model_only() -> None:
    code = "import sys, foreplan, foreplan.frontend; foreplan.frontend.from_onnx; print('onnx' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "False"


def test_the_skeleton_of_bytes_and_of_a_map_are_the_same(tmp_path: Path) -> None:
    path = save(linear(), tmp_path / "linear.onnx")
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        cut = wire.skeleton(data)
    assert cut == wire.skeleton(path.read_bytes())
    assert len(cut) < 1024 < WEIGHT.nbytes
    tensor = onnx.ModelProto.FromString(cut).graph.initializer[0]
    assert [entry.value for entry in tensor.external_data][2] == str(WEIGHT.nbytes)
    assert numpy_helper.to_array(onnx.ModelProto.FromString(cut).graph.initializer[1]).tolist() == WEIGHT[0].tolist()
    assert [value.kind for value in from_onnx(path).stored] == [Kind.PARAMETER] * 2


def test_another_model_in_the_place_of_the_file_is_refused_when_a_session_binds(tmp_path: Path) -> None:
    path = save(linear(), tmp_path / "model.onnx")
    step = foreplan.compile(from_onnx(path))
    step.save(tmp_path / "step.plan")
    other = model(
        [node("Gemm", "x v b", "y", "fc")], {"x": (2, 64)}, ["y"], {"v": random(64, 32, seed=2), "b": WEIGHT[0]}
    )
    save(other, path)
    assert path.stat().st_size == len(linear().SerializeToString())
    for compiled in (step, foreplan.load_plan(tmp_path / "step.plan")):
        with pytest.raises(ModelError, match="has changed since the model was imported"):
            compiled.bind()
    path.write_bytes(path.read_bytes() + b"\0\0")
    with pytest.raises(ModelError, match="has changed"):
        step.bind()


def test_a_plan_and_its_model_move_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "one").mkdir()
    monkeypatch.chdir(tmp_path / "one")
    save(linear(), Path("model.onnx"))
    step = foreplan.compile(from_onnx("model.onnx"))
    step.save("step.plan")
    content = Path("step.plan").read_bytes()
    x = random(2, 64, seed=3)
    expected = step.bind().step({"x": x}).outputs["y"]
    monkeypatch.chdir("/")
    np.testing.assert_array_equal(step.bind().step({"x": x}).outputs["y"], expected)
    (tmp_path / "one").rename(tmp_path / "two")
    moved = foreplan.load_plan(tmp_path / "two" / "step.plan")
    np.testing.assert_array_equal(moved.bind().step({"x": x}).outputs["y"], expected)
    foreplan.compile(from_onnx(tmp_path / "two" / "model.onnx")).save(tmp_path / "two" / "again.plan")
    assert (tmp_path / "two" / "again.plan").read_bytes() == content


@pytest.mark.parametrize("place", ["input", "initializer", "node"])
def test_more_axes_than_arrays_have_are_refused(place: str) -> None:
    shape = [1] * 65
    if place == "input":
        proto = model([node("Neg", "x", "y")], {"x": shape}, ["y"])
    elif place == "initializer":
        proto = model([node("Neg", "c", "y")], {}, ["y"], {"c": random(1)})
        proto.graph.initializer[0].dims[:] = shape
    else:
        axes = list(range(64))
        proto = model([node("Unsqueeze", "x", "y", "grow", axes=axes)], {"x": (2,)}, ["y"], opset=11)
    with pytest.raises(ShapeError, match=rf"{place} '(x|c|grow)'.*65 axes"):
        from_onnx(proto)


@pytest.mark.parametrize(
    ("made", "shape"),
    [
        (node("Hardmax", "x", "y", "huge"), (1, 1 << 40)),
        (node("Trilu", "x", "y", "huge"), (1 << 40, 2)),
        (node("EyeLike", "x", "y", "huge"), (2, 1 << 40)),
        (node("Resize", "x - s", "y", "huge"), (1 << 30, 2)),
    ],
)
def test_axes_too_long_to_count_along_are_refused_at_once(made: onnx.NodeProto, shape: tuple[int, int]) -> None:
    constants = {"s": np.array([2, 1], np.float32)} if made.op_type == "Resize" else {}
    with pytest.raises(UnsupportedError, match=r"node 'huge'.*elements"):
        from_onnx(model([made], {"x": shape}, ["y"], constants))
