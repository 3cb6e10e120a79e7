"""oneDNN's products where their matrices are copied."""

from __future__ import annotations

import numpy as np
import pytest

from foreplan.graph import Window
from foreplan.ops.matmul import MatMul
from tests.cpu.check import needs_onednn, type_of
from tests.engines.engine import Engine, in_both_types
from tests.kernels import normal

pytestmark = needs_onednn()


@in_both_types("cpu")
@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("columns", [1536, 3072])
def test_matrices_that_are_copied_a_panel_at_a_time(engine: Engine, columns: int, transpose_a: bool) -> None:
    """Rows a multiple of 2 KiB apart; the whole matrix, or a range of its columns."""
    a, b = normal(70, 64) if transpose_a else normal(64, 70), normal(70, columns)
    op, y = MatMul(transpose_a), normal(64, columns)
    engine.check(op, a, b)
    engine.check_over(op, [a, b, y], None, (0, 2))
    some = np.ascontiguousarray(b[:, :1000])
    windows = [Window.dense(type_of(a)), Window(type_of(some), (columns * 4, 4))]
    engine.check(op, a, some, windows=windows)
    if not transpose_a:
        engine.check(op, a.reshape(2, 32, 70), b)
