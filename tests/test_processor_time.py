"""The limit of a test's processor time."""

from __future__ import annotations

import os
import time

import pytest

from foreplan.base import disk_cache
from foreplan.jit import machine
from tests import processor_time

pytest_plugins = ["pytester"]

LIMIT = 0.1  # seconds


@pytest.fixture(autouse=True)
def nothing_is_compiled_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a test that runs at the same time, which would excuse what processes take here."""
    monkeypatch.setattr(disk_cache, "_folder", lambda: None)


SPIN = """
import os, subprocess, sys, threading, time
import pytest
from tests.processor_time import LOOP_SECONDS, loop_seconds, uncounted

def spin(seconds=0.3 * max(1, loop_seconds() / LOOP_SECONDS)):
    begun = time.thread_time()
    while time.thread_time() - begun < seconds:
        pass

def fork():
    if (child := os.fork()) == 0:
        spin()
        os._exit(0)
    os.waitpid(child, 0)
"""


def _failures(pytester: pytest.Pytester, test: str, noise: float = 1) -> str:
    """What is said of a test file with this in it, where tests may take a tenth of a second."""
    pytester.makeconftest(f"""
from tests.processor_time import ProcessorTime
def pytest_configure(config):
    config.pluginmanager.register(ProcessorTime({LIMIT}, noise={noise}))
""")
    pytester.makepyfile(SPIN + test)
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:hypothesispytest")
    return str(result.stdout)


@pytest.mark.parametrize(
    "work",
    [
        "spin()",
        "fork()",
        "subprocess.run([sys.executable, '-c', 'for i in range(8_000_000): pass'], check=True)",
        "thread = threading.Thread(target=spin); thread.start(); thread.join()",
    ],
    ids=["own", "forked", "started", "thread"],
)
def test_a_test_that_takes_too_much_fails(pytester: pytest.Pytester, work: str) -> None:
    said = _failures(pytester, f"def test_long(): {work}\ndef test_short(): pass\n")
    assert "1 failed, 1 passed" in said
    assert "of processor time, and a test that is not marked `thorough` may take 0.1 s" in said


def test_what_each_test_sets_up_counts(pytester: pytest.Pytester) -> None:
    assert "1 failed" in _failures(pytester, "@pytest.fixture\ndef long(): spin()\ndef test_long(long): pass\n")


@pytest.mark.parametrize(
    "test",
    [
        "@pytest.mark.thorough\ndef test_long(): spin()\n",
        "def test_waits(): time.sleep(0.3)\n",
        "@pytest.fixture(scope='session')\ndef once(): spin()\ndef test_reads(once): pass\n",
        "@pytest.fixture(scope='module')\ndef once(): fork()\ndef test_reads(once): pass\n",
        "def test_makes_what_is_kept():\n    with uncounted():\n        with uncounted(): spin()\n        spin()\n",
    ],
    ids=["thorough", "waits", "session", "module", "uncounted"],
)
def test_what_does_not_count(pytester: pytest.Pytester, test: str) -> None:
    assert "1 passed" in _failures(pytester, test)


def test_a_test_that_fails_says_why(pytester: pytest.Pytester) -> None:
    said = _failures(pytester, "def test_long():\n    spin()\n    assert 1 == 2\n")
    assert "assert 1 == 2" in said
    assert "processor time, and" not in said


def test_a_busy_machine_changes_no_verdict(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop is measured again before a test fails."""
    found = iter([processor_time.LOOP_SECONDS])
    monkeypatch.setattr(processor_time, "loop_seconds", lambda: next(found, 100 * processor_time.LOOP_SECONDS))
    assert "1 passed" in _failures(pytester, "def test_long(): spin(0.3)\n")


def test_noise_fails_nothing(pytester: pytest.Pytester) -> None:
    """A test that takes its limit, and what neighbours add to it."""
    test = f"def test_long(): spin({1.3 * LIMIT} * max(1, loop_seconds() / LOOP_SECONDS))\n"
    assert "1 failed" in _failures(pytester, test)
    assert "1 passed" in _failures(pytester, test, processor_time.NOISE)


def test_machine_code_is_made_uncounted(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(module: machine.Module | None, store: bool) -> bytes:
        begun = time.thread_time()
        while time.thread_time() - begun < 0.05:
            pass
        return b""

    monkeypatch.setattr(machine, "_made", make)
    processor_time.leave_compilation_out()
    before = processor_time._set_aside()
    assert machine._made(None, False) == b""
    own = processor_time._set_aside()
    if (child := os.fork()) == 0:
        machine._made(None, False)
        os._exit(0)
    os.waitpid(child, 0)
    assert own - before >= 0.05
    assert processor_time._set_aside() - own >= 0.05
