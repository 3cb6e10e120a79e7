"""What README.md and docs/ promise is true: the example runs, the commands exist, the links lead somewhere."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def test_the_examples_run_and_learn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, *others = re.findall(r"```python\n(.*?)```", README, re.S)
    assert len([line for line in first.splitlines() if line.strip()]) <= 24
    monkeypatch.chdir(tmp_path)
    for number in range(len(others) + 1):  # each one goes on where those before have ended
        (tmp_path / "example.py").write_text("".join((first, *others[:number])))
        found = runpy.run_path("example.py")
        assert found["result"].loss < 1.0
    assert {"weights.safetensors", "step.plan", "map.html"} <= {file.name for file in tmp_path.iterdir()}


def test_every_command_shown_exists() -> None:
    from foreplan.cli import cli

    shown = set(re.findall(r"^(?:    |\$ )foreplan (\w+)", README, re.M))
    promised = {"estimate", "plan", "verify", "view", "diff", "run", "train", "bench", "place", "models", "export"}
    assert shown | promised <= set(cli.commands)


FOLDERS = (".", "docs", "docs/reference", "cuda", "benchmarks/results")
PAGES = [page for folder in FOLDERS for page in sorted((ROOT / folder).glob("*.md"))]


def anchors(page: Path) -> set[str]:
    """What a link can name behind `#`: the headings, as GitHub writes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^#+ (.+)$", text, re.M)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
    for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", prose):
        if not target.startswith("http"):
            found = page.parent / target if target else page
            assert found.exists(), target
            assert not anchor or anchor in anchors(found), f"{target}#{anchor}"


def test_the_folders_of_tests_are_those_of_the_page() -> None:
    table = (ROOT / "docs" / "architecture.md").read_text().partition("| folder of `tests/` |")[2].partition("\n\n")[0]
    told = {name for row in table.splitlines()[1:] for name in re.findall(r"`(\w+)/", row.split("|")[1])}
    assert told == {path.parent.name for path in (ROOT / "tests").glob("*/*.py")}, "docs/architecture.md, Tests"


def test_the_list_of_ops_is_made_from_the_declarations() -> None:
    code = "import runpy; print(runpy.run_path('docs/make_ops.py')['text'](), end='')"
    made = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert made == (ROOT / "docs" / "ops.md").read_text(), "run python docs/make_ops.py"


def test_the_pages_of_exported_files_are_made_from_what_was_found() -> None:
    from tests.torch.report import as_page, as_results

    results = ROOT / "benchmarks" / "results" / "torch-exports.json"
    known = json.loads(results.read_text())
    assert as_page(known["modules"], known["versions"]) == (ROOT / "docs" / "exports.md").read_text()
    assert as_results(known["modules"], known["versions"]) == results.with_suffix(".md").read_text()


def test_the_reference_is_made_from_docstrings() -> None:
    """In another process, since tests import what adds to modules."""
    code = (
        "import json, runpy; made = runpy.run_path('docs/make_reference.py')\n"
        "print(json.dumps({page: made['text'](page) for page in made['PAGES']}))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    made = {f"{page}.md": text for page, text in json.loads(done.stdout).items()}
    assert made == {page.name: page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md")}, (
        "run python docs/make_reference.py"
    )


def test_the_reference_has_every_public_name() -> None:
    import foreplan
    from foreplan import planner

    pages = {page.stem: page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md")}
    titles = {page: set(re.findall(r"^## (\w+)$", text, re.M)) for page, text in pages.items()}
    assert set(foreplan.__all__) <= set(pages) | titles["foreplan"] | titles["session"] | titles["errors"]
    assert set(planner.__all__) == titles["planner"]


@pytest.mark.slow
def test_the_picture_is_what_the_command_draws(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "foreplan", "view", "resnet50", "--target", "numpy", "-o", "resnet50.svg"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    assert (tmp_path / "resnet50.svg").read_bytes() == (ROOT / "docs" / "resnet50.svg").read_bytes(), "run make outputs"
    arena = re.search(r"arena ([\d.]+ \w+)<", (ROOT / "docs" / "resnet50.svg").read_text())
    assert arena and f"The height is the arena: {arena[1]}." in " ".join(README.split())


def test_the_verdict_is_that_of_the_page() -> None:
    """Whose outputs are made by commands."""
    command = "foreplan estimate gpt2_small --batch 64 --target cuda:t4"
    (verdict,) = re.findall(rf"^\$ {command} .*\n(.*)$", (ROOT / "docs" / "memory.md").read_text(), re.M)
    assert f"`{command}` ends with `{verdict}`" in " ".join(README.split())


SITE = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]


def test_the_site_shows_every_page_once() -> None:
    shown = [page for part in SITE["nav"] for (pages,) in [part.values()] for page in leaves(pages)]
    assert sorted(shown) == sorted(str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").glob("**/*.md"))


def leaves(part: Any) -> list[str]:
    return (
        [part]
        if isinstance(part, str)
        else [leaf for each in part for (inner,) in [each.values()] for leaf in leaves(inner)]
    )


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("zensical", reason="the site's generator is not installed: make setup-docs")
    for name in ("docs", "zensical.toml"):  # a copy, so that nothing is left in the repository
        source = ROOT / name
        shutil.copytree(source, tmp_path / name) if source.is_dir() else shutil.copy(source, tmp_path / name)
    build = [sys.executable, "-m", "zensical", "build", "--strict"]
    done = subprocess.run(build, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / SITE["site_dir"] / "index.html").exists()
    page = tmp_path / "docs" / "index.md"
    page.write_text(page.read_text() + "\n[nowhere](no-such-page.md)\n")
    assert subprocess.run(build, cwd=tmp_path, capture_output=True).returncode != 0


def test_the_table_of_estimates_names_every_model() -> None:
    from foreplan import models

    page = (ROOT / "docs" / "zoo.md").read_text()
    table = page.split("<!-- estimates -->")[1].split("<!-- /estimates -->")[0]
    assert set(re.findall(r"^\| `(\w+)`", table, re.M)) == set(models.names())
