"""What lies in a folder that the disk cache was given."""

from __future__ import annotations

from pathlib import Path

from foreplan.base.disk_cache import FOLDER, TAG


def kept_files(folder: Path) -> list[Path]:
    """Files that are kept in a folder, or in the cache's own folder in it, without the tag."""
    own = folder / FOLDER
    return [file for file in sorted((own if own.exists() else folder).iterdir()) if file.name != TAG]
