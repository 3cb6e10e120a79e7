"""External data, wherever in a model a tensor stands: read from the model's folder, and from nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from foreplan.base.errors import ModelError
from foreplan.frontend import from_onnx
from tests.frontend.onnx.models import model, node, run

RIGHT, WRONG = np.full(1, 1.0, np.float32), np.full(1, 42.5, np.float32)


def tensor(location: str) -> TensorProto:
    """One float32, in another file."""
    made = TensorProto(name="held", data_type=TensorProto.FLOAT, dims=[1], data_location=TensorProto.EXTERNAL)
    made.external_data.add(key="location", value=location)
    return made


def attribute(location: str) -> onnx.ModelProto:
    return model([helper.make_node("Constant", [], ["y"], "reader", value=tensor(location))], {}, ["y"])


def filled(location: str) -> onnx.ModelProto:
    made = helper.make_node("ConstantOfShape", ["shape"], ["y"], "reader", value=tensor(location))
    return model([made], {}, ["y"], {"shape": np.array([1])})


def branch(location: str) -> onnx.ModelProto:
    inner = helper.make_node("ConstantOfShape", ["shape"], ["z"], "reader", value=tensor(location))
    body = helper.make_graph([inner], "then", [], [onnx.ValueInfoProto(name="z")])
    chosen = node("If", "yes", "y", then_branch=body, else_branch=body)
    return model([chosen], {}, ["y"], {"shape": np.array([1]), "yes": np.array(True)})


def of_a_branch(location: str) -> onnx.ModelProto:
    body = helper.make_graph([], "then", [], [onnx.ValueInfoProto(name="held")], [tensor(location)])
    return model([node("If", "yes", "y", then_branch=body, else_branch=body)], {}, ["y"], {"yes": np.array(True)})


def function(location: str) -> onnx.ModelProto:
    inner = helper.make_node("Constant", [], ["z"], "reader", value=tensor(location))
    made = helper.make_function("own", "Held", [], ["z"], [inner], [helper.make_opsetid("", 18)])
    return model([helper.make_node("Held", [], ["y"], domain="own")], {}, ["y"], functions=[made], domains=["own"])


def given_to_a_function(location: str) -> onnx.ModelProto:
    inner = helper.make_node("ConstantOfShape", ["s"], ["z"], "reader")
    inner.attribute.add(name="value", ref_attr_name="held", type=onnx.AttributeProto.TENSOR)
    made = helper.make_function("own", "Held", ["s"], ["z"], [inner], [helper.make_opsetid("", 18)], ["held"])
    call = helper.make_node("Held", ["shape"], ["y"], domain="own", held=tensor(location))
    return model([call], {}, ["y"], {"shape": np.array([1])}, functions=[made], domains=["own"])


PLACES = [attribute, filled, branch, of_a_branch, function, given_to_a_function]


@pytest.mark.parametrize("make", PLACES)
def test_a_tensor_is_read_from_the_models_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[str], onnx.ModelProto]
) -> None:
    for folder, content in (("model", RIGHT), ("elsewhere", WRONG)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "held.bin").write_bytes(content.tobytes())
    monkeypatch.chdir(tmp_path / "elsewhere")
    path = tmp_path / "model" / "model.onnx"
    path.write_bytes(make("held.bin").SerializeToString())
    np.testing.assert_array_equal(run(from_onnx(path))["y"], RIGHT)
    with pytest.raises(ModelError, match="give from_onnx the path"):
        from_onnx(make("held.bin"))


@pytest.mark.parametrize("location", ["../held.bin", "/etc/passwd", "link"])
@pytest.mark.parametrize("make", PLACES)
def test_a_tensor_elsewhere_is_refused(tmp_path: Path, make: Callable[[str], onnx.ModelProto], location: str) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "held.bin").write_bytes(WRONG.tobytes())
    (tmp_path / "model" / "link").symlink_to(tmp_path / "held.bin")
    path = tmp_path / "model" / "model.onnx"
    path.write_bytes(make(location).SerializeToString())
    with pytest.raises(ModelError, match=r"beside the model|leads out of the model's folder"):
        from_onnx(path)


def test_an_attribute_that_no_op_has_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "held.bin").write_bytes(WRONG.tobytes())
    monkeypatch.setattr(
        onnx.external_data_helper, "load_external_data_for_tensor", lambda *_: pytest.fail("it was read")
    )
    for op in ("NonZero", "Neg"):
        made = helper.make_node(op, ["c"], ["y"], junk=tensor("held.bin"))
        try:
            from_onnx(model([made], {}, ["y"], {"c": RIGHT}))
        except ModelError:
            assert op == "NonZero"


@pytest.mark.parametrize("entry", [{"offset": "9" * 5000}, {"length": "9" * 5000}, {"offset": "٣"}])
def test_numbers_that_are_none_are_refused(tmp_path: Path, entry: dict[str, str]) -> None:
    proto = filled("held.bin")
    for key, value in entry.items():
        proto.graph.node[0].attribute[0].t.external_data.add(key=key, value=value)
    (tmp_path / "held.bin").write_bytes(RIGHT.tobytes())
    path = tmp_path / "model.onnx"
    path.write_bytes(proto.SerializeToString())
    with pytest.raises(ModelError, match="must be whole numbers"):
        from_onnx(path)
