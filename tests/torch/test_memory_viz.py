"""Snapshots in PyTorch's own page, in Chromium: what it draws and says are the names and bytes of the plan."""

from __future__ import annotations

import json
import pickle
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed: make setup-torch")

from torch.cuda import _memory_viz as viewer

import foreplan as fp
from foreplan.views.snapshot import eager_snapshot, plan_snapshot, snapshot_bytes
from tests.torch import memory_viz
from tests.views.browser import browser

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(memory_viz.missing()), reason=memory_viz.missing())]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as found:
        yield found


@pytest.fixture(scope="module")
def step() -> fp.Compiled:
    graph = fp.models.build("gpt2_small:batch=2,seq=16,layers=1,width=32,heads=2,vocabulary=64")
    return fp.compile(graph, "cross_entropy", fp.optim.Momentum(0.1))


def snapshot_of(step: fp.Compiled, which: str) -> dict[str, Any]:
    """As it is read from a file."""
    made = plan_snapshot(step.memory, "gpt2") if which == "plan" else eager_snapshot(step.as_pytorch().eager)
    return pickle.loads(snapshot_bytes(made))


class Viewer:
    """PyTorch's page with a snapshot in it."""

    def __init__(self, chromium: Any, snapshot: dict[str, Any]) -> None:
        self.errors: list[str] = []
        self.page = chromium.new_page(viewport={"width": 1500, "height": 900})
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", lambda line: line.type == "error" and self.errors.append(line.text))
        memory_viz.serve(self.page, viewer.trace_plot(snapshot), self.errors)
        self.kinds = self.page.locator("select").nth(1)
        self.shown("polygon")

    def shown(self, what: str) -> Any:
        found = self.page.locator(f"{what}:visible")
        found.first.wait_for(timeout=10_000)
        return found

    def choose(self, kind: str, what: str) -> Any:
        self.kinds.select_option(kind)
        return self.shown(what)

    def said(self, elements: Any, event: str = "mouseover") -> list[str]:
        """What the page says when it is pointed at each element; nothing for some that are drawn twice."""
        return elements.evaluate_all(
            """(all, event) => {
              const told = [...document.querySelectorAll("pre")].find((pre) => pre.offsetParent);
              return all.map((each) => {
                told.textContent = "";
                each.dispatchEvent(new MouseEvent(event, { bubbles: true }));
                return told.textContent;
              }).filter((text) => text);
            }""",
            event,
        )

    def blocks(self, kind: str) -> tuple[Counter[tuple[int, str]], float]:
        """Bytes and stacks of what a timeline shows, and the height of the highest in pixels."""
        polygons = self.choose(kind, "polygon")
        found = Counter[tuple[int, str]]()
        for text in self.said(polygons):
            if told := re.match(r"\d+ Addr: \S+, Size: \S+ \((\d+) bytes\) allocation.*\n", text):
                found[int(told[1]), text[told.end() :]] += 1
        heights = polygons.evaluate_all("(all) => all.map((each) => each.getBoundingClientRect().height)")
        return found, max(heights)


@pytest.fixture(params=["plan", "eager"])
def opened(request: Any, chromium: Any, step: fp.Compiled) -> Iterator[tuple[dict[str, Any], Viewer]]:
    snapshot = snapshot_of(step, request.param)
    shown = Viewer(chromium, pickle.loads(pickle.dumps(snapshot)))
    yield snapshot, shown
    assert shown.errors == []
    shown.page.close()


def events(snapshot: dict[str, Any], action: str) -> list[dict[str, Any]]:
    return [event for event in snapshot["device_traces"][0] if event["action"] == action]


def text_of(frames: list[dict[str, Any]]) -> str:
    return "\n".join(f"{frame['filename']}:{frame['line']}:{frame['name']}" for frame in frames)


def test_the_timeline_has_each_block_with_its_name_and_bytes(opened: tuple[dict[str, Any], Viewer]) -> None:
    snapshot, shown = opened
    found, height = shown.blocks("Active Memory Timeline")
    assert found == Counter((event["size"], text_of(event["frames"])) for event in events(snapshot, "alloc"))
    assert height > 20
    legend = {text for text in shown.page.locator("svg text:visible").all_text_contents() if not text[:1].isdigit()}
    assert legend >= {"parameters", "optimizer state", "activations"}
    assert legend - {""} == {event["category"] for event in snapshot["device_traces"][0] if "category" in event}


def test_the_history_has_each_event_and_its_bytes(opened: tuple[dict[str, Any], Viewer]) -> None:
    snapshot, shown = opened
    shown.choose("Allocator State History", "rect")
    rows = shown.page.locator("pre:visible ~ div pre")
    found = [
        tuple(map(int, re.findall(r"\((\d+) bytes\) (?:allocated|reserved)", text)))
        for text in shown.said(rows, "mousedown")
    ]
    allocated, reserved, expected = 0, 0, []
    for event in snapshot["device_traces"][0]:
        allocated += {"alloc": event["size"], "free_completed": -event["size"]}.get(event["action"], 0)
        reserved += event["size"] * (event["action"] == "segment_alloc")
        if event["action"] != "free_requested":  # the page shows both parts of a release as one
            expected.append((allocated, reserved))
    assert found == expected and len(found) > 100


def test_the_segments_are_those_of_the_snapshot(opened: tuple[dict[str, Any], Viewer]) -> None:
    snapshot, shown = opened
    found, _ = shown.blocks("Active Cached Segment Timeline")
    assert found == Counter((segment["total_size"], text_of(segment["frames"])) for segment in snapshot["segments"])


def test_the_settings_say_what_wrote_it(opened: tuple[dict[str, Any], Viewer]) -> None:
    snapshot, shown = opened
    shown.choose("Allocator Settings", "pre")
    told = json.loads(shown.page.locator("pre:visible").last.inner_text())
    assert told == snapshot["allocator_settings"]
    assert told["written by"] == f"foreplan {fp.__version__}"
