"""The outputs of commands in README.md and docs/ are those that the commands have (docs/make_outputs.py)."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
MADE: dict[str, Any] = runpy.run_path(str(ROOT / "docs" / "make_outputs.py"), run_name="make_outputs")
QUICK = {"your-own-framework.md"}  # a page whose commands take a second; those of others search for many


def pages() -> list[Any]:
    found = [page for page in MADE["PAGES"] if MADE["has_commands"](page)]
    return [
        pytest.param(page, id=page.name, marks=[] if page.name in QUICK else [pytest.mark.thorough]) for page in found
    ]


@pytest.mark.parametrize("page", pages())
def test_the_outputs_on_a_page_are_those_of_its_commands(page: Path) -> None:
    assert MADE["differences"](page) == "", f"run python docs/make_outputs.py {page.relative_to(ROOT)}"


@pytest.fixture
def again(tmp_path: Path) -> Callable[[str], str]:
    def made(text: str) -> str:
        page = tmp_path / "page.md"
        page.write_text(text)
        return MADE["made_again"](page)

    return made


def block(*lines: str) -> str:
    return "\n".join(("```console", *lines, "```", ""))


def test_an_output_is_written_behind_its_command(again: Callable[[str], str]) -> None:
    text = "# Title\n" + block("$ echo one; echo two", "old", "$ echo three", "$ echo 1 \\", "  2", "old") + "end\n"
    expected = block("$ echo one; echo two", "one", "two", "$ echo three", "three", "$ echo 1 \\", "  2", "1 2")
    assert again(text) == "# Title\n" + expected + "end\n"


def test_commands_of_a_page_share_a_folder_with_its_scripts(again: Callable[[str], str]) -> None:
    script = "```python\n# made/by.py\nprint(open('x').read())\n```\n"
    found = again(script + block("$ printf here > x", "$ python made/by.py", "$ ls"))
    assert found == script + block("$ printf here > x", "$ python made/by.py", "here", "$ ls", "made", "x")
    assert again(block("$ ls")) == block("$ ls")  # another run begins with an empty one


def test_what_a_command_says_in_error_is_shown(again: Callable[[str], str]) -> None:
    command = '$ foreplan estimate no_such_model; echo "exit code $?"'
    assert "no_such_model" in (found := again(block(command))) and "\nexit code 2\n" in found
    with pytest.raises(SystemExit, match="exit code 2"):
        again(block("$ foreplan estimate no_such_model"))
    with pytest.raises(SystemExit, match="begins with"):
        again(block("output without a command"))


@pytest.mark.parametrize(
    ("before", "now", "stays"),
    [
        ("planned in 522 ms", "planned in 2.1 s", True),
        ("planned in 39.6 ms ok", "planned in   1,022.5 ms ok", True),
        ("took 3 min", "took 1.5 h", True),
        ("10 MiB in 5 ms", "11 MiB in 5 ms", False),
        ("50 instructions", "51 instructions", False),
        ("12 samples", "13 samples", False),
        ("5 µs", "7 ns", True),
    ],
)
def test_numbers_with_a_unit_of_time_alone_depend_on_the_machine(
    again: Callable[[str], str], before: str, now: str, stays: bool
) -> None:
    command = f"$ echo '{now}'"
    assert again(block(command, before)) == block(command, before if stays else now)


@pytest.mark.thorough
def test_a_command_that_compiled_the_planner_runs_again(
    again: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOREPLAN_CACHE_DIR", str(tmp_path / "cache"))
    found = again(block("$ foreplan estimate mlp:width=8,batch=2 | head -1"))
    assert "planned in" in found and "once on this machine" not in found
    assert (tmp_path / "cache").exists()
