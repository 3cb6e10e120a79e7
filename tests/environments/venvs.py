"""Fresh virtual environments with foreplan in them, and what they are made of."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@dataclass(frozen=True)
class Venv:
    """A virtual environment."""

    folder: Path

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"

    def install(self, *requirements: str | Path, constraints: Sequence[str] = ()) -> None:
        """By pip, from the package index alone."""
        command = [*PIP, "--python", self.python, "install", "--quiet", *requirements]
        if constraints:
            listed = self.folder / "constraints.txt"
            listed.write_text("\n".join(constraints) + "\n")
            command += ["--constraint", listed]
        subprocess.run(command, check=True)

    def versions(self) -> str:
        """What lies in it, for the log."""
        done = subprocess.run([*PIP, "--python", self.python, "freeze"], check=True, capture_output=True, text=True)
        wanted = {name_of(requirement).lower() for requirement in PROJECT["dependencies"]}
        lines = [line for line in done.stdout.splitlines() if line.split("==")[0].lower() in wanted]
        return ", ".join(line.replace("==", " ") for line in lines)


PIP: Sequence[str | Path] = (sys.executable, "-m", "pip", "--disable-pip-version-check")


def made(folder: Path, interpreter: Path) -> Venv:
    """A virtual environment without pip of its own."""
    subprocess.run([interpreter, "-m", "venv", "--without-pip", folder], check=True)
    return Venv(folder)


def interpreter(version: str) -> Path | None:
    """A Python such as "3.12", on the path or of pyenv."""
    roots = [Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"]
    candidates = [Path(found)] if (found := shutil.which(f"python{version}")) else []
    candidates += [path for root in roots for path in sorted(root.glob(f"{version}.*/bin/python{version}"))]
    for path in candidates:
        done = subprocess.run([path, "-c", "import sys; print(*sys.version_info[:2], sep='.')"], capture_output=True)
        if done.returncode == 0 and done.stdout.decode().strip() == version:
            return path
    return None


def name_of(requirement: str) -> str:
    """The package that a requirement names."""
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found is not None
    return found[0]


def lowest() -> list[str]:
    """Constraints to the lowest versions that pyproject.toml declares, of what foreplan needs to run."""
    declared = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["cpu"]]
    return [f"{name_of(text)}=={bound[1]}" for text in declared if (bound := re.search(r">=([0-9.]+)", text))]


def distributions(folder: Path) -> tuple[Path, Path]:
    """The wheel and the source distribution, made from a copy of what git tracks."""
    source = folder / "source"
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True).stdout.decode()
    for name in tracked.strip("\0").split("\0"):
        if (ROOT / name).is_symlink() or (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name, follow_symlinks=False)
    builder = made(folder / "builder", Path(sys.executable))
    builder.install("build")
    subprocess.run(
        [builder.python, "-m", "build", "--outdir", folder / "dist", source], check=True, stdout=subprocess.DEVNULL
    )
    (wheel,), (sdist,) = (list((folder / "dist").glob(pattern)) for pattern in ("*.whl", "*.tar.gz"))
    return wheel, sdist
