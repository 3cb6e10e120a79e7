"""`python -m tests.environments [JOB…]`: foreplan where users have it, each job in a virtual environment of its own.

As many jobs run at the same time as there are processors, since each waits for pip and for processes of its own.
Everything comes from the package index. A job that this machine cannot do, for want of a Python, says so.
"""

from __future__ import annotations

import argparse
import atexit
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from tests.environments.venvs import ROOT, Venv, distributions, interpreter, lowest, made

SMOKE = ROOT / "tests" / "environments" / "smoke.py"
WRITTEN = {  # by the script
    "small.onnx", "data.npz", "trained.safetensors", "answers.npz", "in.csv", "placed.csv", "map.html", "forked",
    "numpy.plan", "numpy.safetensors", "cpu.plan", "cpu.safetensors",
}  # fmt: skip
STRANGER = 54321  # a user whom no machine knows, as containers have them
OLDEST = "3.11"


class NotHere(Exception):
    """What this machine lacks for a job."""


def _smoke(venv: Venv, folder: Path) -> None:
    """The first steps of a user with an empty cache, in an empty folder."""
    home = folder / "home"
    home.mkdir()
    environment = {"PATH": os.environ["PATH"], "HOME": str(home)}
    subprocess.run([venv.python, SMOKE], cwd=home, env=environment, check=True)


@cache
def _built() -> tuple[Path, Path]:
    """The wheel and the source distribution, for all jobs."""
    folder = Path(tempfile.mkdtemp(prefix="foreplan-"))
    os.chmod(folder, 0o755)
    atexit.register(shutil.rmtree, folder)
    return distributions(folder)


def wheel(folder: Path) -> None:
    """The wheel, in a clean environment; the source distribution makes the same one."""
    built, source = _built()
    again = folder / "again"
    subprocess.run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", again, source], check=True)
    names = [sorted(zipfile.ZipFile(path).namelist()) for path in (built, *again.glob("*.whl"))]
    assert names[0] == names[1], set(names[0]) ^ set(names[1])
    venv = made(folder / "venv", _python(OLDEST))
    venv.install(f"{_built()[0]}[cpu]")
    _smoke(venv, folder)


def hardened(folder: Path) -> None:
    """A user without a name or a home, who may write in one folder alone, as in a hardened container.

    Without a place for machine code foreplan says so, once; with one it says nothing. The start without any home
    compiles all that an import needs, those with a home that is none compile little.
    """
    if os.geteuid() != 0:
        raise NotHere("only root can become another user")
    venv = made(folder / "venv", _python(OLDEST, STRANGER))
    venv.install(f"{_built()[0]}[cpu]")
    script = shutil.copy(SMOKE, folder)
    starts: tuple[tuple[str, dict[str, str], set[str]], ...] = (
        ("import", {}, {"small.onnx"}),
        ("loops", {"HOME": "/"}, set()),
        ("loops", {"HOME": str(folder / "nowhere")}, set()),
    )
    started = [(_begun(folder, [venv.python, script, part], home), written) for part, home, written in starts]
    for (process, work), written in started:
        said = _ended(process, work, written)
        assert said.count("\n") == said.count("note: compiled code cannot be kept") == 1, said
    said = _ended(*_begun(folder, [venv.python, script], {"FOREPLAN_CACHE_DIR": "kept"}), {*WRITTEN, "kept"})
    assert not said, said


def _begun(folder: Path, command: list[str | Path], environment: dict[str, str]) -> tuple[subprocess.Popen[str], Path]:
    """A stranger's process, in a new folder that is the stranger's."""
    work = Path(tempfile.mkdtemp(dir=folder))
    os.chown(work, STRANGER, STRANGER)
    process = subprocess.Popen(
        command, cwd=work, env={"PATH": "/usr/bin:/bin", **environment}, user=STRANGER, group=STRANGER,
        extra_groups=[], stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    return process, work


def _ended(process: subprocess.Popen[str], work: Path, written: set[str]) -> str:
    """What a process has said on standard error; it has left what it should in its folder, and nothing else."""
    said = process.communicate()[1]
    assert process.returncode == 0, said
    found = {path.name for path in work.iterdir()}
    assert found == written, f"it leaves {', '.join(sorted(found ^ written))}, or does not"
    return said


def _on(version: str, constraints: Callable[[], list[str]] = list) -> Callable[[Path], None]:
    """A job: the first steps with one Python, and the newest versions of what is needed, or others."""

    def job(folder: Path) -> None:
        venv = made(folder / "venv", _python(version))
        venv.install(f"{_built()[0]}[cpu]", constraints=constraints())
        print(venv.versions(), file=sys.stderr)
        _smoke(venv, folder)

    return job


def _python(version: str, user: int | None = None) -> Path:
    """An interpreter that the user can run."""
    found = interpreter(version)
    if user is not None:
        system = Path(f"/usr/bin/python{version}")
        found = next((path for path in (found, system) if path and _runs(path, user)), None)
    if found is None:
        raise NotHere(f"there is no Python {version}" + ("" if user is None else " that another user may run"))
    return found


def _runs(path: Path, user: int) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        try:
            done = subprocess.run([path, "-c", ""], user=user, cwd=folder, env={}, capture_output=True)
        except PermissionError:
            return False
        return done.returncode == 0


JOBS: dict[str, Callable[[Path], None]] = {
    "wheel": wheel,
    "hardened": hardened,
    "lowest": _on(OLDEST, lowest),
    "newest": _on(OLDEST),
    **{f"python{version}": _on(version) for version in ("3.12", "3.13", "3.14")},
}


def main() -> int:
    """Run the jobs and say how each ended."""
    parser = argparse.ArgumentParser(prog="python -m tests.environments", description=__doc__)
    parser.add_argument("jobs", nargs="*", metavar="JOB", help=f"of {', '.join(JOBS)}; all by default")
    chosen = parser.parse_args().jobs or list(JOBS)
    if unknown := [name for name in chosen if name not in JOBS]:
        parser.error(f"there is no job {unknown[0]!r}: the jobs are {', '.join(JOBS)}")
    _built()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return int(not all([*pool.map(_run, chosen)]))


def _run(name: str) -> bool:
    """Run a job and say how it ended; whether it did not fail."""
    started, fine = time.perf_counter(), True
    with tempfile.TemporaryDirectory(prefix="foreplan-") as folder:
        os.chmod(folder, 0o755)
        try:
            JOBS[name](Path(folder))
            ended = "fine"
        except NotHere as error:
            ended = f"not here: {error}"
        except (AssertionError, subprocess.CalledProcessError) as error:
            ended, fine = f"FAILED: {error}", False
    print(f"{name}: {ended} ({time.perf_counter() - started:.0f} s)", flush=True)
    return fine


if __name__ == "__main__":
    sys.exit(main())
