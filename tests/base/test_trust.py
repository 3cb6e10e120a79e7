"""What docs/trust.md says of every kind of file: none runs code, and names stay text."""

from __future__ import annotations

import json
import os
import pickle
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper

import foreplan as fp
from foreplan.cli import cli
from foreplan.lower.program import Program
from foreplan.runtime import planread
from tests.cli.shell import MODEL, foreplan
from tests.runtime.test_planfile import edited

EVIL = "</script><img src=x onerror=alert(1)><script>alert(2)</script>"


class Harm:
    """Unpickled, it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


@pytest.fixture
def harm(tmp_path: Path) -> bytes:
    """A pickle that works."""
    made = pickle.dumps(Harm(tmp_path / "done"))
    pickle.loads(made)
    (tmp_path / "done").rmdir()
    return made


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", MODEL, "--data", "{}"],
        ["train", MODEL, "--data", "{}"],
        ["estimate", "{}"],
        ["verify", "{}"],
        ["verify", "{}", "--trust-code"],
        ["diff", "{}", "{}"],
        ["place", "{}"],
    ],
)
@pytest.mark.parametrize("name", ["x.npz", "x.npy", "x.onnx", "x.plan", "x.csv"])
def test_no_command_loads_a_pickle(tmp_path: Path, harm: bytes, arguments: list[str], name: str) -> None:
    (tmp_path / name).write_bytes(harm)
    as_plan = arguments[0] == "verify" or (name == "x.plan" and arguments[0] in ("estimate", "diff"))
    done = foreplan(*(each.replace("{}", str(tmp_path / name)) for each in arguments), code=1 if as_plan else 2)
    assert done.stderr.startswith(("error: ", "Usage: ")) and not (tmp_path / "done").exists()


def test_a_checkpoint_is_no_pickle(tmp_path: Path, harm: bytes) -> None:
    (tmp_path / "w.safetensors").write_bytes(harm)
    session = fp.compile(fp.models.build(MODEL)).bind()
    with pytest.raises(fp.SessionError):
        session.load(tmp_path / "w.safetensors")
    assert not (tmp_path / "done").exists()


class Tags(HTMLParser):
    """Which elements a page has."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append(tag)


def with_digest(text: str) -> str:
    """A plan file whose problem's digest fits again."""
    about = Program((), (), (), target="numpy")
    program = planread._program(json.loads(text), about, "", {})
    return edited(text, lambda data: data["plan"].update(problem=program.digest))


def test_names_in_a_plan_file_are_text_on_the_map(tmp_path: Path) -> None:
    fp.compile(fp.models.build(MODEL)).save(tmp_path / "step.plan")
    text = (tmp_path / "step.plan").read_text()

    def evil(data: dict[str, Any]) -> None:
        data["header"]["model"] = EVIL
        for i, record in enumerate(data["values"]):
            record[0] = f"{EVIL}{i}"
        for record in data["actions"]:
            record["name"] = record["source"] = EVIL
        for record in data["slots"]:
            record["name"] = f"{EVIL}{record['name']}"

    (tmp_path / "edited.plan").write_text(with_digest(edited(text, evil)))
    foreplan("view", tmp_path / "step.plan", "-o", tmp_path / "map.html")
    foreplan("view", tmp_path / "edited.plan", "-o", tmp_path / "evil.html")
    pages = []
    for name in ("map.html", "evil.html"):
        pages.append(Tags())
        pages[-1].feed((tmp_path / name).read_text())
    assert pages[0].found == pages[1].found and "script" in pages[0].found


STEERING = "w\x1b]52;c;aGk=\x07\r\x9b2J\x7f\u202egnp"
WRITTEN = "w\\u001b]52;c;aGk=\\u0007\\u000d\\u009b2J\\u007f\\u202egnp"


def steering(path: Path, op: str) -> None:
    """Write a model whose names would steer a terminal."""
    ends = [helper.make_tensor_value_info(end, TensorProto.FLOAT, [4, 4]) for end in ("x", "y")]
    weight = onnx.numpy_helper.from_array(np.ones((4, 4), np.float32), STEERING)
    graph = helper.make_graph([helper.make_node(op, ["x", STEERING], ["y"], STEERING)], "g", *zip(ends), [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path.write_bytes(model.SerializeToString())


def texts(data: Any) -> set[str]:
    """Every text in JSON."""
    if isinstance(data, dict):
        data = list(data.values())
    return {data} if isinstance(data, str) else set().union(*map(texts, data)) if isinstance(data, list) else set()


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_names_do_not_steer_a_terminal(tmp_path: Path, form: tuple[str, ...]) -> None:
    path, plan = tmp_path / "m.onnx", tmp_path / "m.plan"
    steering(path, "MatMul")
    printed = [
        foreplan(*command, *form)
        for command in (["estimate", path, "--infer"], ["plan", path, "--infer", "-o", plan], ["view", plan])
    ]
    steering(path, "Nothing")
    printed.append(foreplan("estimate", path, *form, code=2))
    for done in printed:
        text = done.stdout + done.stderr
        assert not [c for c in text if c != "\n" and not c.isprintable()], text
    shown = printed[2].stdout
    assert STEERING in texts(json.loads(shown)) if form else WRITTEN in shown


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_a_name_is_printed_in_any_encoding(encoding: str) -> None:
    """What the encoding has no place for is written out; bytes of a path that are no text, too."""
    for name in ("no→.onnx", "\udcff.onnx"):
        for form in ((), ("--json",)):
            done = CliRunner(charset=encoding).invoke(cli, ["estimate", name, *form])
            assert done.exit_code == 2 and isinstance(done.exception, SystemExit), done.exception
            assert "there is no such file" in done.stderr
            if form:
                assert json.loads(done.stdout)["message"].startswith(name)
