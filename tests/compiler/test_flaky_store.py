"""A place of shared plans, named by a URL, that fails in the middle: at each call once, in each way."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from foreplan.compiler import shared_plans
from tests.compiler.sharing import Machine
from tests.profile import pairs

CALLS = ("cat_file", "pipe_file", "info")


class Flaky(MemoryFileSystem):  # type: ignore[misc]
    """A store in memory whose n-th call goes wrong, and all after it if it stays so."""

    protocol = "flaky"
    cachable = False
    store: dict[str, Any] = {}
    pseudo_dirs = [""]
    left = 0
    stays = False
    wrong: Callable[..., object] = staticmethod(lambda *_: None)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> Any:
        return self._turned("cat_file", lambda: super(Flaky, self).cat_file(path, start, end, **options))

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> Any:
        def half() -> None:
            super(Flaky, self).pipe_file(path, value[: len(value) // 2], mode, **options)

        return self._turned("pipe_file", lambda: super(Flaky, self).pipe_file(path, value, mode, **options), half)

    def _turned(self, call: str, make: Callable[[], Any], half: Callable[[], None] = lambda: None) -> Any:
        Flaky.left -= 1
        if Flaky.left == 0 or (Flaky.left < 0 and Flaky.stays):
            half()
            return Flaky.wrong(make)
        return make()


def raising(error: Exception) -> Callable[..., object]:
    def wrong(make: Callable[[], Any]) -> object:
        raise error

    return wrong


WRONG = {
    "failing disk": raising(OSError(errno.EIO, "Input/output error")),
    "full": raising(OSError(errno.ENOSPC, "No space left on device")),
    "timeout": raising(TimeoutError("timed out")),
    "reset": raising(ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")),
    "the library's own": raising(RuntimeError("session is closed, token=secret")),
    "forbidden": raising(PermissionError("AccessDenied")),
    "gone meanwhile": raising(FileNotFoundError("flaky://plans/x")),
    "half": lambda make: None if (found := make()) is None else found[: len(found) // 2],
    "empty": lambda make: None if make() is None else b"",
}


@pytest.fixture(autouse=True)
def flaky(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    fsspec.register_implementation("flaky", Flaky, clobber=True)
    monkeypatch.setenv(shared_plans.VARIABLE, "flaky://plans")
    Flaky.store.clear()
    Flaky.left = 0
    yield
    Flaky.left, Flaky.stays = 0, False
    Flaky.store.clear()


@pytest.mark.parametrize(("wrong", "there", "stays"), pairs(WRONG, [False, True], [False, True]))
def test_each_call_fails_once(
    wrong: str, there: bool, stays: bool, machine: Machine, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    right = machine.found()
    for number in range(1, 9):
        if not there:
            Flaky.store.clear()
        Flaky.wrong, Flaky.stays = staticmethod(WRONG[wrong]), stays
        Flaky.left = number
        assert machine.found() == right
        reached, Flaky.left, Flaky.stays = Flaky.left <= 0, 0, False
        said = capsys.readouterr().err
        assert said.count("note:") == said.count("\n") <= 1 and "secret" not in said
        planned = machine.planned
        assert machine.found() == right and not capsys.readouterr().err  # another machine, when the store works again
        assert machine.found() == right and machine.planned <= planned + 1
        if not reached:
            break
    else:
        pytest.fail("there are more calls than are tried")
