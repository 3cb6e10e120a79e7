"""What a cumulative sum refuses; tests/sweep has the rest."""

from __future__ import annotations

import numpy as np
import pytest

from foreplan.base.errors import ShapeError
from foreplan.graph import GraphBuilder
from foreplan.ops.scan import cumsum
from tests.ops.check import type_of


def test_refuses_what_has_no_sum() -> None:
    b = GraphBuilder()
    x = b.input("x", type_of(np.zeros((2, 3), np.bool_)))
    with pytest.raises(ShapeError, match="needs numbers"):
        cumsum(b, x, 0)
