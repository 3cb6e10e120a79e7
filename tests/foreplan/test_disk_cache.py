"""What is kept on disk: in one folder, of a bounded size, without what killed processes have left."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from foreplan import disk_cache


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(disk_cache, "_folder", lambda: tmp_path / "kept")
    monkeypatch.setattr(disk_cache, "_make_room", disk_cache._make_room.__wrapped__)  # each time
    return tmp_path / "kept"


def test_what_was_made_first_makes_room(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_cache, "_LIMIT", 1000)
    for i in range(8):
        disk_cache.keep(str(i), bytes(200))
        os.utime(folder / str(i), (i, i))
    assert sorted(file.name for file in folder.iterdir()) == ["4", "5", "6", "7"]
    assert disk_cache.kept("7") == bytes(200) and disk_cache.kept("0") is None


def test_what_a_killed_process_left_goes(folder: Path) -> None:
    disk_cache.keep("a", b"whole")
    for name, age in (("a.0123456789ab.tmp", 2 * 3600), ("a.ba9876543210.tmp", 10)):
        (folder / name).write_bytes(b"half")
        os.utime(folder / name, (time.time() - age,) * 2)
    disk_cache.keep("b", b"whole")
    assert sorted(file.name for file in folder.iterdir()) == ["a", "a.ba9876543210.tmp", "b"]


CLAIM = "from foreplan.disk_cache import claim; claim('a'); print('claimed', flush=True); input()"


@pytest.mark.parametrize("killed", [True, False])
def test_nobody_waits_for_a_killed_process_nor_for_ever(
    folder: Path, killed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_cache, "_PATIENCE", 60 if killed else 0.5)
    environment = {**os.environ, "FOREPLAN_CACHE_DIR": str(folder)}
    with subprocess.Popen(
        [sys.executable, "-c", CLAIM], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == b"claimed\n"
        if killed:
            other.kill()
        started = time.monotonic()
        disk_cache.claim("a")
        assert (time.monotonic() - started >= 0.5) != killed
        disk_cache.release("a")
        disk_cache.release("a")
        assert [file.name for file in folder.iterdir()] == ([] if killed else ["a.lock.tmp"])  # the other holds it
        other.kill()


@pytest.mark.parametrize(
    "environment, expected",
    [
        ({"FOREPLAN_CACHE_DIR": "/x/y", "XDG_CACHE_HOME": "/c", "HOME": "/h"}, "/x/y"),
        ({"XDG_CACHE_HOME": "/c", "HOME": "/h"}, "/c/foreplan"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/h"}, "/h/.cache/foreplan"),
        ({"HOME": "/h"}, "/h/.cache/foreplan"),
        ({"HOME": "~"}, None),
        ({"HOME": ""}, None),
    ],
)
def test_where_it_lies(
    environment: dict[str, str], expected: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.undo()
    for name in ("FOREPLAN_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    found = disk_cache._folder.__wrapped__()
    assert found == (None if expected is None else Path(expected))


def test_a_place_in_a_current_folder_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.undo()
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    monkeypatch.setenv("FOREPLAN_CACHE_DIR", "here")
    for name in ("_folder", "_tell"):
        monkeypatch.setattr(disk_cache, name, getattr(disk_cache, name).__wrapped__)
    disk_cache.keep("a", b"content")
    assert disk_cache.kept("a") is None
    assert "cannot be kept in 'here' (No such file or directory)" in capsys.readouterr().err


def test_a_digest_tells_damage_and_not_intent(folder: Path) -> None:
    """So whoever may write there is trusted."""
    disk_cache.keep("a", b"ours")
    (folder / "a").write_bytes(hashlib.sha256(b"theirs").digest() + b"theirs")
    assert disk_cache.kept("a") == b"theirs"
    (folder / "a").write_bytes(hashlib.sha256(b"theirs").digest() + b"their")
    assert disk_cache.kept("a") is None


@pytest.mark.parametrize("mode, used", [(0o755, True), (0o700, True), (0o775, False), (0o757, False), (0o1777, False)])
def test_a_folder_that_others_may_write_is_not_used(
    mode: int, used: bool, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_cache, "_tell", disk_cache._tell.__wrapped__)
    disk_cache.keep("a", b"before")
    folder.chmod(mode)
    assert disk_cache.kept("a") == (b"before" if used else None)
    disk_cache.keep("b", b"after")
    assert (folder / "b").exists() == used
    assert ("others may write there" in capsys.readouterr().err) != used


@pytest.mark.parametrize("mode", [0o664, 0o646])
def test_a_file_that_others_may_write_is_not_used(mode: int, folder: Path) -> None:
    disk_cache.keep("a", b"content")
    (folder / "a").chmod(mode)
    assert disk_cache.kept("a") is None
    disk_cache.keep("a", b"content")  # in its place
    assert disk_cache.kept("a") == b"content"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_file_of_another_user_is_not_used(folder: Path) -> None:
    disk_cache.keep("a", b"content")
    os.chown(folder / "a", 54321, 54321)
    assert disk_cache.kept("a") is None


def test_a_link_is_no_file_that_is_kept(folder: Path) -> None:
    disk_cache.keep("a", b"content")
    (folder / "b").symlink_to("a")
    assert disk_cache.kept("b") is None


def test_folders_above_are_not_looked_at(folder: Path) -> None:
    """Who may write one can put another folder in the place of this one, but not make it look like this user's."""
    disk_cache.keep("a", b"content")
    folder.parent.chmod(0o777)
    assert disk_cache.kept("a") == b"content"


READS = """
import os
from foreplan import disk_cache
os.setgroups([]), os.setgid(54321), os.setuid(54321)
print(disk_cache.kept("a"))
disk_cache.keep("b", b"mine")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("mask, read", [(0o022, "b'content'"), (0o077, "None")])
def test_all_users_read_what_root_has_filled(mask: int, read: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an image: they use what lies there, and write nothing. The rights are those that root's umask gives."""
    with tempfile.TemporaryDirectory(dir="/tmp") as above:  # pytest's own folder is closed to other users
        os.chmod(above, 0o755)
        folder = Path(above, "kept")
        monkeypatch.setattr(disk_cache, "_folder", lambda: folder)
        before = os.umask(mask)
        try:
            disk_cache.keep("a", b"content")
        finally:
            os.umask(before)
        environment = {**os.environ, "FOREPLAN_CACHE_DIR": str(folder)}
        done = subprocess.run([sys.executable, "-c", READS], env=environment, capture_output=True, text=True)
        assert done.stdout.strip() == read, done.stderr
        assert "Permission denied" in done.stderr
        assert [file.name for file in folder.iterdir()] == ["a"]
