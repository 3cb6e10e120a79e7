"""Writing a file so that a reader sees the old content or the new, and never a part of either."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from foreplan.errors import ForeplanError, SessionError, UsageError

_DESCRIPTOR = re.compile(r"/dev/(?:fd/(\d+)|(stdin|stdout|stderr))|/proc/self/fd/(\d+)")
_STANDARD = {"stdin": 0, "stdout": 1, "stderr": 2}
# What only a fuller disk, a quota or failing hardware brings about; anything else is a wrong path or a missing right.
_STORAGE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}


def write_atomically(path: str | os.PathLike[str], content: bytes | bytearray | memoryview | str) -> None:
    """Write `content` (text as UTF-8) to `path`: beside it first, then renamed into place.

    See `open_atomically` for what happens to links, devices and pipes, and for the errors.
    """
    data = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
    with open_atomically(path) as file:
        file.write(data)


def check_writable(path: str | os.PathLike[str]) -> None:
    """Say now, before a long computation, what would keep `open_atomically` from starting; writes nothing.

    Raises:
        UsageError: the path cannot be written: no such directory, no permission, a directory.
    """
    text = os.fspath(path)
    try:
        if not _DESCRIPTOR.fullmatch(text) and stat.S_IFMT(_mode(text)) in (0, stat.S_IFREG):
            folder = os.path.dirname(os.path.realpath(text))
            if not os.path.isdir(folder):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), text)
            if not os.access(folder, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), text)
    except OSError as error:
        raise _explain(text, error) from None
    except ValueError:
        raise UsageError(f"cannot write {text!r}: a path must not hold a null character") from None


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
    text = os.fspath(path)
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
    except ValueError as error:
        if "null" not in str(error):
            raise
        raise UsageError(f"cannot write {text!r}: a path must not hold a null character") from None


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
        return 0
    if stat.S_ISDIR(mode):
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
    """A new file in the target's directory, renamed over it at the end and removed on any exception."""
    folder, name = os.path.split(target)
    temporary = os.path.join(folder, f".{name[:100]}.{os.urandom(6).hex()}.tmp")
    try:
        # O_EXCL with 0o666 lets the umask decide, as for any file the user makes.
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
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
