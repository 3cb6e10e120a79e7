"""Where plans are shared: folders of many users, URLs, and places that cannot be used."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import fsspec
import pytest

from foreplan.compiler import shared_plans
from foreplan.compiler.kept_plans import kept_plan
from tests.compiler.sharing import HOSTILE, Machine, only
from tests.planner.problems import training_chain


@pytest.mark.parametrize("mode", [0o700, 0o777, 0o1777])
def test_a_folder_and_files_that_others_may_write_serve(mode: int, machine: Machine, folder_of_plans: Path) -> None:
    folder_of_plans.chmod(mode)
    mask = os.umask(0o077)
    try:
        right = machine.found()
    finally:
        os.umask(mask)
    assert only(folder_of_plans).stat().st_mode & 0o777 == 0o644  # whatever the umask: others shall read it
    only(folder_of_plans).chmod(0o666)
    assert machine.found() == right and machine.planned == 1


AS_ANOTHER = """
import encodings.ascii, os, sys, filelock
from foreplan.base import disk_cache
from foreplan.compiler import kept_plans
from tests.planner.problems import training_chain
plan, planned = kept_plans.plan, []
plan(training_chain(2))  # which loads what the other user may not be able to read
os.setgroups([]), os.setgid(54321), os.setuid(54321)
os.environ[disk_cache.VARIABLE] = sys.argv[1]
disk_cache._folder.cache_clear()
kept_plans.plan = lambda *question, **options: planned.append(1) or plan(*question, **options)
for layers in (1, 2, 3):
    kept_plans.kept_plan(training_chain(layers), None, "auto")
    print(len(planned))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("mode", [0o755, 0o777, 0o1777])
def test_another_user_reads_and_writes_as_the_folder_allows(
    mode: int, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as above:  # pytest's own folder is closed to other users
        os.chmod(above, 0o777)
        plans = Path(above, "plans")
        plans.mkdir()
        plans.chmod(mode)
        monkeypatch.setenv(shared_plans.VARIABLE, str(plans))
        machine.found(training_chain(1))
        command = [sys.executable, "-c", AS_ANOTHER, f"{above}/private"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.stdout.split() == ["0", "1", "2"], done.stderr
        notes = done.stderr.splitlines()
        if mode == 0o755:
            (note,) = notes
            assert "cannot be written to the place that FOREPLAN_PLANS names (Permission denied)" in note
        assert mode == 0o755 or not notes
        assert len(list(plans.iterdir())) == (1 if mode == 0o755 else 3), list(plans.iterdir())


def note_of(capsys: pytest.CaptureFixture[str]) -> str:
    (note,) = capsys.readouterr().err.splitlines()
    assert note.startswith("note: plans cannot be ") and "so this process plans for itself; let it name" in note
    return str(note)


@pytest.mark.parametrize(
    "place, reason",
    [
        ("missing", "No such file or directory"),
        ("file", "Not a directory"),
        ("nonsense://key:hidden@host/plans", "fsspec knows no such URL"),
        ("file:///dev/null/hidden", "Not a directory"),
    ],
)
def test_a_place_that_cannot_be_used_is_told_once(
    place: str, reason: str, machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(machine.folder)
    Path("file").touch()
    monkeypatch.setenv(shared_plans.VARIABLE, place)
    machine.next()
    for layers in (1, 2):
        kept_plan(training_chain(layers), None, "auto")
    note = note_of(capsys)
    assert f"({reason})" in note and "hidden" not in note and str(machine.folder) not in note
    assert machine.planned == 2 and not Path("missing").exists()


@pytest.mark.skipif(importlib.util.find_spec("s3fs") is not None, reason="s3fs is installed")
def test_a_library_for_an_object_store_is_asked_for(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(shared_plans.VARIABLE, "s3://key:hidden@bucket/plans")
    machine.found()
    note = note_of(capsys)
    assert "s3fs" in note and "hidden" not in note and "bucket" not in note


@pytest.mark.parametrize("library, place", [("filelock", "plans"), ("fsspec", "memory://plans")])
def test_a_missing_library_is_asked_for(
    library: str,
    place: str,
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.setenv(shared_plans.VARIABLE, place)
    machine.found()
    assert f"({library} is missing: pip install 'foreplan[shared]')" in note_of(capsys)
    assert machine.planned == 1


@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_a_url_of_fsspec(
    scheme: str,
    machine: Machine,
    folder_of_plans: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url = f"file://{folder_of_plans}" if scheme == "file" else f"memory://plans/{os.getpid()}/"
    monkeypatch.setenv(shared_plans.VARIABLE, url)
    files, path = fsspec.core.url_to_fs(url)
    plans = [machine.found() for _ in range(2)]
    (name,) = files.ls(path, detail=False)
    assert plans[0] == plans[1] and machine.planned == 1
    content = files.cat_file(name)
    for hostile in (b"", content[:-1], HOSTILE["too large"], HOSTILE["too deep"]):
        files.pipe_file(name, hostile)
        assert machine.found() == plans[0]
        assert files.cat_file(name) == content
    assert machine.planned == 5 and not capsys.readouterr().err


def test_whatever_an_object_store_raises_is_told_without_its_text(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class OutOfOrderError(Exception):
        pass

    def fails(*_: Any, **__: Any) -> None:
        raise OutOfOrderError("key:hidden")

    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "cat_file", fails)
    monkeypatch.setenv(shared_plans.VARIABLE, "memory://plans")
    machine.found()
    note = note_of(capsys)
    assert "read from" in note and "(OutOfOrderError)" in note and "hidden" not in note
