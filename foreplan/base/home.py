"""Where a user's own files lie, as the XDG Base Directory Specification names the folders (version 0.8, 2021)."""

from __future__ import annotations

import os
from pathlib import Path


def own_folder(variable: str, in_home: str) -> Path | None:
    """The folder `foreplan` in the folder that a variable names, else in one of the user's home.

    Args:
        variable: such as `XDG_CACHE_HOME`; a relative path in it counts for nothing.
        in_home: such as `.cache`.

    Returns:
        An absolute path, which may be there or not; None: this user has no home.
    """
    home = os.path.expanduser("~") if os.environ.get("HOME", "~") else ""  # an empty one would be the root folder
    homes = os.environ.get(variable, ""), os.path.join(home, in_home)
    return next((Path(home, "foreplan") for home in homes if os.path.isabs(home)), None)
