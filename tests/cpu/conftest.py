"""Tests that run in both types run in bfloat16 as far as the profile asks for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engines.engine import in_shares


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Iterator[None]:
    """Only cases that are asked for are made."""
    yield
    in_shares(metafunc)
