"""What a plan is written as, read back by the libraries and the rules of each format."""

from __future__ import annotations

import csv
import json
import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import onnx
import pytest
from click.testing import CliRunner

import foreplan as fp
from foreplan.base.errors import UsageError
from foreplan.cli import cli
from foreplan.report.memory import Memory
from foreplan.views.digraph import plan_digraph, plan_dot_text
from foreplan.views.formats import FORMATS, write_view
from foreplan.views.picture import svg_text
from foreplan.views.traces import trace_text
from tests.oracle.peers import networkx
from tests.views.large import large
from tests.views.small import EVIL, KIB, many_lives, small
from tests.views.test_dot import statements

NASTY = f'{EVIL}\x00\n"];\x1b[2J'


def written(folder: Path, memory: Memory, ending: str) -> Path:
    path = folder / f"plan{ending}"
    write_view(path, memory, "a plan")
    return path


def nasty() -> Memory:
    """A plan whose names no format takes as they are."""
    problem, plan = many_lives()
    for i, value in enumerate(problem.values):
        object.__setattr__(value, "name", f"{NASTY}{i}")
    for action in problem.actions:
        object.__setattr__(action, "name", NASTY)
    return Memory(problem, plan)


@pytest.fixture(scope="module")
def step() -> Any:
    """A training step that computes some values again."""
    graph = fp.models.build("gpt2_small:batch=2,seq=64,layers=2,width=32,heads=2,vocabulary=64")
    return fp.compile(graph, fp.losses.cross_entropy, fp.optim.Nesterov(0.1), budget=0.8)


def rows_of(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_csv_has_a_row_a_buffer(tmp_path: Path) -> None:
    rows = rows_of(written(tmp_path, Memory(*many_lives()), ".csv"))
    lives = [row for row in rows if row["value"] == "1"]
    assert [(row["region"], row["lower"], row["upper"], row["readers"]) for row in lives] == [
        ("arena", "0", "2", "1"),
        ("host", "1", "4", "3"),
        ("arena", "3", "5", "4"),
        ("arena", "6", "8", "7"),
    ]
    assert [(row["begin_ns"], row["end_ns"], row["phase"]) for row in lives] == [
        ("0", "3000", "forward"),
        ("1000", "6000", "copy"),
        ("4000", "7000", "copy"),
        ("8000", "10000", "recompute"),
    ]
    assert {row["size"] for row in lives} == {str(4 * KIB)}
    assert len(rows_of(written(tmp_path, nasty(), ".csv"))) == 9


def test_svg_is_a_picture_of_each_buffer(tmp_path: Path) -> None:
    for memory in (Memory(*small()), nasty()):
        root = ElementTree.parse(written(tmp_path, memory, ".svg")).getroot()
        space = {"svg": "http://www.w3.org/2000/svg"}
        titled = [rect for rect in root.iterfind(".//svg:rect", space) if rect.find("svg:title", space) is not None]
        assert len(titled) == len(memory.buffers)
    sizes = {
        rect.find("svg:title", space).text.split()[0]: float(rect.get("width")) * float(rect.get("height"))
        for rect in ElementTree.fromstring(svg_text(Memory(*small()))).iterfind(".//svg:rect", space)
        if rect.find("svg:title", space) is not None
    }
    # Areas are bytes times instructions.
    assert sizes["a"] / sizes["w"] == pytest.approx(16 / 12, rel=0.01)
    assert sizes["g"] / sizes["w"] == pytest.approx(2 / 12, rel=0.01)


def test_a_small_svg_says_what_it_leaves_out() -> None:
    text = svg_text(Memory(*large(200, 5)), most=100)
    assert "401 smaller buffers are not drawn" in text and text.count("</title></rect>") == 100
    assert "not drawn" not in svg_text(Memory(*small()), most=100)


def events_of(path: Path) -> dict[str, list[dict[str, Any]]]:
    """By phase of the Trace Event Format."""
    found = defaultdict(list)
    for event in json.loads(path.read_text())["traceEvents"]:
        found[event["ph"]].append(event)
    return found


def test_a_trace_has_instructions_modules_counters_and_lives(tmp_path: Path) -> None:
    found = events_of(written(tmp_path, Memory(*many_lives()), ".trace.json"))
    assert [(event["name"], event["ts"], event["dur"]) for event in found["X"][:3]] == [
        ("block.f", 0, 1),
        ("block.a/out", 1, 2),
        ("block.g", 3, 1),
    ]
    assert [(event["name"], event["ts"]) for event in found["B"]] == [
        ("block", 0), ("block.a", 1), ("block.a", 4), ("block", 8),
    ]  # fmt: skip
    assert [(event["name"], event["ts"]) for event in found["E"]] == [
        ("block.a", 3), ("block.a", 6), ("block", 6), ("block", 9),
    ]  # fmt: skip
    counters = {name: [e["args"] for e in found["C"] if e["name"] == name] for name in ("live", "live bytes of")}
    live = [args["bytes"] for args in counters["live"]]
    assert live == [sum(args.values()) for args in counters["live bytes of"]]
    assert live == [5 * KIB, 5 * KIB, 2 * KIB, 6 * KIB, 7 * KIB, 3 * KIB, 6 * KIB, 6 * KIB]
    # Each arrow leads from the writing of a life to that of the next.
    arrows = [(begin["ts"], end["ts"]) for begin, end in zip(found["s"], found["f"], strict=True)]
    assert arrows == [(0.5, 2), (2, 5), (5, 8.5)]
    assert [event["id"] for event in found["s"]] == [event["id"] for event in found["f"]] == [1, 2, 3]


def test_a_trace_of_a_real_step(tmp_path: Path, step: Any) -> None:
    step.view(tmp_path / "step.trace.json")
    found = events_of(tmp_path / "step.trace.json")
    slices = found["X"]
    assert len(slices) == len(step.plan.steps)
    # Slices that follow one another do not overlap, in floating-point numbers too: viewers would nest them.
    assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in pairwise(slices))
    stack = []
    for event in json.loads((tmp_path / "step.trace.json").read_text())["traceEvents"]:
        if event["ph"] == "B":
            stack.append(event["name"])
        elif event["ph"] == "E":
            assert stack.pop() == event["name"]
    assert not stack
    total = sum(step.program.actions[each.action].nanoseconds for each in step.plan.steps)
    last = max(event["ts"] + event["dur"] for event in found["X"])
    assert last == pytest.approx(total / 1000) and total > 0
    assert max(e["args"]["bytes"] for e in found["C"] if e["name"] == "live") == step.memory.lower_bound
    assert any(event["cat"] == "recompute" for event in found["X"])


# The fields of each phase in the Trace Event Format (tests/views/test_perfetto.py has its reader).
FIELDS = {
    "M": {"name", "ph", "pid", "args"},
    "X": {"name", "ph", "pid", "tid", "cat", "ts", "dur", "args"},
    "B": {"name", "ph", "pid", "tid", "cat", "ts"},
    "E": {"name", "ph", "pid", "tid", "cat", "ts"},
    "C": {"name", "ph", "pid", "ts", "args"},
    "s": {"name", "ph", "pid", "tid", "cat", "ts", "id"},
    "f": {"name", "ph", "pid", "tid", "cat", "ts", "id", "bp"},
}


@pytest.mark.parametrize("memory", [Memory(*small()), Memory(*many_lives()), nasty()], ids=["small", "lives", "nasty"])
def test_every_event_of_a_trace_is_of_the_format(memory: Memory) -> None:
    trace = json.loads(trace_text(memory, NASTY))
    assert set(trace) == {"traceEvents", "displayTimeUnit", "otherData"} and trace["displayTimeUnit"] in ("ms", "ns")
    for event in trace["traceEvents"]:
        assert set(event) - {"tid"} == FIELDS[event["ph"]] - {"tid"} and ("tid" in event) >= (
            "tid" in FIELDS[event["ph"]]
        )
        assert event["name"].isprintable() and isinstance(event["pid"], int)
        assert event.get("ts", 0) >= 0 and event.get("dur", 0) >= 0
        if event["ph"] == "C":
            assert event["args"] and all(type(value) is int for value in event["args"].values())
    arrows = [(event["name"], event["cat"], event["id"]) for event in trace["traceEvents"] if event["ph"] in "sf"]
    assert arrows[::2] == arrows[1::2]  # an arrow ends under the name, the category and the number that it began with


def test_a_trace_without_predicted_times_says_so() -> None:
    trace = json.loads(trace_text(Memory(*small()), "t"))
    assert trace["otherData"]["clock"].startswith("one microsecond an instruction")
    assert [event["ts"] for event in trace["traceEvents"] if event["ph"] == "X"] == [0, 1, 2]


def test_speedscope_profiles_are_balanced(tmp_path: Path, step: Any) -> None:
    step.view(tmp_path / "step.speedscope.json")
    profile = json.loads((tmp_path / "step.speedscope.json").read_text())
    frames = profile["shared"]["frames"]
    time, memory = profile["profiles"]
    # As speedscope's schema has it (`file-format-schema.json`).
    assert set(profile) >= {"$schema", "shared", "profiles"} and all(set(frame) == {"name"} for frame in frames)
    shared = {"type", "name", "unit", "startValue", "endValue"}
    assert set(time) == shared | {"events"} and (time["type"], time["unit"]) == ("evented", "nanoseconds")
    assert set(memory) == shared | {"samples", "weights"} and memory["type"] == "sampled"
    assert all(set(event) == {"type", "frame", "at"} and event["type"] in "OC" for event in time["events"])
    assert len(memory["samples"]) == len(memory["weights"]) and min(memory["weights"]) > 0
    stack, at, seen = [], 0, []
    for event in time["events"]:
        if at < event["at"]:
            seen.append((at, frames[stack[-1]]["name"]))  # what runs from here on
        assert at <= event["at"]
        at = event["at"]
        if event["type"] == "O":
            stack.append(event["frame"])
        else:
            assert stack.pop() == event["frame"]
    assert not stack and at == time["endValue"]
    actions = [step.program.actions[each.action] for each in step.plan.steps]
    begins = accumulate((action.nanoseconds for action in actions), initial=0)
    assert seen == [(begin, action.name) for begin, action in zip(begins, actions) if action.nanoseconds]
    assert memory["unit"] == "bytes" and sum(memory["weights"]) == memory["endValue"]
    names = {frames[frame]["name"] for sample in memory["samples"] for frame in sample}
    assert {b.name for b in step.memory.largest(3)} <= names
    assert max(frame for sample in memory["samples"] for frame in sample) < len(frames)


def metadata(each: Any) -> dict[str, str]:
    return {prop.key: prop.value for prop in each.metadata_props}


def test_onnx_has_offsets_and_lifetimes(tmp_path: Path) -> None:
    model = onnx.load(written(tmp_path, Memory(*many_lives()), ".onnx"))
    onnx.checker.check_model(model)
    assert [node.name for node in model.graph.node][:2] == ["block.f", "block.a/out"]
    assert [list(node.output) for node in model.graph.node if node.name.startswith("block.f")] == [
        ["block.a"],
        ["block.a#3"],
    ]
    values = {each.name: metadata(each) for each in (*model.graph.value_info, *model.graph.output, *model.graph.input)}
    assert {key: values["block.a#2"][f"plan.{key}"] for key in ("offset", "lower", "upper", "region")} == {
        "offset": str(KIB), "lower": "3", "upper": "5", "region": "arena",
    }  # fmt: skip
    told = {each.name: each.doc_string for each in model.graph.value_info}
    assert told["block.a#2"] == "arena, bytes 1,024 to 5,119; alive from instruction 3 to 4"
    assert metadata(model.graph.node[1])["plan.phase"] == "copy"
    assert [each.name for each in model.graph.output] == ["y"]
    onnx.checker.check_model(onnx.load(written(tmp_path, nasty(), ".onnx")))


def test_onnx_of_a_real_step_has_shapes(tmp_path: Path, step: Any) -> None:
    step.view(tmp_path / "step.onnx")
    model = onnx.load(tmp_path / "step.onnx")
    onnx.checker.check_model(model)
    assert len(model.graph.node) == len(step.plan.steps)
    weight = next(each for each in model.graph.input if each.name == "wte.weight")
    assert [dim.dim_value for dim in weight.type.tensor_type.shape.dim] == [64, 32]
    assert {node.op_type for node in model.graph.node} >= {"matmul", "map"}


def test_graphml_is_read_back_by_networkx(tmp_path: Path) -> None:
    for memory in (Memory(*many_lives()), nasty()):
        found = networkx.read_graphml(written(tmp_path, memory, ".graphml"))
        assert networkx.is_directed_acyclic_graph(found)
        assert found.graph["arena_bytes"] == 7 * KIB
        kinds = [kind for _, kind in found.nodes(data="kind")]
        assert (kinds.count("instruction"), kinds.count("content")) == (8, 9)
        assert set(found.successors("c0")) == {"i0", "i2", "i6"}  # x is read by f twice, and by g
    digraph = plan_digraph(Memory(*many_lives()))
    a = [n for n, data in digraph.nodes(data=True) if data["name"].startswith("block.a") and data["kind"] == "content"]
    assert [digraph.nodes[n]["lower"] for n in a] == [0, 1, 3, 6]
    assert networkx.dag_longest_path_length(digraph) == 12


def test_graphml_without_networkx_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "networkx", None)
    with pytest.raises(UsageError, match=r"pip install 'foreplan\[networkx\]'"):
        write_view(tmp_path / "plan.graphml", Memory(*small()), "t")
    assert not list(tmp_path.iterdir())


def test_dot_has_instructions_and_what_they_pass_on() -> None:
    found = statements(plan_dot_text(Memory(*many_lives())))
    boxes = [s[0] for s in found if len(s) > 1 and s[1] == "[" and s[0][1:].isdigit()]
    assert boxes == ["c0", *(f"i{i}" for i in range(8))]
    edges = [(s[0], s[2]) for s in found if "->" in s]
    assert ("i0", "i1") in edges and ("i3", "i4") in edges and ("i6", "i7") in edges and len(edges) == 10
    fill = {s[0]: s[s.index("fillcolor") + 2] for s in found if "fillcolor" in s}
    assert fill["i1"] == fill["i3"] != fill["i6"] != fill["i0"]
    assert len(statements(plan_dot_text(nasty()))) == len(found)
    replaced = [(s[0], s[2]) for s in statements(plan_dot_text(Memory(*small()))) if "dashed" in s]
    assert replaced == [("i2", "c0")]  # the update writes w


def test_every_form_comes_from_a_plan_file(tmp_path: Path) -> None:
    """By the command, which lists them all; and equal plans give equal files."""
    model = "mlp:width=8,layers=1,batch=2"
    run = CliRunner().invoke
    assert run(cli, ["plan", model, "-o", str(tmp_path / "step.plan")]).exit_code == 0
    listed = run(cli, ["view", "--help"]).output
    for each in FORMATS:
        assert f"  {each.ending} " in listed
        for source, name in ((str(tmp_path / "step.plan"), "a"), (model, "b")):
            done = run(cli, ["view", source, "-o", str(tmp_path / f"{name}{each.ending}")])
            assert done.exit_code == 0, done.output
        a, b = (tmp_path / f"{name}{each.ending}" for name in "ab")
        assert a.stat().st_size > 500
        if each.ending != ".html":  # a plan file keeps no notes
            assert a.read_bytes() == b.read_bytes(), each.ending


def test_names_that_ask_for_nothing_are_refused(tmp_path: Path) -> None:
    run = CliRunner().invoke
    for name in ("plan", "plan.txt", "plan.json"):
        done = run(cli, ["view", "mlp", "-o", str(tmp_path / name)])
        assert done.exit_code == 2 and ".speedscope.json" in done.output
    with pytest.raises(UsageError, match=r"no format .pdf.; choose one of html, .*graphml"):
        write_view(tmp_path / "plan", Memory(*small()), "t", format="pdf")
    with pytest.raises(UsageError, match="on a page only"):
        write_view(tmp_path / "two.svg", Memory(*small()), "t", over=Memory(*small()))
    with pytest.raises(UsageError, match=r"cannot write .*nowhere"):
        write_view(tmp_path / "nowhere" / "map.html", Memory(*small()), "t")
    done = run(cli, ["view", "mlp", "--over", "mlp", "-o", str(tmp_path / "map.html")])
    assert done.exit_code == 2 and "takes a plan file" in done.output
    done = run(cli, ["view", "mlp", "--over", "a.plan"])
    assert done.exit_code == 2 and "-o FILE" in done.output
    assert not list(tmp_path.iterdir())


def test_two_plan_files_over_one_another(tmp_path: Path, step: Any) -> None:
    step.save(tmp_path / "a.plan")
    done = CliRunner().invoke(
        cli, ["view", str(tmp_path / "a.plan"), "--over", str(tmp_path / "a.plan"), "-o", str(tmp_path / "map.html")]
    )
    assert done.exit_code == 0, done.output
    text = (tmp_path / "map.html").read_text()
    assert text.count('class="figures"') == 2


def test_a_notebook_shows_the_step(step: Any) -> None:
    text = step._repr_html_()
    root = ElementTree.fromstring(f"<body>{text}</body>".replace("<br>", "<br/>"))
    assert "gpt2_small on numpy" in "".join(root.itertext())
    assert fp.base.units.format_bytes(step.arena_bytes) in text and "<script" not in text and len(text) < 150_000
