"""DOT text, read back by a small parser written from the language's grammar."""

from __future__ import annotations

import re

import pytest
from click.testing import CliRunner

from foreplan.base.errors import UsageError
from foreplan.cli import cli
from foreplan.graph import Fill, GraphBuilder, Kind, TensorType
from foreplan.graph.types import FLOAT32
from foreplan.ops.map import elementwise
from foreplan.views.digraph import write_graph
from foreplan.views.dot import dot_text, write_dot
from tests.oracle.peers import networkx
from tests.views.small import EVIL

TOKEN = re.compile(r'\s*("(?:[^"\\]|\\.)*"|->|[A-Za-z0-9_.]+|[\[\]{}=,;])')


def tokens(text: str) -> list[str]:
    """The whole text as tokens; fails where anything is left over."""
    found, at = [], 0
    text = text.rstrip()
    while at < len(text):
        match = TOKEN.match(text, at)
        assert match, text[at : at + 40]
        found.append(match[1])
        at = match.end()
    return found


def statements(text: str) -> list[list[str]]:
    words = tokens(text)
    assert words[0] == "digraph" and words[2] == "{" and words[-1] == "}"
    found: list[list[str]] = [[]]
    for word in words[3:-1]:
        if word == ";":
            found.append([])
        else:
            found[-1].append(word)
    assert found.pop() == []
    return found


def step(name: str = "w"):
    b = GraphBuilder("model")
    type = TensorType(FLOAT32, (2, 3))
    x, w = b.input("x", type), b.store(name, type, Kind.PARAMETER, Fill(0.0))
    y = elementwise(b, lambda x, w: x * w, x, w, name="scale")
    b.kind = Kind.GRADIENT
    g = elementwise(b, lambda x: x * x, x, name="square")
    new = elementwise(b, lambda w, g: w - g, w, g, name="step")
    return b.finish({"y": y}, updates={w: new})


def test_nodes_edges_and_colours():
    found = statements(dot_text(step()))
    boxes = {s[0]: s for s in found if len(s) > 1 and s[1] == "[" and s[0][1:].isdigit()}
    assert sorted(boxes) == ["n0", "n1", "n2", "r0", "v0", "v1"]
    fill = {name: s[s.index("fillcolor") + 2] for name, s in boxes.items()}
    assert len({fill["n0"], fill["n1"], fill["n2"]}) == 3  # forward, backward, update
    assert any(r"scale\nmap" in word for word in boxes["n0"])
    edges = {(s[0], s[2]): s for s in found if "->" in s}
    solid = {("v0", "n0"), ("v1", "n0"), ("v0", "n1"), ("v1", "n2"), ("n1", "n2"), ("n0", "r0")}
    assert set(edges) == solid | {("n2", "v1")}
    assert '"float32[2,3]"' in edges["v0", "n0"]
    assert "dashed" in edges["n2", "v1"]


def test_graphml_of_a_graph_is_read_back_by_networkx(tmp_path):
    write_graph(tmp_path / "g.graphml", step(f"w\x00{EVIL}"))
    found = networkx.read_graphml(tmp_path / "g.graphml")
    assert {n: data["kind"] for n, data in found.nodes(data=True)} == {
        "v0": "input", "v1": "parameter", "v2": "activation", "v3": "gradient", "v4": "gradient",
        "n0": "node", "n1": "node", "n2": "node",
    }  # fmt: skip
    assert found.nodes["v0"]["type"] == "float32[2,3]" and found.nodes["n2"]["name"] == "step"
    assert set(found.edges) == {
        ("v0", "n0"), ("v1", "n0"), ("n0", "v2"), ("v0", "n1"), ("n1", "v3"), ("v1", "n2"), ("v3", "n2"), ("n2", "v4"),
    }  # fmt: skip


def test_a_graph_is_written_as_the_name_says(tmp_path):
    write_graph(tmp_path / "g.dot", step())
    assert (tmp_path / "g.dot").read_text() == dot_text(step())
    with pytest.raises(UsageError, match=r"as \.dot or as \.graphml"):
        write_graph(tmp_path / "g.svg", step())
    done = CliRunner().invoke(cli, ["graph", "mlp:width=8,layers=1,batch=2", "-o", str(tmp_path / "m.dot")])
    assert done.exit_code == 0 and (tmp_path / "m.dot").read_text().startswith("digraph") and not done.output


def test_names_are_never_syntax(tmp_path):
    name = 'a"];} \\" \\N </b>\n->'
    write_dot(tmp_path / "g.dot", step(name))
    labels = [
        word for s in statements((tmp_path / "g.dot").read_text()) if s[0] == "v1" for word in s if "</b>" in word
    ]
    assert labels == [r'"a\"];} \\\" \\N </b>\n->\nfloat32[2,3]"']
