"""Every op, drawn: each judge asks some cases of each op; and cases that once failed."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from foreplan.graph.registry import registered_ops
from tests.profile import pick
from tests.sweep.bounds import DIFFERENCES
from tests.sweep.case import parse_case
from tests.sweep.judges import JUDGES, judge_draws
from tests.sweep.table import ENTRIES, OF_RANKS, WITHOUT_KERNEL

ROOT = Path(__file__).parents[2]
FOUND = [path for path in sorted((Path(__file__).parent / "found").glob("*.txt")) if not path.stem.startswith("card-")]
DRAWS = pick(4, 4, 14)
MORE = {"boxes": 10, "shards": 10, "facts": 4}  # times as many, of judges that take next to no time
# All but those that need a card, which tests/gpu/test_on_card.py has.
PAIRS = [
    (judge, name)
    for judge in JUDGES
    for name, entry in ENTRIES.items()
    if judge != "card" and JUDGES[judge].serves(entry, name)
]


@pytest.mark.parametrize(("judge", "name"), PAIRS)
def test_drawn_cases(judge: str, name: str) -> None:
    judge_draws(judge, name, DRAWS * MORE.get(judge, 1))


def test_every_op_has_an_entry() -> None:
    named = {*ENTRIES, *WITHOUT_KERNEL, *OF_RANKS}
    assert set(registered_ops()) == named, "each op has an entry in tests/sweep/table.py: docs/adding-an-op.md"


@pytest.mark.parametrize("name", list(ENTRIES))
def test_a_case_is_its_text(name: str) -> None:
    for seed in range(20):
        case = ENTRIES[name].draw(Random(seed))
        again = parse_case(str(case))
        assert again == case
        assert [x.tobytes() for x in again.arrays()] == [x.tobytes() for x in case.arrays()]


@pytest.mark.parametrize("path", FOUND, ids=lambda path: path.stem)
def test_what_once_failed(path: Path) -> None:
    """A file is named after a judge and what was wrong; it holds the case."""
    judge = JUDGES[path.stem.split("-")[0]]
    judge.require()
    judge.judge(parse_case(path.read_text()))


def test_the_table_of_differences_is_in_the_documentation() -> None:
    lines = (ROOT / "docs" / "engines.md").read_text().splitlines()
    rows = [f"| {x.engine} | {x.where} | {x.what} | {x.bound} |" for x in DIFFERENCES]
    start = lines.index("| engine | where | what | bound |") + 2
    assert lines[start : start + len(rows)] == rows
