"""Weights that a plan file names: beside it or below, whatever the file says, unless the user says where."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import foreplan as fp
from foreplan.base.errors import ModelError, PlanError
from foreplan.graph import Graph, GraphBuilder, Kind, Stored, TensorType
from foreplan.graph.types import FLOAT32
from foreplan.ops.map import elementwise
from tests.cli.shell import foreplan
from tests.runtime.test_planfile import edited


def model(file: Path) -> Graph:
    """y = x * w, w in a file."""
    content = np.arange(4, dtype=np.float32)
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(b"head" + content.tobytes())
    b, type = GraphBuilder("scaled"), TensorType(FLOAT32, (4,))
    x = b.input("x", type)
    w = b.store("w", type, Kind.PARAMETER, Stored(file.resolve(), 4, type, file.stat().st_size, b"head"))
    return b.finish({"y": elementwise(b, lambda p, q: p * q, x, w)})


def output(step: fp.Compiled) -> list[float]:
    (y,) = step.bind().step({"x": np.ones(4, np.float32)}).outputs.values()
    return [float(number) for number in y]


def test_weights_beside_the_plan_move_with_it(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    fp.compile(model(tmp_path / "one" / "below" / "w.bin")).save(tmp_path / "one" / "step.plan")
    (tmp_path / "one").rename(tmp_path / "two")
    assert output(fp.load_plan(tmp_path / "two" / "step.plan")) == [0, 1, 2, 3]
    fp.load_plan(tmp_path / "two" / "step.plan").save(tmp_path / "two" / "again.plan")
    assert (tmp_path / "two" / "again.plan").read_bytes() == (tmp_path / "two" / "step.plan").read_bytes()


def test_weights_elsewhere_are_read_where_the_user_says(tmp_path: Path) -> None:
    (tmp_path / "plans").mkdir()
    path = tmp_path / "plans" / "step.plan"
    fp.compile(model(tmp_path / "models" / "w.bin")).save(path)
    with pytest.raises(PlanError, match=r"weights of 'w'.*weights_folder=…, --weights-folder"):
        fp.load_plan(path)
    assert output(fp.load_plan(path, weights_folder=tmp_path / "models")) == [0, 1, 2, 3]
    with pytest.raises(ModelError, match="cannot be read"):
        fp.load_plan(path, weights_folder=tmp_path / "plans").bind()
    assert "--weights-folder" in foreplan("verify", path, code=1).stderr
    for command in ("verify", "estimate", "view", "bench"):
        foreplan(command, path, "--weights-folder", tmp_path / "models")
    foreplan("diff", path, path, "--weights-folder", tmp_path / "models")
    np.savez(tmp_path / "x.npz", x=np.ones(4, np.float32))
    foreplan("run", path, "--data", tmp_path / "x.npz", "--weights-folder", tmp_path / "models")
    assert "is no plan file" in foreplan("estimate", "mlp:batch=2", "--weights-folder", tmp_path, code=2).stderr
    assert "is no plan file" in foreplan("estimate", "mlp:batch=2", "--trust-code", code=2).stderr


@pytest.mark.parametrize("place", ["/etc/passwd", "../w.bin", "a/../../w.bin", "a\0b", "link", "", "below/link"])
def test_a_plan_leads_nowhere_else(tmp_path: Path, place: str) -> None:
    folder = tmp_path / "plans"
    folder.mkdir()
    step = fp.compile(model(folder / "w.bin"))
    step.save(folder / "step.plan")
    os.link(folder / "w.bin", tmp_path / "w.bin")
    (folder / "link").symlink_to(tmp_path / "w.bin")
    (folder / "below").mkdir()
    (folder / "below" / "link").symlink_to("../../w.bin")

    def edit(data: dict[str, Any]) -> None:
        next(slot for slot in data["slots"] if slot["role"] == "stored")["init"]["file"] = place

    def edit_both(data: dict[str, Any]) -> None:
        file = Path(place)
        edit(data)
        next(slot for slot in data["slots"] if slot["role"] == "stored")["init"]["file"] = file.name
        data["header"]["weights"] = os.path.normpath(file.parent)

    text = (folder / "step.plan").read_text()
    for change in (edit, edit_both):
        (folder / "edited.plan").write_text(edited(text, change))
        with pytest.raises(PlanError):
            fp.load_plan(folder / "edited.plan")
        if Path(place).name in ("passwd", "w.bin"):
            continue
        with pytest.raises((PlanError, ModelError)):
            fp.load_plan(folder / "edited.plan", weights_folder=folder).bind()


@pytest.mark.parametrize(
    ("key", "wrong"),
    [("offset", -4), ("offset", 1 << 62), ("type", "float32[5]"), ("type", "int32[4]"), ("bytes", "20")],
)
def test_weights_are_of_their_slot_s_type_and_lie_in_their_file(tmp_path: Path, key: str, wrong: Any) -> None:
    fp.compile(model(tmp_path / "w.bin")).save(tmp_path / "step.plan")

    def edit(data: dict[str, Any]) -> None:
        next(slot for slot in data["slots"] if slot["role"] == "stored")["init"][key] = wrong

    (tmp_path / "step.plan").write_text(edited((tmp_path / "step.plan").read_text(), edit))
    with pytest.raises(PlanError, match=r"damaged .*(the content of 'w' is|not a whole number)"):
        fp.load_plan(tmp_path / "step.plan")


def test_a_pipe_in_the_place_of_weights_is_not_waited_for(tmp_path: Path) -> None:
    step = fp.compile(model(tmp_path / "w.bin"))
    step.save(tmp_path / "step.plan")
    (tmp_path / "w.bin").unlink()
    os.mkfifo(tmp_path / "w.bin")
    with pytest.raises(ModelError, match="cannot be read"):
        fp.load_plan(tmp_path / "step.plan").bind()
