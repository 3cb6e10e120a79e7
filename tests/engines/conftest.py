"""Every test of this folder that asks for an engine runs on each."""

from __future__ import annotations

import pytest

from tests.engines.engine import ENGINES, Engine, require


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Engine:
    """One engine with kernels of its own."""
    require(request.param)
    return ENGINES[request.param]
