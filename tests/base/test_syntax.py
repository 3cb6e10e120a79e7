"""Texts that several threads parse."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from foreplan.base.syntax import expression


class Cycle:
    """Another thread runs while the garbage collector takes it away."""

    def __init__(self) -> None:
        self.own = self

    def __del__(self) -> None:
        time.sleep(1e-5)


@pytest.fixture
def busy_collector() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(20, 1, 1)
    try:
        yield
    finally:
        gc.set_threshold(*before)


@pytest.mark.usefixtures("own_garbage", "busy_collector")
def test_threads_parse_while_the_garbage_collector_runs() -> None:
    def parse(k: int) -> int:
        text = " + ".join(f"tanh((a{i} - {k}.5) * a{i + 1})" for i in range(20 + k))
        for _ in range(100):
            Cycle()
            expression(text)
        return k

    with ThreadPoolExecutor(6) as threads:
        assert list(threads.map(parse, range(12))) == list(range(12))
