"""Drawn modules that write in place have PyTorch's outputs and gradients."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make setup-torch")

import foreplan as fp  # noqa: E402
from tests.profile import pick  # noqa: E402
from tests.torch.drawn_writes import COLUMNS, ROWS, module, runs, source  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
EACH = 40


@pytest.mark.parametrize("first", range(0, pick(EACH, 3 * EACH, 100 * EACH), EACH))
def test_drawn_modules_are_pytorchs(first: int) -> None:
    x, count = torch.linspace(-1, 1, ROWS * COLUMNS).reshape(ROWS, COLUMNS), 0
    for seed in range(first, first + EACH):
        code = source(seed)
        if runs(code, x):
            count += 1
            try:
                fp.from_torch(module(code), x, check=True)
            except fp.ForeplanError as error:
                raise AssertionError(f"seed {seed}:\n{code}") from error
    assert count > EACH / 8
