"""Every test of this folder that asks for an engine runs on each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engines.engine import Engine, in_shares, require, with_engines


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Iterator[None]:
    """On each engine, in bfloat16 too where a test is marked so; only the cases that the profile asks for are made."""
    with_engines(metafunc)
    yield
    in_shares(metafunc)


@pytest.fixture
def engine(request: pytest.FixtureRequest, compiled_ahead: None) -> Engine:
    """One engine with kernels of its own."""
    require(request.param.name)
    return request.param
