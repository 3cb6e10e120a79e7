"""Every text of a pass: what the pass makes of the graph, and that the graph computes the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from foreplan.graph import parse_graph
from tests.passes.judges import judge
from tests.passes.texts import FOLDER, PASSES, Case, cases_of, files

CASES = {
    f"{file.parent.name}: {case.title.splitlines()[0]}": (file, case) for file in files() for case in cases_of(file)
}


@pytest.mark.parametrize(("file", "case"), CASES.values(), ids=CASES)
def test_a_pass(file: Path, case: Case) -> None:
    before, after = case.run(file.parent.name)
    assert ("" if after is before else after.as_text()) == case.after, "python -m tests.passes.texts writes it anew"
    assert after is before or case.after != case.before, "it has nothing to do, and gives another graph"
    if after is not before:
        if file.parent.name != "quantised_weights":  # whose content text does not carry
            assert parse_graph(case.after).as_text() == case.after
        judge(file.parent.name)(before, after, np.random.default_rng(0))


def test_texts_are_read_and_written() -> None:
    for file in files():
        assert "\n".join(case.as_text() for case in cases_of(file)) == file.read_text(), file
        assert file.parent.name in PASSES, file
    assert set(PASSES) == {file.parent.name for file in files()}, "each pass has a text"
    assert len(CASES) == sum(len(cases_of(file)) for file in files()), f"two cases of a pass in {FOLDER} share a title"
