"""The memory map in a real browser: what it draws, and what it does when it is pointed at."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from foreplan.report.memory import Memory
from foreplan.views.memory_map import map_html
from foreplan.views.picture import notebook_html
from tests.views.browser import Screen, browser
from tests.views.large import large
from tests.views.small import EVIL, KIB, many_lives, small

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as found:
        yield found


@pytest.fixture
def screen(chromium: Any, tmp_path: Path) -> Iterator[Screen]:
    shown = Screen(chromium, tmp_path)
    yield shown
    assert shown.errors == []
    shown.page.close()


def click(page: Any, x: str, y: str) -> None:
    """Click on the map at a place of the axis and a byte, as the page's own scales have them."""
    px, py = page.evaluate(f"[sx({x}), sy({y})]")
    page.locator("#map").click(position={"x": px, "y": py})


def colours(page: Any, canvas: str = "map") -> dict[tuple[int, ...], int]:
    """How many pixels of a canvas have each colour."""
    found = page.evaluate(
        f"""(() => {{
          const c = $("{canvas}"), image = c.getContext("2d").getImageData(0, 0, c.width, c.height), found = new Map();
          for (const each of new Uint32Array(image.data.buffer)) found.set(each, (found.get(each) || 0) + 1);
          return [...found];
        }})()"""
    )
    return {(each & 255, each >> 8 & 255, each >> 16 & 255): count for each, count in found}


GREEN, BLUE, ORANGE = (0x3A, 0x9A, 0x63), (0x3F, 0x78, 0xB5), (0xE0, 0x70, 0x2B)


def test_it_draws_each_buffer_with_its_area(screen: Screen) -> None:
    page = screen.open(map_html([Memory(*small())]))
    found = colours(page)
    # w has 4 KiB for 3 instructions, a has 8 KiB for 2, g has 1 KiB for 2. Seams and text take some of each.
    assert found[GREEN] / found[BLUE] == pytest.approx(16 / 12, rel=0.1)
    assert found[GREEN] / found[ORANGE] == pytest.approx(16 / 2, rel=0.15)
    shot = page.screenshot()
    assert len(shot) > 20_000


def test_names_are_text(screen: Screen) -> None:
    page = screen.open(map_html([Memory(*small(evil=True))], EVIL, [EVIL]))
    assert "4 buffers alive at the peak, 0 forward" in page.inner_text("#alive")
    assert EVIL in page.inner_text("#alive") and EVIL in page.inner_text("#notes")
    assert page.inner_text("h1") == EVIL


def test_a_click_picks_a_buffer_and_its_readers_lead_on(screen: Screen) -> None:
    page = screen.open(map_html([Memory(*small())]))
    click(page, "1.5", str(4 * KIB + 5 * KIB))
    assert screen.state("nameOf(picked)") == "a"
    assert "3 buffers alive at 1 backward" in page.inner_text("#alive")
    assert "8.00 KiB (8,192 bytes)" in page.inner_text("#picked")
    click(page, "0.5", "2000")  # w: read by the first instruction and by the update
    assert page.locator("#picked button.row").all_inner_texts() == ["0 forward", "2 update"]
    page.locator("#picked button.row").nth(1).click()
    assert screen.state("cursor") == 2
    page.keyboard.press("Escape")
    assert screen.state("[picked, cursor]") == [-1, 0]


def test_all_lives_of_a_value_are_shown_together(screen: Screen) -> None:
    page = screen.open(map_html([Memory(*many_lives())]))
    click(page, "0.5", str(2 * KIB))
    rows = page.locator("#picked button.row").all_inner_texts()
    assert rows[:4] == [
        "[0, 2): forward 0 block.f",
        "[1, 4), in host memory: copy 1 block.a/out",
        "[3, 5): copy 3 block.a/back",
        "[6, 8): recompute 6 block.f",
    ]
    page.locator("#picked button.row").nth(3).click()
    assert screen.state("[B.lower[picked], cursor]") == [6, 6]
    assert "4 of 4" in page.inner_text("#picked")


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("a", ["block.a", "block.a/host"]),
        (">1KiB", ["block.a", "block.a", "block.a", "block.a/host"]),
        ("<=1k block", ["block.b"]),
        ("in:block >=4096", ["block.a", "block.a", "block.a", "block.a/host"]),
        ("in:block.a/host", ["block.a/host"]),
        ("in:bloc", []),
        ("HOST", ["block.a/host"]),
    ],
)
def test_search_by_name_module_and_bytes(screen: Screen, query: str, expected: list[str]) -> None:
    page = screen.open(map_html([Memory(*many_lives())]))
    page.fill("#search", query)
    found = [text.splitlines()[0] for text in page.locator("#found button.row").all_inner_texts()]
    assert sorted(set(found)) == sorted(set(expected))
    if ">" in query:
        assert len(found) == 4
        # Two lives of 4 KiB are there at the same time while it is copied, four in all.
        assert page.inner_text("#found").startswith(
            "4 found, 16.00 KiB"
        ) and "8.00 KiB of them at once" in page.inner_text("#found")
    assert page.inner_text("#matches") == f"{len(found)} of 9"


def test_a_result_leads_to_its_place(screen: Screen) -> None:
    page = screen.open(map_html([Memory(*large(2000, 2))]))
    page.keyboard.press("/")
    page.keyboard.type("part7.block70.op700/out.1")
    page.locator("#found button.row").first.click()
    assert screen.state("nameOf(picked)") == "part7.block70.op700/out.1"
    assert screen.state("cursor") == 700
    assert screen.state("view.x0 <= 700 && 700 <= view.x1")


def test_a_link_restores_what_is_shown(screen: Screen) -> None:
    text = map_html([Memory(*many_lives())])
    page = screen.open(text)
    page.fill("#search", "block")
    page.click("#axis")
    click(page, "500", str(2 * KIB))
    screen.state("look({ x0: 100, x1: 6000, y0: 0, y1: 6000 })")
    page.locator(".chip", has_text="inputs").click()
    screen.until("location.hash.includes('find=block') && location.hash.includes('hide=inputs')")
    state = "[axis, nameOf(picked), B.lower[picked], cursor, [...found].length, shown, view]"
    before, behind = screen.state(state), screen.state("location.hash")
    page.close()
    screen.open(text, behind)
    assert screen.state(state) == before
    assert before[0] == "time" and before[-1] == {"x0": 100, "x1": 6000, "y0": 0, "y1": 6000}


def test_a_damaged_link_shows_everything(screen: Screen) -> None:
    screen.open(map_html([Memory(*small())]), "#x=a,b&y=5,1&pick=9@nobody&at=99&front=7&axis=wrong&hide=none")
    assert screen.state("[picked, cursor, axis]") == [-1, 2, "steps"]
    assert screen.state("view.x1") == 3


def test_the_axis_of_time(screen: Screen) -> None:
    page = screen.open(map_html([Memory(*many_lives())]))
    assert screen.state("[view.x1, stepAt(3.5)]") == [8, 3]
    page.keyboard.press("t")
    assert screen.state("[view.x1, stepAt(3500), stepAt(5900), stepAt(9999)]") == [10_000, 2, 3, 7]
    page.click("#axis")
    assert screen.state("view.x1") == 8
    page.close()
    page = screen.open(map_html([Memory(*small())]))  # whose actions take no time
    assert not page.is_visible("#axis")


def test_bands_of_phases_and_modules(screen: Screen) -> None:
    page = screen.open(map_html([Memory(*many_lives())]))
    lanes = "lanes.map((phase) => [D.phases[phase], Array.from(P.lanes[phase])])"
    assert screen.state(lanes) == [
        ["forward", [0, 1, 2, 3, 4, 6, 7, 8]],
        ["recompute", [6, 7]],
        ["copy", [1, 2, 3, 4]],
    ]
    assert screen.state("Array.from(P.levels[0]).map((x, i) => (i % 3 === 2 ? fullNames[x] : x))") == [
        0, 4, "block", 4, 5, "use", 5, 6, "rest", 6, 7, "block", 7, 8, "end",
    ]  # fmt: skip
    x, y = screen.state("[sx(1), rowTop(0) + 5]")
    page.locator("#bands").hover(position={"x": x, "y": y})
    assert "0 to 3: 4" in page.inner_text("#tip") and "6 µs" in page.inner_text("#tip")
    page.locator("#bands").click(position={"x": x, "y": y})
    assert screen.state("[Math.floor(view.x0), Math.ceil(view.x1)]") == [0, 5]
    assert screen.state("fullNames[module]") == "block"
    assert "block" in page.inner_text("#modules")


def test_modules_roll_up_what_is_alive(screen: Screen) -> None:
    page = screen.open(map_html([Memory(*many_lives())]))
    rows = [text.split("\t")[:2] for text in page.locator("#modules tbody tr").all_inner_texts()]
    assert rows == [["block", "5.00 KiB"], ["x", "1.00 KiB"], ["c", "1.00 KiB"]]  # at the peak
    page.locator("#modules tbody tr").first.click()
    rows = [text.split("\t")[:2] for text in page.locator("#modules tbody tr").all_inner_texts()]
    assert rows == [["a", "4.00 KiB"], ["b", "1.00 KiB"]]
    assert page.input_value("#search") == "in:block"


def test_zooming_in_shows_parts_of_parts(screen: Screen) -> None:
    screen.open(map_html([Memory(*large(2000, 1))]))
    assert screen.state("firstLevel()") == 0
    screen.state("look({ x0: 310, x1: 390 })")  # within part3
    assert screen.state("firstLevel()") == 0
    screen.state("look({ x0: 311, x1: 318 })")  # within part3.block31
    assert screen.state("firstLevel()") == 1


def test_two_plans_over_one_another(screen: Screen) -> None:
    page = screen.open(map_html([Memory(*small()), Memory(*small(scale=3))], "t"))
    assert screen.state("[P.arena, view.y1 > 33 * 1024]") == [17 * KIB, True]
    behind = colours(page)
    page.keyboard.press("o")
    assert screen.state("P.arena") == 33 * KIB
    assert "24.00 KiB" in page.inner_text("#alive")
    screen.until("!pending")
    assert colours(page)[GREEN] > 2 * behind[GREEN]  # a has three times the bytes
    assert page.locator(".figures").count() == 2
    assert page.locator(".subtitle").all_inner_texts() == [
        "Behind: 3 instructions · 5 buffers",
        "In front: 3 instructions · 5 buffers",
    ]


def test_the_text_of_a_level_is_whole_where_the_level_is_at_the_edge(screen: Screen) -> None:
    screen.open(map_html([Memory(*small())]))
    screen.state("look({ y0: 0, y1: P.arena })")
    places = screen.state(
        """(() => {
          const g = map.getContext("2d"), write = g.fillText, found = [];
          g.fillText = (text, x, y) => { found.push([text, y]); write.call(g, text, x, y); };
          drawMap();
          delete g.fillText;
          return found;
        })()"""
    )
    upper = screen.state("UPPER")
    assert [y - upper >= 9 for text, y in places if text == "arena 17.00 KiB"] == [True]
    screen.state("look({ y0: 0, y1: P.arena / 2 })")
    assert screen.state("sy(P.arena) < UPPER")  # it is not in view, and neither is its text


def test_dark_and_light(screen: Screen) -> None:
    page = screen.open(map_html([Memory(*small())]))
    before = colours(page)
    page.click("#theme")
    screen.until("!pending")
    panel = (0x17, 0x1B, 0x22)
    assert before.get(panel, 0) < 100 and colours(page)[panel] > 50_000


def test_a_frame_of_a_hundred_thousand_buffers(screen: Screen) -> None:
    """What a frame draws is counted, since a time would depend on the machine; benchmarks/memory_map.py has times."""
    screen.open(map_html([Memory(*large(20_000, 10))]))
    assert screen.state("P.count") == 100_001
    screen.state("draw()")
    assert screen.state("work.painted") == 100_001
    most = screen.state("(lanes.length + ROWS) * (width - LEFT - RIGHT)")
    assert 0 < screen.state("work.calls") <= most  # a column of pixels is filled once in each band
    screen.state("(look({ x0: 0, x1: 1000 }), draw())")
    # The first thousand instructions make 10 values each.
    assert screen.state("work.painted") in (10_001, 10_011)


def test_an_empty_plan(screen: Screen) -> None:
    from foreplan.planner.plan import Certificate, Plan
    from foreplan.planner.problem import Problem

    problem = Problem((), ())
    plan = Plan(problem.digest, (), (), (), (0,), 0, 0, 0, Certificate(0, "none", "none"))
    page = screen.open(map_html([Memory(problem, plan)]))
    assert "0 buffers alive" in page.inner_text("#alive")


def test_what_a_notebook_shows(screen: Screen) -> None:
    text = notebook_html(Memory(*small(evil=True)), EVIL)
    assert "<script" not in text and not re.search(r"\bon\w+=", text)
    page = screen.open(f"<!DOCTYPE html><meta charset=utf-8>{text}")
    assert "17.00 KiB" in page.inner_text("body") and page.locator("svg rect").count() > 5
    box = page.locator("svg").bounding_box()
    assert box["width"] == 900 and box["height"] == 320
