"""Fixtures of tests that also run on a card, from another module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from foreplan.runtime.cuda import table
from foreplan.runtime.cuda.kernels import resize


@pytest.fixture
def one_axis_a_pass(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Gradients of `resize` that are summed along one axis after the other, however few terms there are."""
    monkeypatch.setattr(resize, "MOST_TERMS", 0)
    table._make.cache_clear()
    yield
    table._make.cache_clear()
