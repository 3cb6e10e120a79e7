"""The disk cache: content that takes long to make, under a name that depends on its sources. It may be deleted.

It lies in `foreplan-cache` in the folder that `FOREPLAN_CACHE_DIR` names, else in `foreplan` in the user's own cache
(`XDG_CACHE_HOME`, or `~/.cache`). That folder is foreplan's own and says so by a tag (Cache Directory Tagging
Specification, version 0.6); in it, nothing is removed or replaced but files whose names `file_name` makes. Some of it
is code, and runs: a folder or file that others than this user and root may write is not used.
"""

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
from functools import cache, lru_cache
from importlib.util import find_spec
from pathlib import Path

from foreplan.base.home import own_folder

VARIABLE = "FOREPLAN_CACHE_DIR"
FOLDER = "foreplan-cache"  # in the one that the variable names, which may have other files
TAG = "CACHEDIR.TAG"
TAGGED = b"""Signature: 8a477f597d28d172789f06886806bc55
# This folder is a cache of foreplan's: programs that make copies may leave it out, and it may be deleted.
# About such tags: https://bford.info/cachedir/
"""
_DIGEST = hashlib.sha256().digest_size
_FORMS = ("o", "cubin", "json", "plan.json")
# Names that `file_name` gives or older versions gave, of whole files, unfinished ones and locks.
_NAMED = r"(\w+-)?([0-9a-f]{64}|[0-9a-f]{16})(\.o|\.cubin|\.json|\.plan\.json)?"
_UNDER_WAY = r"(\.lock|\.[0-9a-f]{12})\.tmp"
_OWN = re.compile(rf"{_NAMED}({_UNDER_WAY})?|{re.escape(TAG)}{_UNDER_WAY}")
_LIMIT = 1 << 30  # bytes of all files together
_UNFINISHED = ".tmp"
_FORSAKEN = 3600  # seconds after which an unfinished file is abandoned
_PATIENCE = 60  # seconds that a process waits for another one's content
_claimed: dict[str, int] = {}  # by file name, the descriptor of its lock


def file_name(about: str | bytes, form: str, kind: str = "") -> str:
    """The name of a file in the cache: its kind for people, and a digest of all that the content depends on."""
    assert form in _FORMS
    data = about.encode() if isinstance(about, str) else about
    return f"{kind and kind + '-'}{hashlib.sha256(data).hexdigest()}.{form}"


def kept(name: str) -> bytes | None:
    """The content kept under a file name, if it is there and complete."""
    with contextlib.suppress(OSError, MemoryError), _opened() as folder:
        descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=folder)
        with os.fdopen(descriptor, "rb", buffering=0) as file:
            _check(os.fstat(descriptor))
            return unsealed(file.read())
    return None


def keep(name: str, content: bytes) -> None:
    """Keep bytes under a name that `file_name` made. If that fails, a note says so once on standard error."""
    try:
        with _opened(make=True) as folder:
            write_whole(folder, name, sealed(content))
            _make_room()
    except (OSError, MemoryError) as error:
        _tell(_folder(), getattr(error, "strerror", None) or str(error) or type(error).__name__)


def sealed(content: bytes) -> bytes:
    """Content behind its digest, which tells damage."""
    return hashlib.sha256(content).digest() + content


def unsealed(found: bytes) -> bytes | None:
    """The content that `sealed` made something of; None if it is not as it was."""
    content = memoryview(found)[_DIGEST:]
    return bytes(content) if hashlib.sha256(content).digest() == found[:_DIGEST] else None


@cache
def sources(package: str) -> str:
    """A digest of all source files of a package, or of one module: for names of what they make."""
    return hashlib.sha256(b"".join(file.read_bytes() for file in source_files(package))).hexdigest()


def source_files(package: str) -> list[Path]:
    """All source files of a package, or that of one module; it need not be imported."""
    spec = find_spec(package)
    assert spec is not None and spec.origin is not None
    path = Path(spec.origin)
    return sorted(path.parent.rglob("*.py")) if path.name == "__init__.py" else [path]


def write_whole(folder: int, name: str, content: bytes, mode: int | None = None) -> None:
    """Write a complete file or none, even if others write the same one.

    Args:
        folder: a descriptor.
        mode: rights of the file; None: the usual ones, less what the umask forbids.

    Raises:
        OSError: it cannot be written.
    """
    unfinished = f"{name}.{os.urandom(6).hex()}{_UNFINISHED}"
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644, dir_fd=folder)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            if mode is not None:
                os.fchmod(descriptor, mode)
        os.rename(unfinished, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(unfinished, dir_fd=folder)
        raise


def claim(name: str) -> None:
    """Wait until no other process makes the content of this file name; from then on others wait for this one.

    They wait until `release` or the end of this process, at most a minute. Who has waited that long has no claim, and
    makes the content too. Where nothing can be locked, nobody waits.
    """
    if name in _claimed:
        return
    with contextlib.suppress(OSError), _opened(make=True) as folder:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        lock = os.open(f"{name}.lock{_UNFINISHED}", flags, 0o644, dir_fd=folder)
        try:
            _lock(lock)
        except BaseException:
            os.close(lock)
            raise
        _claimed[name] = lock


def _lock(file: int) -> None:
    """Wait for the lock of a file, and raise if it does not come in time."""
    end = time.monotonic() + _PATIENCE
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                raise
        time.sleep(0.02)


def release(name: str) -> None:
    """End a claim, if there is one."""
    if (lock := _claimed.pop(name, None)) is not None:
        with contextlib.suppress(OSError), _opened() as folder:
            os.unlink(f"{name}.lock{_UNFINISHED}", dir_fd=folder)
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_UN)  # a forked process may hold the descriptor too
        os.close(lock)


@lru_cache(maxsize=1)
def _folder() -> Path | None:
    """The folder of the cache; None: no variable and no home names one."""
    if chosen := os.environ.get(VARIABLE):
        with contextlib.suppress(FileNotFoundError):  # the current folder may be gone
            return Path(chosen).absolute() / FOLDER
        return Path(chosen) / FOLDER
    return own_folder("XDG_CACHE_HOME", ".cache")


@contextlib.contextmanager
def _opened(make: bool = False) -> Iterator[int]:
    """The folder as a descriptor, so that it stays the same one if its path changes.

    Args:
        make: whether to make the folder if it is not there.

    Raises:
        OSError: it is not there, others may write it, or it is no cache of foreplan's.
    """
    path = _folder()
    if path is None:
        raise FileNotFoundError(errno.ENOENT, "this user has no home")
    if make:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    if os.environ.get(VARIABLE):
        _check(os.stat(path.parent))  # whoever may write there can put another folder in the place of this one
    if make:
        path.mkdir(mode=0o755, exist_ok=True)
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _check(os.fstat(folder))
        if _tag(folder) != TAGGED:
            if not make:
                raise FileNotFoundError(errno.ENOENT, f"it has no {TAG} of foreplan's")
            _write_tag(folder)
        yield folder
    finally:
        os.close(folder)


def _tag(folder: int) -> bytes:
    """The tag of a folder; nothing if it has none, or one that a power failure has emptied."""
    with contextlib.suppress(FileNotFoundError):
        descriptor = os.open(TAG, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
        with os.fdopen(descriptor, "rb", buffering=0) as file:
            return (file.read(len(TAGGED) + 1) or b"").strip(b"\0")
    return b""


def _write_tag(folder: int) -> None:
    """Say of a folder that it is a cache of foreplan's: of an empty one, or one that an older version has filled.

    Raises:
        OSError: it has other files, which programs that make copies would leave out from now on.
    """
    for name in os.listdir(folder):
        own = _OWN.fullmatch(name) or name.startswith(".")  # systems put hidden files anywhere
        if not own and (name != TAG or _tag(folder)):
            raise FileExistsError(errno.EEXIST, f"{name!r} in it is not foreplan's")
    write_whole(folder, TAG, TAGGED)


def _check(found: os.stat_result) -> None:
    """Raise unless root or this user alone may write a file or folder."""
    if found.st_uid not in (0, os.geteuid()) or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(errno.EPERM, "others may write there")


@lru_cache(maxsize=1)
def _make_room() -> None:
    """Once in a process: remove own files that killed processes have left and, if there is too much, the oldest."""
    with _opened() as folder, os.scandir(folder) as entries:
        files = []
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # another process has ended what it had under way
                found = entry.stat(follow_symlinks=False)
                if _OWN.fullmatch(entry.name) and stat.S_ISREG(found.st_mode):
                    files.append((found.st_mtime, found.st_size, entry.name))
        excess = sum(size for _, size, _ in files) - _LIMIT
        for made, size, name in sorted(files):
            if excess > 0 or (name.endswith(_UNFINISHED) and made < time.time() - _FORSAKEN):
                with contextlib.suppress(FileNotFoundError):  # another process makes room too
                    os.unlink(name, dir_fd=folder)
                excess -= size


@lru_cache(maxsize=1)
def _tell(path: Path | None, reason: str) -> None:
    """Say once why nothing can be kept."""
    if sys.stderr is not None:
        where = "" if path is None else f" in {str(path)!r}"
        print(
            f"note: compiled code cannot be kept{where} ({reason}), so every process compiles again; "
            f"let {VARIABLE} name a folder that only this user can write",
            file=sys.stderr,
        )
