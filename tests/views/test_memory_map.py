"""The memory map: one page that needs nothing else, whatever the names are."""

from __future__ import annotations

import html.parser
import json
import re
import shutil
import subprocess

import pytest

from foreplan.errors import UsageError
from foreplan.planner.plan import Certificate, Plan, Step
from foreplan.planner.problem import Action, Problem, Region, Value
from foreplan.views.memory import Memory
from foreplan.views.memory_map import map_data, map_html, write_map
from tests.views.small import EVIL, KIB, small

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Page(html.parser.HTMLParser):
    """Collects tags with their attributes, and the text of each script."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data):
        if self.tags and self.tags[-1][0] == "script" and self.scripts:
            self.scripts[-1] += data


def test_the_data_holds_every_buffer():
    problem, plan = small()
    data = json.loads(Page(map_html(problem, plan)).scripts[0])
    rows = {
        data["name"][n]: (data["regions"][r], offset, nbytes, lower, upper)
        for n, r, offset, nbytes, lower, upper in zip(
            data["nameOf"], data["region"], data["offset"], data["nbytes"], data["lower"], data["upper"]
        )
    }
    assert rows == {
        "w": ("persistent", 0, 4 * KIB, 0, 3),
        "x": ("arena", 0, 2 * KIB, 0, 1),
        "a": ("arena", 2 * KIB, 8 * KIB, 0, 2),
        "g": ("arena", 0, KIB, 1, 3),
        "forward (workspace)": ("arena", 10 * KIB, 3 * KIB, 0, 1),
    }
    assert data["base"] == [0, 4 * KIB]
    assert data["arena"] == data["top"] == 17 * KIB
    assert data["steps"] == ["forward", "backward", "update"]
    assert data["peak"] == 0


def test_host_memory_lies_apart_above_the_device():
    problem, plan = small()
    regions = (Region("persistent"), Region("host", on_device=False), Region("arena"))
    values = tuple(v if v.region == 0 else Value(v.name, v.nbytes, region=2, role=v.role) for v in problem.values)
    moved = Problem(values, problem.actions, regions)
    heights = Plan(**{**plan.__dict__, "heights": (4 * KIB, 5 * KIB, 13 * KIB), "steps": (), "ends": ()})
    data = map_data(Memory(moved, heights))
    assert data["base"][0] == 0 and data["base"][2] == 4 * KIB
    assert data["base"][1] > 17 * KIB
    assert data["top"] == data["base"][1] + 5 * KIB


def test_the_page_fetches_nothing():
    text = map_html(*small(), title="t")
    page = Page(text)
    for tag, attributes in page.tags:
        assert tag not in {"link", "img", "iframe", "object", "embed"}
        assert not {"src", "href", "srcset"} & set(attributes)
    assert not re.search(r"https?:|//[a-z]+\.|@import|url\(", text)
    policy = next(a["content"] for t, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy and "sha256-" in policy


@pytest.mark.parametrize("title", ["plain", EVIL, '"><img src=x onerror=alert(1)>', "{{js}} {{data}} {{title}}"])
def test_names_are_never_markup(title):
    problem, plan = small(evil=True)
    text = map_html(problem, plan, title)
    page = Page(text)
    assert [tag for tag, _ in page.tags].count("script") == 2
    assert "img" not in {tag for tag, _ in page.tags}
    assert "alert" not in page.scripts[1]
    assert EVIL in json.loads(page.scripts[0])["name"]


def test_equal_plans_give_equal_bytes(tmp_path):
    for name in "ab":
        write_map(tmp_path / name, *small())
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_an_unwritable_place_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"cannot write .*nowhere"):
        write_map(tmp_path / "nowhere" / "map.html", *small())


def test_an_empty_plan():
    problem = Problem((), ())
    plan = Plan(problem.digest, (), (), (), (0,), 0, 0, 0, Certificate(0, "none", "none"))
    assert json.loads(Page(map_html(problem, plan)).scripts[0])["nameOf"] == []
    assert "no instructions" in str(Memory.of(problem, plan))


def chain(n: int) -> tuple[Problem, Plan]:
    """`n` values, each read by the next action; two places in turn."""
    values = tuple(Value(f"v{i}", 64) for i in range(n))
    actions = tuple(Action(f"a{i}", (i - 1,) if i else (), (i,)) for i in range(n))
    steps = tuple(Step(i, (64 * ((i - 1) % 2),) if i else (), (64 * (i % 2),)) for i in range(n))
    problem = Problem(values, actions)
    return problem, Plan(problem.digest, steps, (), (), (128,), 128, 128, None, Certificate(1, "by hand", "program"))


def test_ten_thousand_buffers_stay_small():
    text = map_html(*chain(10_000))
    assert len(text) < 1_500_000


def screen(folder, problem, plan, script: str = "") -> str:
    """The page's elements after its scripts have run in a real browser."""
    page = map_html(problem, plan, "Title <b>")
    if script:  # the page's own policy allows no further script, so this copy goes without it
        page = re.sub(r"<meta http-equiv[^>]*>", "", page).replace("</body>", f"<script>{script}</script></body>")
    path = folder / "map.html"
    path.write_text(page)
    flags = ("headless", "no-sandbox", "disable-gpu", "disable-background-networking", "disable-component-update")
    done = subprocess.run(
        [BROWSER, *(f"--{flag}" for flag in flags), "--disable-sync", f"--user-data-dir={folder}/profile",
         "--virtual-time-budget=3000", "--window-size=1300,1000", "--dump-dom", f"file://{path}"],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert "Uncaught" not in done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="looks at the map in a real browser, and none is installed")
def test_a_browser_shows_it(tmp_path):
    shown = screen(tmp_path, *small(evil=True))
    assert "4 buffers alive at the peak, 0 forward" in shown
    assert "&lt;/script&gt;&lt;script&gt;alert(1)" in shown  # as text
    poke = (
        "const at=(t,x,y)=>map.dispatchEvent(new PointerEvent(t,{clientX:map.getBoundingClientRect().left+x,"
        "clientY:map.getBoundingClientRect().top+y,pointerId:1,bubbles:true}));map.setPointerCapture=()=>{};"
        "setTimeout(()=>{at('pointerdown',sx(1.5),sy(4096+5000));at('pointerup',sx(1.5),sy(4096+5000));"
        "search('g');document.body.dataset.found=[...found].map(nameOf).join()},200)"
    )
    shown = screen(tmp_path, *small(), script=poke)
    assert 'data-found="g"' in shown
    assert "3 buffers alive at 1 backward" in shown
    assert "<dd>8.00 KiB (8,192 bytes)</dd>" in shown


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="looks at the map in a real browser, and none is installed")
def test_a_browser_draws_ten_thousand_buffers_fast(tmp_path):
    timed = (
        "setTimeout(()=>{const t=performance.now();for(let i=0;i<5;i++){drawMap();drawLive()}"
        "map.getContext('2d').getImageData(0,0,1,1);document.body.dataset.ms=Math.round((performance.now()-t)/5)},200)"
    )
    shown = screen(tmp_path, *chain(10_000), script=timed)
    assert int(re.search(r'data-ms="(\d+)"', shown)[1]) < 500
