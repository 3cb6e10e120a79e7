"""What README.md and docs/ promise is true: the example runs, the commands exist, the links lead somewhere."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

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

    shown = set(re.findall(r"^    foreplan (\w+)", README, re.M))
    promised = {"estimate", "plan", "verify", "view", "diff", "run", "train", "bench", "place", "models", "export"}
    assert shown | promised <= set(cli.commands)


FOLDERS = (".", "docs", "cuda", "benchmarks/results")
PAGES = [page for folder in FOLDERS for page in sorted((ROOT / folder).glob("*.md"))]


def anchors(page: Path) -> set[str]:
    """What a link can name behind `#`: the headings, as GitHub writes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^#+ (.+)$", text, re.M)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", page.read_text()):
        if not target.startswith("http"):
            found = page.parent / target if target else page
            assert found.exists(), target
            assert not anchor or anchor in anchors(found), f"{target}#{anchor}"


def test_the_list_of_ops_is_made_from_the_declarations() -> None:
    code = "import runpy; print(runpy.run_path('docs/make_ops.py')['text'](), end='')"
    made = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert made == (ROOT / "docs" / "ops.md").read_text(), "run python docs/make_ops.py"


def test_the_table_of_estimates_names_every_model() -> None:
    from foreplan import models

    table = README.split("<!-- estimates -->")[1].split("<!-- /estimates -->")[0]
    assert set(re.findall(r"^\| `(\w+)`", table, re.M)) == set(models.names())
