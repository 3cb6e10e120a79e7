"""Every test of this folder that asks for an engine runs on each."""

from __future__ import annotations

import pytest

from tests.engines.engine import Engine, left_out, require, with_engines


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """On each engine, in bfloat16 too where a test is marked so."""
    with_engines(metafunc)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out cases that the profile does not ask for."""
    left = left_out(items)
    config.hook.pytest_deselected(items=left)
    dropped = set(left)
    items[:] = [item for item in items if item not in dropped]


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> Engine:
    """One engine with kernels of its own."""
    require(request.param.name)
    return request.param
