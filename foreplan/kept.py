"""What takes long to make, kept on disk by a name that says what it was made from; nothing depends on it being there.

It lies beside Numba's machine code: in the package's `__pycache__`, in the folder that `NUMBA_CACHE_DIR` names, or,
where the first cannot be written, in the user's own cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from functools import lru_cache
from pathlib import Path

_DIGEST = hashlib.sha256().digest_size


@lru_cache(maxsize=1)
def _folder() -> Path:
    """Where things are kept."""
    if chosen := os.environ.get("NUMBA_CACHE_DIR"):
        return Path(chosen) / "foreplan"
    beside = Path(__file__).parent / "__pycache__"
    if os.access(beside if beside.exists() else beside.parent, os.W_OK):
        return beside
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "foreplan"


def kept(name: str) -> bytes | None:
    """What was kept under a file name, if it is there and whole."""
    with contextlib.suppress(OSError):
        found = (_folder() / name).read_bytes()
        content = found[_DIGEST:]
        return content if hashlib.sha256(content).digest() == found[:_DIGEST] else None
    return None


def keep(name: str, content: bytes) -> None:
    """Keep bytes under a file name, if the folder can be written."""
    with contextlib.suppress(OSError):
        _folder().mkdir(parents=True, exist_ok=True)
        unfinished = _folder() / f"{name}.{os.getpid()}"
        unfinished.write_bytes(hashlib.sha256(content).digest() + content)
        unfinished.replace(_folder() / name)
