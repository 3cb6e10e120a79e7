"""Kernels of tests that are still to run, compiled together: g++ takes three times as long for them one by one.

A test is asked what it will launch by running it while kernels are gathered. It then gets NumPy's results.
"""

from __future__ import annotations

import contextlib
import shutil

import numpy as np
import pytest

from foreplan.runtime.cuda.launch import Source
from tests.gpu.check import gathering
from tests.gpu.compiled import TOGETHER, compile_all, not_kept

_asked: set[pytest.Item] = set()  # tests that were


def compile_ahead(test: pytest.Item) -> None:
    """Compile what this test launches, and tests behind it, of those with the fixture `compiled_ahead` whose other
    arguments are parameters. What cannot be compiled is left to the test that needs it.
    """
    if test in _asked or not _launches(test) or shutil.which("g++") is None:
        return
    items, sources = test.session.items, set()
    for item in items[items.index(test) :]:
        if item not in _asked and _launches(item):
            _asked.add(item)
            sources |= _launched(item)
        if len(sources) >= TOGETHER:
            break
    with contextlib.suppress(AssertionError):
        compile_all(sources)


def _launches(item: pytest.Item) -> bool:
    """Whether a test may launch kernels, and can be run beforehand: one that draws its cases draws others then."""
    if not isinstance(item, pytest.Function) or "compiled_ahead" not in item.fixturenames:
        return False
    return not hasattr(item.function, "hypothesis") and getattr(_given(item).get("engine"), "name", "cuda") == "cuda"


def _given(item: pytest.Function) -> dict[str, object]:
    return item.callspec.params if hasattr(item, "callspec") else {}


def _launched(item: pytest.Function) -> set[Source]:
    """What a test launches and is not kept yet, as far as it comes with NumPy's results."""
    with gathering() as instructions, contextlib.suppress(Exception, pytest.skip.Exception), np.errstate(all="ignore"):
        item.function(**_given(item))
    return not_kept(instructions)
