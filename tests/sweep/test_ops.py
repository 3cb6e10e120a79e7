"""Every op, drawn: each judge asks some cases of each op; and cases that once failed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foreplan.graph.op import registered_ops
from tests.sweep.bounds import DIFFERENCES
from tests.sweep.case import Case, parse_case
from tests.sweep.judges import JUDGES
from tests.sweep.table import ENTRIES

ROOT = Path(__file__).parents[2]
FOUND = sorted((Path(__file__).parent / "found").glob("*.txt"))
DRAWS = 20
PAIRS = [(judge, name) for judge in JUDGES for name, entry in ENTRIES.items() if JUDGES[judge].serves(entry, name)]


@pytest.mark.parametrize(("judge", "name"), PAIRS)
def test_drawn_cases(judge: str, name: str) -> None:
    """Twice the same draws: first they are only collected, as what they need is made faster for all at once."""
    chosen, entry = JUDGES[judge], ENTRIES[name]
    chosen.require()
    cases: list[Case] = []
    judged = 0

    def judge_it(case: Case) -> None:
        nonlocal judged
        judged += chosen.judge(case)

    use: Callable[[Case], None] = cases.append

    @settings(
        max_examples=DRAWS,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.randoms(use_true_random=False))
    def each(rng: Random) -> None:
        case = chosen.draw(entry, rng)
        try:
            use(case)
        except Exception as error:
            error.add_note(f"the case, for tests/sweep/found:\n{case}")
            raise

    each()
    chosen.prepare(cases)
    use = judge_it
    each()
    assert judged, "no draw has a kernel: nothing was judged"


def test_every_op_has_an_entry() -> None:
    assert set(ENTRIES) == set(registered_ops())


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
