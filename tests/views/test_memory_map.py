"""The memory map: one page that needs nothing else, whatever the names are."""

from __future__ import annotations

import base64
import html.parser
import json
import re
from typing import Any

import numpy as np
import pytest

from foreplan.planner.plan import Certificate, Plan, Step
from foreplan.planner.problem import Action, Problem, Region, Role, Value
from foreplan.report.memory import Memory
from foreplan.views.memory_map import map_html
from foreplan.views.memory_map_data import map_data
from tests.views.small import EVIL, KIB, many_lives, small


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


def numbers(text: str) -> list[int]:
    """A column, by the words of the data's own description."""
    kind, _, code = text.partition(":")
    return np.frombuffer(base64.b64decode(code), f"<{kind}").tolist()


def names(data: dict[str, Any], nodes: str) -> list[str]:
    texts = [data["texts"][i] for i in numbers(data["tree"]["text"])]
    parents = numbers(data["tree"]["parent"])

    def name(node: int) -> str:
        return name(parents[node]) + texts[node] if node else ""

    return [name(node) for node in numbers(nodes)]


def test_the_data_holds_every_buffer() -> None:
    data = json.loads(Page(map_html([Memory(*small())])).scripts[0])
    (plan,) = data["plans"]
    found = plan["buffers"]
    columns = [numbers(found[name]) for name in ("offset", "nbytes", "lower", "upper", "written")]
    ends = numbers(found["read"])
    readers = [numbers(found["readers"])[a:b] for a, b in zip([0, *ends], ends)]
    regions = [plan["regions"][r] for r in numbers(found["region"])]
    assert dict(zip(names(data, found["name"]), zip(regions, *columns, readers))) == {
        "w": ("persistent", 0, 4 * KIB, 0, 3, 2, [0, 2]),
        "x": ("arena", 0, 2 * KIB, 0, 1, -1, [0]),
        "a": ("arena", 2 * KIB, 8 * KIB, 0, 2, 0, [1]),
        "g": ("arena", 0, KIB, 1, 3, 1, [2]),
        "forward (workspace)": ("arena", 10 * KIB, 3 * KIB, 0, 1, 0, []),
    }
    assert plan["base"] == [0, 4 * KIB]
    assert plan["arena"] == plan["top"] == 17 * KIB
    assert names(data, plan["steps"]["name"]) == ["forward", "backward", "update"]
    assert [data["phases"][phase] for phase in numbers(plan["steps"]["phase"])] == ["forward", "backward", "update"]
    assert plan["steps"]["time"] is None  # no action says how long it takes
    assert plan["peak"] == 0


def test_all_lives_of_a_value_are_one_thing() -> None:
    data = map_data([Memory(*many_lives())], ["a note"])
    found = data["plans"][0]["buffers"]
    things = dict.fromkeys(numbers(found["thing"]), 0)
    lives = list(zip(numbers(found["thing"]), numbers(found["lower"]), numbers(found["upper"])))
    assert [life[1:] for life in lives if life[0] == 1] == [(0, 2), (1, 4), (3, 5), (6, 8)]
    assert len(things) == 6  # x, a, b, c, d, y
    assert numbers(data["plans"][0]["steps"]["time"])[-1] == 10_000
    assert data["notes"] == ["a note"]


def test_two_plans_share_one_axis() -> None:
    data = map_data([Memory(*many_lives()), Memory(*small())])
    assert "place" not in data["plans"][0]["steps"]
    assert numbers(data["plans"][1]["steps"]["place"])[-1] == 8  # the end of one lies at the end of the other


@pytest.mark.parametrize("most", [0, 255, 256, 65_535, 65_536, 2**32 - 1, 2**32, 2**52])
def test_numbers_of_any_size_are_exact(most: int) -> None:
    problem = Problem((Value("v", most, role=Role.INPUT),), ())
    plan = Plan(problem.digest, (), ((0, 0),), (), (most,), most, most, None, Certificate(0, "none", "none"))
    assert numbers(map_data([Memory(problem, plan)])["plans"][0]["buffers"]["nbytes"]) == [most]


def test_host_memory_lies_apart_above_the_device():
    problem, plan = small()
    regions = (Region("persistent"), Region("host", on_device=False), Region("arena"))
    values = tuple(v if v.region == 0 else Value(v.name, v.nbytes, region=2, role=v.role) for v in problem.values)
    moved = Problem(values, problem.actions, regions)
    changed = {"problem_digest": moved.digest, "heights": (4 * KIB, 5 * KIB, 13 * KIB), "steps": (), "ends": ()}
    heights = Plan(**{**plan.__dict__, **changed})
    (data,) = map_data([Memory(moved, heights)])["plans"]
    assert data["base"][0] == 0 and data["base"][2] == 4 * KIB
    assert data["base"][1] > 17 * KIB
    assert data["top"] == data["base"][1] + 5 * KIB


def test_the_page_fetches_nothing():
    text = map_html([Memory(*small())], title="t")
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
    text = map_html([Memory(problem, plan)], title)
    page = Page(text)
    assert [tag for tag, _ in page.tags].count("script") == 2
    assert "img" not in {tag for tag, _ in page.tags}
    assert "alert" not in page.scripts[1]
    data = json.loads(page.scripts[0])
    assert EVIL in names(data, data["plans"][0]["buffers"]["name"])


def test_equal_plans_give_equal_bytes() -> None:
    assert map_html([Memory(*small())]) == map_html([Memory(*small())])


def test_an_empty_plan():
    problem = Problem((), ())
    plan = Plan(problem.digest, (), (), (), (0,), 0, 0, 0, Certificate(0, "none", "none"))
    data = json.loads(Page(map_html([Memory(problem, plan)])).scripts[0])
    assert numbers(data["plans"][0]["buffers"]["name"]) == []
    assert "no instructions" in str(Memory.of(problem, plan))


def chain(n: int) -> tuple[Problem, Plan]:
    """`n` values, each read by the next action; two places in turn."""
    values = tuple(Value(f"v{i}", 64) for i in range(n))
    actions = tuple(Action(f"a{i}", (i - 1,) if i else (), (i,)) for i in range(n))
    steps = tuple(Step(i, (64 * ((i - 1) % 2),) if i else (), (64 * (i % 2),)) for i in range(n))
    problem = Problem(values, actions)
    return problem, Plan(problem.digest, steps, (), (), (128,), 128, 128, None, Certificate(1, "by hand", "program"))


def test_ten_thousand_buffers_stay_small():
    text = map_html([Memory(*chain(10_000))])
    assert len(text) < 1_500_000
