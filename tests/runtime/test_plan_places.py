"""A plan is loaded from where it was saved, by whatever names its folder and its model's have."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import foreplan as fp
from foreplan.base.files import real_place

W = np.arange(600, dtype=np.float32).reshape(3, 200)
MODELS = ("{}/m.onnx", "{}/below/m.onnx", "{}/link.onnx", "{}/external.onnx")
# Names of one folder: its own, by links to it and to one above, and with steps up again.
FOLDERS = (
    "disk/models",
    "models",
    "linked/models",
    "models/below/..",
    "chain",
    "models/../models",
    "far/../../disk/models",
)
CASES = list(itertools.product(MODELS, FOLDERS, FOLDERS, (True, False)))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("place")
    (root / "disk" / "models" / "below").mkdir(parents=True)
    (root / "disk" / "far").mkdir()
    for link, to in (("models", "disk/models"), ("linked", "disk"), ("chain", "models"), ("far", "disk/far")):
        (root / link).symlink_to(to)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", 1, [2, 3])],
        [helper.make_tensor_value_info("y", 1, [2, 200])],
        [numpy_helper.from_array(W, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 9
    for name in ("m.onnx", "below/m.onnx"):
        onnx.save(model, root / "disk" / "models" / name)
    (root / "disk" / "models" / "link.onnx").symlink_to("below/m.onnx")
    file = root / "disk" / "models" / "external.onnx"
    onnx.save(model, file, save_as_external_data=True, location="w.bin", size_threshold=0)
    return root


def drawn(count: int) -> list[int]:
    return sorted(int(i) for i in np.random.default_rng(0).permutation(len(CASES))[:count])


@pytest.mark.parametrize("number", drawn(24))
def test_a_plan_is_loaded_by_any_name_of_its_folder(number: int, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, of_model, of_plan, absolute = CASES[number]
    monkeypatch.chdir(place)
    start = f"{place}/" if absolute else ""
    path = f"{of_plan}/{number}.plan"
    fp.compile(fp.from_onnx(start + model.format(of_model)), target="numpy").save(path)
    x = np.ones((2, 3), np.float32)
    for name in (path, f"{place}/{path}", f"disk/models/{number}.plan"):
        outputs = fp.load_plan(name).bind().step({"x": x}).outputs
        np.testing.assert_array_equal(outputs["y"], x @ W)


def test_weights_behind_a_link_that_leads_out_are_given_by_their_folder(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the cache of models of huggingface_hub: a plan may not name them, and the message says what to do."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "blobs" / "0123").write_bytes((place / "models" / "m.onnx").read_bytes())
    (tmp_path / "snapshot" / "m.onnx").symlink_to("../blobs/0123")
    monkeypatch.chdir(tmp_path / "snapshot")
    fp.compile(fp.from_onnx("m.onnx"), target="numpy").save("a.plan")
    with pytest.raises(fp.PlanError, match="weights_folder"):
        fp.load_plan("a.plan")
    fp.load_plan("a.plan", weights_folder="../blobs").bind()


def test_a_place_is_the_file_that_is_opened(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`link/..` is the folder above what the link leads to."""
    monkeypatch.chdir(place)
    for folder in FOLDERS:
        for name in ("m.onnx", "below/m.onnx", "link.onnx", "none.onnx"):
            found = real_place(f"{folder}/{name}")
            assert found.parent == Path(os.path.realpath(found.parent)) and found.name == Path(name).name
            assert not found.exists() or os.path.samefile(found, f"{folder}/{name}")
