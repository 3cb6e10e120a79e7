"""Lines of the user's own code: of an op of an export, and of an error that ends one."""

from __future__ import annotations

import contextlib
import os
import re
import traceback
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

import foreplan.version
from foreplan.frontend.torch.patches import patched

if TYPE_CHECKING:
    import torch


@contextlib.contextmanager
def functions_kept() -> Iterator[None]:
    """While the body runs, nodes of an export keep the lines of all functions that `forward` calls, beside its own."""
    from torch.fx.proxy import TracerBase

    def within_forward(_: Any, frames: traceback.StackSummary) -> traceback.StackSummary:
        first = next((i for i, frame in enumerate(frames) if frame.name == "forward"), len(frames))
        return traceback.StackSummary.from_list(frames[first:])

    with patched(TracerBase, "_filter_traceback_frames", within_forward):
        yield


def line_of(node: torch.fx.Node) -> str:
    """`file.py:12` of the innermost line of the user's, or of the innermost `forward` if there is none."""
    frames = re.findall(r'File "([^"]+)", line (\d+), in (\w+)', node.meta.get("stack_trace") or "")
    theirs = [each for each in frames if is_users(each[0])] or [each for each in frames if each[2] == "forward"]
    return f"{os.path.basename(theirs[-1][0])}:{theirs[-1][1]}" if theirs else ""


def line_of_error(error: BaseException) -> str:
    """` (file.py:12: code)`: the innermost line of the user's that an exception came by; nothing if there is none."""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if is_users(frame.filename)]
    return f" ({os.path.basename(own[-1].filename)}:{own[-1].lineno}: {own[-1].line})" if own else ""


def is_users(path: str) -> bool:
    """Whether a file is none of PyTorch's, of foreplan's or of Python's own."""
    installed = any(f"{os.sep}{name}{os.sep}" in path for name in ("site-packages", "dist-packages"))
    own, library = _not_users()
    return os.path.isfile(path) and not path.startswith(own) and (installed or not path.startswith(library))


@cache
def _not_users() -> tuple[tuple[str, ...], str]:
    """Folders of PyTorch and foreplan, and that of Python's library, which may have packages of the user's in it."""
    import torch

    own, kept, library = (
        f"{os.path.dirname(each)}{os.sep}" for each in (torch.__file__, foreplan.version.__file__, os.__file__)
    )
    return (own, kept), library
