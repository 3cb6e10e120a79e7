"""The hard instances: each is a rectangle, cut."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "hard_instances.py"


@pytest.fixture(scope="module")
def script(request: pytest.FixtureRequest) -> dict:
    patch = pytest.MonkeyPatch()
    request.addfinalizer(patch.undo)
    patch.syspath_prepend(SCRIPT.parent)
    return runpy.run_path(str(SCRIPT))


@pytest.mark.parametrize("name", ["guillotine", "uneven", "pinwheel", "wired"])
def test_pieces_fill_the_rectangle_without_overlap(script: dict, name: str) -> None:
    found = script["pieces"](name, 60, 1)
    assert len(found) >= 60 and found == script["pieces"](name, 60, 1) != script["pieces"](name, 60, 2)
    filled = np.zeros((100, script["HEIGHT"]), np.int8)
    for begin, end, bottom, top in found:
        filled[begin:end, bottom:top] += 1
    assert (filled == 1).all()
