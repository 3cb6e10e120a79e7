"""Files: a reader of one that is written sees the old content or the new; and a document cannot name one outside its
folder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import stat
import sys
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

from foreplan.base.arguments import path_of
from foreplan.base.errors import ForeplanError, SessionError, UsageError

_DESCRIPTOR = re.compile(r"/dev/(?:fd/(\d+)|(stdin|stdout|stderr))|/proc/self/fd/(\d+)")
_STANDARD = {"stdin": 0, "stdout": 1, "stderr": 2}
# What only a fuller disk, a quota or failing hardware brings about; anything else is a wrong path or a missing right.
_STORAGE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}
# A folder that may be written and not read, or that its file system does not sync.
_UNSYNCED = {errno.EACCES, errno.EPERM, errno.EINVAL, errno.ENOTSUP}
_FORSAKEN = 24 * 3600  # seconds after which no machine goes on with a file


def write_atomically(path: str | os.PathLike[str], content: bytes | bytearray | memoryview | str) -> None:
    """Write `content` (text as UTF-8) to `path`: beside it first, then renamed into place.

    See `open_atomically` for what happens to links, devices and pipes, and for the errors.
    """
    data = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
    with open_atomically(path) as file:
        file.write(data)


def confined(folder: str | os.PathLike[str], name: str) -> Path:
    """The file that a document names, which may be there or not: in a folder or below, whatever links say.

    Raises:
        ValueError: the name is absolute, has `..` in it, or leads out of the folder by a link; says which.
    """
    root = os.path.realpath(folder)
    if not name or "\0" in name or os.path.isabs(name) or ".." in Path(name).parts:
        raise ValueError(f"{name!r} is no place in {root}")
    file = Path(os.path.realpath(os.path.join(root, name)))
    if not file.is_relative_to(root):
        raise ValueError(f"{name!r} leads out of {root}, to {file}")
    return file


def real_place(path: str | os.PathLike[str]) -> Path:
    """Where a file lies by its folder's real name, so that it is found from any other name of that folder.

    A link in the folder keeps its own name, unless it leads out: then a document there could not name it.
    """
    folder, name = os.path.split(path)
    folder = os.path.realpath(folder)
    real = Path(os.path.realpath(os.path.join(folder, name)))
    return Path(folder, name) if real.is_relative_to(folder) else real


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raise now, before a long computation, the errors with which `open_atomically` would start; writes nothing.

    Raises:
        UsageError: the path cannot be written: no such directory, no permission, a directory.
    """
    text = path_of("writing", path)
    try:
        if not _DESCRIPTOR.fullmatch(text) and stat.S_IFMT(_mode(text)) in (0, stat.S_IFREG):
            folder = os.path.dirname(os.path.realpath(text))
            if not os.path.isdir(folder):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), text)
            if not os.access(folder, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), text)
    except OSError as error:
        raise _explain(text, error) from None


@contextlib.contextmanager
def open_atomically(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A binary file to write in pieces; it takes the place of `path` when the block ends without an exception.

    The old file keeps its content until then, its access rights go over to the new one, and a symbolic link stays a
    link. A destination that exists and is no regular file (a pipe, `/dev/null`, `/dev/stdout`) is written directly.

    Raises:
        UsageError: the path cannot be written: no such directory, no permission, a directory.
        SessionError: the bytes cannot be stored: no space, a quota, a failing disk. In both cases the old file is as
            it was, and nothing is left beside it.
        BrokenPipeError: the reader of a pipe has gone; left to the caller, who may just want to stop.
    """
    text = path_of("writing", path)
    try:
        with _opened(text) as file:
            yield file
    except (BrokenPipeError, ForeplanError):
        raise
    except OSError as error:
        # Only what concerns this very file is told as such; errors of other files inside the block pass through.
        if error.filename not in (None, text):
            raise
        raise _explain(text, error) from None


def _explain(path: str, error: OSError) -> ForeplanError:
    reason = os.strerror(error.errno) if error.errno else str(error)
    message = f"cannot write {path!r}: {reason}"
    if error.errno in _STORAGE:
        return SessionError(f"{message}; what was there before is unchanged: free some space or choose another place")
    if error.errno == errno.ENOENT:
        return UsageError(f"{message}; create the directory {str(Path(path).parent)!r} first")
    return UsageError(f"{message}; choose another path")


def _opened(path: str) -> contextlib.AbstractContextManager[BinaryIO]:
    """The file to write at `path`; errors carry `path` itself as their file name, or none."""
    if match := _DESCRIPTOR.fullmatch(path):
        return _descriptor(int(match[1] or match[3] or _STANDARD[match[2]]))
    mode = _mode(path)
    if mode and not stat.S_ISREG(mode):
        return open(path, "wb", buffering=0)
    return _beside(os.path.realpath(path), mode)


def _mode(path: str) -> int:
    """The mode of what is at `path`, 0 for nothing; refuses what cannot be written."""
    if not path:
        raise UsageError("cannot write a file without a name: give a path")
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        mode = 0
    # `new/` names a folder, and a resolved path would be that of a file `new`.
    if stat.S_ISDIR(mode) or os.path.basename(path) in ("", os.curdir, os.pardir):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if stat.S_ISREG(mode) and not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
    return mode


@contextlib.contextmanager
def _descriptor(number: int) -> Iterator[BinaryIO]:
    """An open descriptor of this process: opening it by name would truncate a file the shell appends to."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            if stream.fileno() == number:
                stream.flush()
    with os.fdopen(os.dup(number), "wb") as file:
        yield file


@contextlib.contextmanager
def _beside(target: str, mode: int) -> Iterator[BinaryIO]:
    """A new file in the target's directory, renamed over it at the end and removed on any exception.

    Its writer holds a lock on it, so that what a killed one has left can be told from what is still written.
    """
    folder, name = os.path.split(target)
    _sweep(folder, name)
    try:
        temporary, descriptor = _create(folder, name)
    except OSError as error:
        raise OSError(error.errno, error.strerror) from None
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            if mode:
                os.fchmod(file.fileno(), stat.S_IMODE(mode))
            os.fsync(file.fileno())
            try:
                os.rename(temporary, target)
            except OSError as error:
                raise OSError(error.errno, error.strerror) from None
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    _sync_folder(folder, target)


def _create(folder: str, name: str) -> tuple[str, int]:
    """A new file beside the one of this name, and its locked descriptor."""
    while True:
        path = os.path.join(folder, f"{_prefix(name)}{_machine()}.{os.urandom(6).hex()}.tmp")
        # O_EXCL with 0o666 lets the umask decide, as for any file the user makes.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with contextlib.suppress(OSError):  # a file system without locks: nobody sweeps there either
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return path, descriptor
        os.close(descriptor)  # another process swept it before it was locked


def _sweep(folder: str, name: str) -> None:
    """Remove what killed writers of this name have left: nobody holds its lock.

    A lock on a network's file system may hold on one machine alone; another machine's files stay for a day.
    """
    pattern = re.compile(re.escape(_prefix(name)) + r"([0-9a-f]{12})\.[0-9a-f]{12}\.tmp")
    with contextlib.suppress(OSError):
        for entry in os.listdir(folder):
            if match := pattern.fullmatch(entry):
                with contextlib.suppress(OSError):
                    _remove_if_left(os.path.join(folder, entry), match[1] == _machine())


def _remove_if_left(path: str, here: bool) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        found = os.fstat(descriptor)
        if stat.S_ISREG(found.st_mode) and (here or found.st_mtime < time.time() - _FORSAKEN):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(path)
    finally:
        os.close(descriptor)


def _prefix(name: str) -> str:
    """The beginning of names of files that are to replace a file; names have 255 bytes at most."""
    return f".{os.fsdecode(os.fsencode(name)[:100])}."


@lru_cache(maxsize=1)
def _machine() -> str:
    """Which kernel runs this process, since when it was started: locks hold between all its processes."""
    with contextlib.suppress(OSError):
        started = Path("/proc/sys/kernel/random/boot_id").read_bytes()
        return hashlib.sha256(started).hexdigest()[:12]
    return os.urandom(6).hex()


def _sync_folder(folder: str, target: str) -> None:
    """Make the new name survive a power failure, if the file system can.

    Raises:
        SessionError: the disk does not say that it does.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in _UNSYNCED:
            reason = os.strerror(error.errno or 0)
            raise SessionError(f"{target!r} is written, and a power failure may undo that: {reason}") from None
