"""Files of others, which lie beside what foreplan writes, renames and removes, stay as they are.

All calls of the package that change a folder are found in its source. Each runs in some scenario here, beside
strangers' files with names like its own; a new call without one fails.
"""

from __future__ import annotations

import ast
import os
import re
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import filelock
import pytest

import foreplan as fp
from foreplan.base import calibration, disk_cache
from foreplan.base.files import _machine, _prefix, open_atomically, write_atomically
from foreplan.calibration import processes as calibrate_process
from foreplan.cli.log import open_logs
from foreplan.compiler import shared_plans
from foreplan.runtime.cuda.libraries.nvrtc import Nvcc, Source
from tests.test_structure import PACKAGE, python_files

# By these names, whatever they are called on. `os.replace` and `os.remove` share theirs with text and lists.
CHANGES = {
    *("unlink", "rename", "renames", "rmdir", "removedirs", "rmtree", "mkdir", "makedirs", "mknod", "mkfifo"),
    *("symlink", "symlink_to", "link", "hardlink_to", "touch", "truncate", "ftruncate", "utime", "chmod", "chown"),
    *("copyfile", "copy2", "copytree", "write_text", "write_bytes", "mkstemp", "mkdtemp", "TemporaryDirectory"),
    *("NamedTemporaryFile", "pipe_file", "put_file", "rm", "rm_file", "savez", "tofile"),
}
CHANGES_OF = {
    ("os", "remove"),
    ("os", "replace"),
    ("shutil", "move"),
    ("shutil", "copy"),
    ("np", "save"),
    ("lock", "acquire"),
}
EXEMPT = {
    "cli/main.py os.open(os.devnull, os.O_RDWR)": "the null device",
    "cli/main.py open(os.devnull, 'w')": "the null device",
    "frontend/onnx/importer.py self.guards.rename(renamed)": "names of tensors",
    "cli/data.py archive.open(zipfile.ZipInfo(f'{name}.npy'), 'w', force_zip64=True)": "within a file",
    "compiler/shared_plans.py os.open(name, flags, dir_fd=folder)": "these flags read",
    "runtime/cuda/libraries/stand_in.py open(os.memfd_create('libcuda'), 'wb')": "memory without a name",
}
_NAMED = re.compile(rf"\b({'|'.join(sorted(CHANGES | {name for _, name in CHANGES_OF} | {'open'}))})\(")
Site = tuple[Path, int, int, str]


def sites() -> list[Site]:
    """Each call that changes a folder: its file, first and last line, and text."""
    found = []
    for file, text in ((file, file.read_text()) for file in python_files()):
        for node in ast.walk(ast.parse(text)) if _NAMED.search(text) else ():
            if isinstance(node, ast.Call) and _changes(node):
                text = f"{file.relative_to(PACKAGE)} {ast.unparse(node)}"
                found.append((file.resolve(), node.lineno, node.end_lineno or node.lineno, text))
    return found


def _changes(call: ast.Call) -> bool:
    function = call.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    whose = ast.unparse(function.value) if isinstance(function, ast.Attribute) else ""
    if name == "open":  # flags are named before they are given
        mode = ast.unparse(call.args[1]) if len(call.args) > 1 else ""
        return (whose in ("os", "") and (("O_" in mode and "O_RDONLY" not in mode) or mode == "flags")) or _writes(mode)
    return name in CHANGES or (whose, name) in CHANGES_OF


def _writes(mode: str) -> bool:
    return mode.startswith("'") and bool(set(mode) & set("wax+"))


class Watch:
    """Which lines of the package bring about a change to a folder while one of these is on."""

    def __init__(self) -> None:
        self.on, self.seen = False, set[tuple[str, int]]()
        sys.addaudithook(self._hear)  # which cannot be taken away again

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.on and (event.startswith(("os.", "shutil.", "tempfile.")) or event in ("open", "strangers")):
            self.note(sys._getframe(1))

    def note(self, frame: FrameType | None) -> None:
        """Note all lines of the package that are under way."""
        while frame is not None:
            self.seen.add((os.path.realpath(frame.f_code.co_filename), frame.f_lineno))
            frame = frame.f_back

    @contextmanager
    def during(self) -> Iterator[None]:
        self.on = True
        try:
            yield
        finally:
            self.on = False


WATCH = Watch()


def near(*own: str) -> set[str]:
    """Names that are almost those that foreplan gives."""
    found = set()
    for name in own:
        last = max((i for i, letter in enumerate(name) if letter in "0123456789abcdef"), default=0)
        found |= {f"{name}~", f"{name}.bak", f"#{name}#", name[:-1], name.upper(), f"{name[:last]}g{name[last + 1 :]}"}
        found |= {name.replace(".tmp", ""), name.replace(".tmp", ".part"), name.replace(".", "-"), f"{name}.orig"}
    return {name for name in found if name not in own and name not in (".", "..", "")}


USUAL = {"thesis.docx", "dataset.npz", "notes.tmp", ".hidden", "model.lock", "a.o", "b.json", "c.plan.json", "d.cubin"}


def settle(folder: Path, names: set[str], special: Set[str] = frozenset()) -> dict[str, object]:
    """Put strangers' files into a folder: old, large (and sparse), linked, pipes and folders. What they are then.

    Args:
        special: names that foreplan might give, which here are no files of its own: a link, a pipe and a folder have
            them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    old = time.time() - 400 * 24 * 3600
    for i, name in enumerate(sorted(names)):
        (folder / name).write_bytes(f"{name} is mine".encode())
        if i % 5 == 0:
            os.truncate(folder / name, 600 << 20)
        os.utime(folder / name, (old - i, old - i))
    for i, name in enumerate(sorted(name for name in special if not os.path.lexists(folder / name))):
        if i % 3 == 0:
            (folder / name).symlink_to(sorted(names)[0])
        elif i % 3 == 1:
            os.mkfifo(folder / name)
        else:
            (folder / name).mkdir()
            (folder / name / "inside").write_text("mine")
    return look(folder, names | special)


def look(folder: Path, names: set[str]) -> dict[str, object]:
    """Of strangers' files: what can be seen of them, and their first bytes."""
    found: dict[str, object] = {}
    for name in names:
        for path in (folder / name, folder / name / "inside"):
            with suppress(OSError):
                at = path.lstat()
                content = _start(path) if stat.S_ISREG(at.st_mode) else b""
                found[str(path)] = (at.st_mode, at.st_ino, at.st_size, at.st_mtime_ns, at.st_nlink, content)
    return found


def _start(path: Path) -> bytes:
    with open(path, "rb") as file:
        return file.read(100)


SCENARIOS: dict[str, Callable[[Path, pytest.MonkeyPatch], None]] = {}


def scenario(function: Callable[[Path, pytest.MonkeyPatch], None]) -> Callable[[Path, pytest.MonkeyPatch], None]:
    SCENARIOS[function.__name__] = function
    return function


@contextmanager
def beside(folder: Path, own: set[str], special: Set[str] = frozenset()) -> Iterator[None]:
    """Watch what is done in a folder of strangers' files, which stay as they are."""
    names = near(*own) | USUAL - own - special
    before = settle(folder, names, special)
    with WATCH.during():
        yield
    assert look(folder, names | special) == before


@scenario
def cache_in_a_users_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `FOREPLAN_CACHE_DIR` names may have any files, also such as the cache's own: /scratch/$USER."""
    monkeypatch.setenv(disk_cache.VARIABLE, str(folder))
    monkeypatch.setattr(disk_cache, "_folder", disk_cache._folder.__wrapped__)
    monkeypatch.setattr(disk_cache, "_make_room", disk_cache._make_room.__wrapped__)
    name = disk_cache.file_name("x", "o", "kernel")
    own = {name, f"{name}.lock.tmp", f"{name}.0123456789ab.tmp", disk_cache.TAG}
    with beside(folder, own, own):
        keep_all(name, monkeypatch)
    assert disk_cache.kept(name) == b"content"


@scenario
def cache_with_strangers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that a user has put into the cache's own folder."""
    monkeypatch.setattr(disk_cache, "_folder", lambda: folder)
    monkeypatch.setattr(disk_cache, "_make_room", disk_cache._make_room.__wrapped__)
    names = [disk_cache.file_name(str(i), "o", "kernel") for i in range(4)]
    disk_cache.keep(names[0], b"content")
    (folder / f"{names[0]}.0123456789ab.tmp").write_bytes(b"half")
    os.utime(folder / f"{names[0]}.0123456789ab.tmp", (1, 1))
    with beside(folder, {names[0], f"{names[0]}.0123456789ab.tmp"}, set(names[1:])):
        keep_all(names[0], monkeypatch)
    assert not (folder / f"{names[0]}.0123456789ab.tmp").exists()
    assert disk_cache.kept(names[0]) == b"content"


def keep_all(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep something, with a claim; too much; and something for which the disk has no room."""
    disk_cache.claim(name)
    disk_cache.keep(name, b"content")
    disk_cache.release(name)
    for i in range(3):
        disk_cache.keep(disk_cache.file_name(f"large{i}", "cubin"), b"0" * 1000)
    with monkeypatch.context() as patch, suppress(OSError):
        patch.setattr(os, "rename", refuse)
        disk_cache.keep(disk_cache.file_name("y", "json", "prices"), b"content")
    with monkeypatch.context() as patch:
        patch.setattr(disk_cache, "_LIMIT", 2500)
        disk_cache.keep(name, b"content")


def refuse(*arguments: Any, **named: Any) -> None:
    raise OSError(28, "No space left on device")


@scenario
def files_written_atomically(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a killed writer has left goes, and nothing that looks like it."""
    folder.mkdir(parents=True)
    for name in ("w.safetensors", "n" * 255):
        left = f"{_prefix(name)}{_machine()}.{'0' * 12}.tmp"
        special = {f"{_prefix(name)}{_machine()}.{digit * 12}.tmp" for digit in "123"}
        (folder / left).write_bytes(b"half")
        with beside(folder, {left[:250] if len(left) > 250 else left}, special):
            write_atomically(folder / name, b"content")
            with suppress(fp.ForeplanError), open_atomically(folder / name) as file:
                file.write(b"half")
                raise fp.SessionError("no more")
        assert not (folder / left).exists() and (folder / name).read_bytes() == b"content"
    os.mkfifo(folder / "pipe")
    reader = threading.Thread(target=(folder / "pipe").read_bytes)
    reader.start()
    with WATCH.during():
        write_atomically(folder / "pipe", b"content")
    reader.join()


@scenario
def calibrations(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder))
    for made in (False, True):
        with beside(folder / "foreplan" if made else folder, {"foreplan.toml"}, {".foreplan"}):
            calibration.writable_file(calibrate_process.PROCESSES)
        assert (folder / "foreplan").is_dir()


@scenario
def adapters(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = fp.lora(fp.models.build("mlp:width=8,layers=1,batch=2"), targets=["*"], rank=2)
    session = fp.compile(graph, fp.losses.cross_entropy, fp.optim.SGD(0.1), target="numpy").bind()
    for _ in range(2):
        with beside(folder, {"adapter_model.safetensors", "adapter_config.json"}, {"adapter_config", "config.json"}):
            session.save_adapters(str(folder))
    session.load_adapters(str(folder))


@scenario
def log_of_training(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with beside(folder, {"log.csv"}), open_logs(str(folder / "log.csv"), None, ["step", "loss"], 0) as logs:
        for log in logs:
            log.write(1, {"loss": 0.5})


@scenario
def places_for_a_while(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders in the one for temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    compiler = Nvcc.__new__(Nvcc)
    compiler.path = "true"
    with beside(folder, {"tmp0123456"}, {"kernel.cu", "kernel.cubin"}):
        with suppress(FileNotFoundError):  # it makes nothing
            compiler.compile(Source("plain.cu"), "sm_90")
        with monkeypatch.context() as patch, suppress(OSError):
            patch.setattr(calibrate_process, "_Engine", refuse)
            calibrate_process.calibrate_process()
    assert not list(folder.glob("tmp" + 8 * "[a-z0-9_]"))


@scenario
def shared_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(shared_plans.VARIABLE, str(folder))
    share(folder, monkeypatch)


@scenario
def shared_url(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(shared_plans.VARIABLE, f"file://{folder}")
    share(folder, monkeypatch)


def share(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Share a plan, in turn; and another one, where a stranger's link has the name of its lock."""
    shared_plans._place.cache_clear()
    plan, other, third = (disk_cache.file_name(about, "plan.json") for about in ("x", "y", "z"))
    locks = {f"{name}.{os.geteuid()}.lock" for name in (other, third)}
    with beside(folder, {plan, f"{plan}.{os.geteuid()}.lock", f"{plan}.0123456789ab.tmp"}, locks):
        for name in (plan, other, third):
            with shared_plans.turn(name):
                shared_plans.share(name, b"content")
        with monkeypatch.context() as patch, filelock.FileLock(folder / f"{plan}.{os.geteuid()}.lock"):
            patch.setattr(shared_plans, "PATIENCE", 0.01)
            with shared_plans.turn(plan):
                pass
    assert shared_plans.shared(plan) == b"content"
    shared_plans._place.cache_clear()


@pytest.mark.parametrize("name", SCENARIOS)
def test_strangers_files_stay_as_they_are(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    SCENARIOS[name](tmp_path / "folder", monkeypatch)


def test_every_call_that_changes_a_folder_runs_beside_strangers_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    WATCH.seen.clear()
    for name, run in SCENARIOS.items():
        with monkeypatch.context() as patch:
            run(tmp_path / name, patch)
    found = sites()
    assert EXEMPT.keys() <= {text for *_, text in found}
    left = [
        f"{text}, line {first}"
        for file, first, last, text in found
        if text not in EXEMPT and not any((str(file), line) in WATCH.seen for line in range(first, last + 1))
    ]
    assert not left, "calls that change a folder, and that no scenario in this file reaches"
