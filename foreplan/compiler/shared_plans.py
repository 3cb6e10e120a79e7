"""Plans that processes of many machines share, in the place that `FOREPLAN_PLANS` names: a folder, or a URL of fsspec.

Nobody is trusted who writes there: whoever reads a plan proves it. What lies there may be deleted at any time. Nothing
fails if the place cannot be used: a note says so once on standard error, and each process plans for itself.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from foreplan.base.disk_cache import sealed, unsealed, write_whole
from foreplan.base.untrusted import RULES

VARIABLE = "FOREPLAN_PLANS"
LARGEST = RULES["shared plan"].largest  # bytes read or written; a plan has about a hundred for each of its steps
PATIENCE = 300.0  # seconds that a process waits for another one's plan
POLL = 0.1  # seconds between two looks at a lock
EVERYBODY = 0o644  # rights of files: their folder says who may read them
_told = False


def in_use() -> bool:
    """Whether a place is named."""
    return bool(os.environ.get(VARIABLE))


def shared(name: str) -> bytes | None:
    """The content that somebody has put there under a file name, if it is there and complete."""
    place = _place(os.environ[VARIABLE], os.getpid())
    if place is not None:
        try:
            found = place.read(name)
            return None if found is None or len(found) > LARGEST else unsealed(found)
        except Exception as error:  # libraries for object stores raise what they like
            _tell("read from", _reason(error))
    return None


def share(name: str, content: bytes) -> None:
    """Put content there under a file name, unless it is too large."""
    place = _place(os.environ[VARIABLE], os.getpid())
    if place is not None:
        try:
            if len(whole := sealed(content)) <= LARGEST:
                place.write(name, whole)
        except Exception as error:
            _tell("written to", _reason(error))


@contextmanager
def turn(name: str) -> Iterator[bool]:
    """A context in which the content of a file name is made, by one process while others wait for it: five minutes at
    most. It gives whether the content may have come meanwhile.
    """
    place = _place(os.environ[VARIABLE], os.getpid())
    if place is None:
        yield False
    else:
        with place.turn(name) as later:
            yield later


class _Folder:
    """A folder that others may write. Links in it are not followed, and nothing but files is read."""

    def __init__(self, path: str) -> None:
        import filelock

        self._locks = filelock
        self._path = Path(path).absolute()
        self._patient = True

    def read(self, name: str) -> bytes | None:
        """As much of a file as is too much, at most; None: it is not there."""
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # who opens a pipe would wait
        with self._opened() as folder:
            try:
                descriptor = os.open(name, flags, dir_fd=folder)
            except FileNotFoundError:
                return None
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return b""
            with open(descriptor, "rb", closefd=False) as file:
                return file.read(LARGEST + 1)
        finally:
            os.close(descriptor)

    def write(self, name: str, content: bytes) -> None:
        """Put a file in place, whole."""
        with self._opened() as folder:
            write_whole(folder, name, content, EVERYBODY)

    @contextmanager
    def turn(self, name: str) -> Iterator[bool]:
        """The first of a user's processes goes on with a lock. The others wait until it is done, or killed, and go on
        without the lock, whether there is a plan then or not: so what fits no budget fails in all of them at once.

        Locks are a user's own, whom no other can keep waiting. Where nothing can be locked, nobody waits.
        """
        path = self._path / f"{name}.{os.geteuid()}.lock"
        lock = self._locks.FileLock(path, mode=0o600, fallback_to_soft=False)  # a soft one outlives a killed process
        if not self._is_first(lock):
            yield True
            return
        try:
            yield True
        finally:
            _unlock(lock)

    def _is_first(self, lock: Any) -> bool:
        """Take a lock that nobody has, or wait for it and let it go."""
        with suppress(OSError, NotImplementedError, RuntimeError):
            try:
                with self._opened():  # a lock would make the folder, where there is none
                    lock.acquire(timeout=0)
                return True
            except self._locks.Timeout:
                if self._patient:
                    self._wait(lock)
        return False

    def _wait(self, lock: Any) -> None:
        """Wait for a lock and let it go."""
        try:
            lock.acquire(timeout=PATIENCE, poll_interval=POLL)
        except self._locks.Timeout:
            self._patient = False  # whoever keeps one lock for so long may keep all
        else:
            _unlock(lock)

    @contextmanager
    def _opened(self) -> Iterator[int]:
        """The folder as a descriptor: to open it asks a network's file system what is there now."""
        folder = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield folder
        finally:
            os.close(folder)


def _unlock(lock: Any) -> None:
    """Let a lock go, without its file: whoever waits for that one notices that it is gone."""
    with suppress(OSError):
        found = os.lstat(lock.lock_file)
        if stat.S_ISREG(found.st_mode) and not found.st_size:  # anything else of that name is somebody's
            os.unlink(lock.lock_file)
    with suppress(OSError):
        lock.release()


class _Store:
    """What a URL names, such as a bucket. It has no locks: processes that start at once write the same bytes.

    A process that has failed to read asks no more, nor does it write after it has failed to: libraries try for long
    until they give up.
    """

    def __init__(self, url: str) -> None:
        import fsspec

        self._files, path = fsspec.core.url_to_fs(url)
        self._path = str(path).rstrip("/")
        self._reads = self._writes = True

    def read(self, name: str) -> bytes | None:
        """As `_Folder.read`."""
        if not self._reads:
            return None
        path, self._reads = f"{self._path}/{name}", False
        try:
            found = bytes(self._files.cat_file(path, start=0, end=LARGEST + 1))
        except FileNotFoundError:
            found = None
        except OSError as error:  # S3 has no first byte of an object that is empty
            if error.errno != errno.EINVAL or self._files.info(path)["size"]:
                raise
            found = b""
        self._reads = True
        return found

    def write(self, name: str, content: bytes) -> None:
        """Put an object in place, unless another process has put the same one."""
        if self._writes and self.read(name) != content and self._reads:
            self._writes = False
            self._files.pipe_file(f"{self._path}/{name}", content)
            self._writes = True

    @contextmanager
    def turn(self, name: str) -> Iterator[bool]:
        """Nobody waits."""
        yield False


@lru_cache(maxsize=1)
def _place(named: str, process: int) -> _Folder | _Store | None:
    """What the variable names; None where it cannot be used, which a note has said. Each process has its own: after a
    fork, libraries for object stores refuse the connections of the process before it.
    """
    try:
        return _Store(named) if "://" in named else _Folder(named)
    except ImportError as error:
        ours = error.name in ("filelock", "fsspec")  # else fsspec says which package an object store needs
        reason = f"{error.name} is missing: pip install 'foreplan[shared]'" if ours else str(error)
    except ValueError:
        reason = "fsspec knows no such URL"
    except Exception as error:
        reason = _reason(error)
    _tell("shared in", reason)
    return None


def _reason(error: Exception) -> str:
    """What went wrong, without the path or URL that errors name: there may be credentials in it."""
    return getattr(error, "strerror", None) or type(error).__name__


def _tell(how: str, reason: str) -> None:
    """Say once why plans are not shared."""
    global _told
    if sys.stderr is not None and not _told:
        _told = True
        print(
            f"note: plans cannot be {how} the place that {VARIABLE} names ({reason}), so this process plans for "
            "itself; let it name a folder or a URL that this user can read and write, or unset it",
            file=sys.stderr,
        )
