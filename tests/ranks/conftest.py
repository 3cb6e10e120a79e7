"""Small buckets, so that small models have several."""

from __future__ import annotations

import pytest

from foreplan.passes.ranks import setting


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets of an eighth of the weights, however few these are."""
    monkeypatch.setattr(setting, "LEAST", 1)
