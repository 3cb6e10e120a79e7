"""What is kept on disk: in one folder, of a bounded size, without what killed processes have left."""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from foreplan.base import disk_cache
from tests.cache import kept_files

NAMES = [disk_cache.file_name(str(i), "o", "kernel") for i in range(8)]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(disk_cache.VARIABLE, raising=False)
    (tmp_path / "above").mkdir()
    monkeypatch.setattr(disk_cache, "_folder", lambda: tmp_path / "above" / "kept")
    monkeypatch.setattr(disk_cache, "_make_room", disk_cache._make_room.__wrapped__)  # each time
    return tmp_path / "above" / "kept"


def test_files_may_go_while_room_is_made(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another process releases its lock in the moment between the list and what is asked of each file."""
    disk_cache.keep(NAMES[0], b"content")
    scan = os.scandir

    @contextlib.contextmanager
    def listed(opened: int) -> Iterator[list[os.DirEntry[str]]]:
        lock = folder / f"{NAMES[1]}.lock.tmp"
        lock.touch()
        with scan(opened) as entries:
            found = list(entries)
        lock.unlink()
        yield found

    monkeypatch.setattr(os, "scandir", listed)
    disk_cache.keep(NAMES[2], b"content")
    monkeypatch.undo()
    assert not capsys.readouterr().err and {NAMES[0], NAMES[2]} <= set(os.listdir(folder))


def test_what_was_made_first_makes_room(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_cache, "_LIMIT", 1000)
    for i, name in enumerate(NAMES):
        disk_cache.keep(name, bytes(200))
        os.utime(folder / name, (i, i))
    assert [file.name for file in kept_files(folder)] == sorted(NAMES[4:])
    assert disk_cache.kept(NAMES[7]) == bytes(200) and disk_cache.kept(NAMES[0]) is None


def test_what_a_killed_process_left_goes(folder: Path) -> None:
    disk_cache.keep(NAMES[0], b"whole")
    old = [f"{first}.{end}.tmp" for first in (NAMES[0], disk_cache.TAG) for end in ("0123456789ab", "lock")]
    new = f"{NAMES[0]}.ba9876543210.tmp"
    for name in (*old, new):
        (folder / name).write_bytes(b"half")
        os.utime(folder / name, (time.time() - (10 if name == new else 2 * 3600),) * 2)
    disk_cache.keep(NAMES[1], b"whole")
    assert [file.name for file in kept_files(folder)] == sorted([NAMES[0], NAMES[1], new])


CLAIM = "from foreplan.base.disk_cache import claim; claim('a'); print('claimed', flush=True); input()"


@pytest.mark.parametrize("killed", [True, False])
def test_nobody_waits_for_a_killed_process_nor_for_ever(
    folder: Path, killed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_cache, "_PATIENCE", 60 if killed else 0.5)
    folder = folder / disk_cache.FOLDER
    monkeypatch.setattr(disk_cache, "_folder", lambda: folder)
    environment = {**os.environ, "FOREPLAN_CACHE_DIR": str(folder.parent)}
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
        assert [file.name for file in kept_files(folder)] == ([] if killed else ["a.lock.tmp"])  # the other holds it
        other.kill()


@pytest.mark.parametrize(
    "environment, expected",
    [
        ({"FOREPLAN_CACHE_DIR": "/x/y", "XDG_CACHE_HOME": "/c", "HOME": "/h"}, "/x/y/foreplan-cache"),
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
    assert "cannot be kept in 'here/foreplan-cache' (No such file or directory)" in capsys.readouterr().err


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


@pytest.mark.parametrize("named", [False, True])
def test_folders_above_are_not_looked_at(named: bool, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who may write one can put another folder in the place of this one, but not make it look like this user's. Of a
    folder that the user names, others may have files of the user's in a folder like the cache's: there, it is checked.
    """
    disk_cache.keep("a", b"content")
    folder.parent.chmod(0o777)
    if named:
        monkeypatch.setenv(disk_cache.VARIABLE, str(folder.parent))
    assert disk_cache.kept("a") == (None if named else b"content")
    folder.parent.chmod(0o755)
    folder.parent.parent.chmod(0o777)
    assert disk_cache.kept("a") == b"content"


def test_nothing_is_made_where_all_may_write(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.parent.chmod(0o1777)
    monkeypatch.setenv(disk_cache.VARIABLE, str(folder.parent))
    disk_cache.keep("a", b"content")
    assert not folder.exists()


def test_a_new_folder_is_tagged(folder: Path) -> None:
    """As the Cache Directory Tagging Specification says: the first 43 bytes of a regular file of that name."""
    disk_cache.keep("a", b"content")
    assert (folder / "CACHEDIR.TAG").read_bytes()[:43] == b"Signature: 8a477f597d28d172789f06886806bc55"
    assert not (folder / "CACHEDIR.TAG").is_symlink()


OLD = [
    NAMES[0],
    f"{'0' * 64}.cubin",
    f"cudnn-{'a' * 64}",
    f"prices-{'b' * 16}.json",
    f"{NAMES[0]}.lock.tmp",
    ".nfs0001",
]


@pytest.mark.parametrize("tag", [None, b"", bytes(174)])
def test_a_folder_that_an_older_version_has_filled_goes_on(folder: Path, tag: bytes | None) -> None:
    """One without a tag, or with one that a power failure has emptied."""
    folder.mkdir()
    for name in OLD:
        (folder / name).write_bytes(b"old")
    if tag is not None:
        (folder / disk_cache.TAG).write_bytes(tag)
    assert disk_cache.kept("a") is None
    disk_cache.keep("a", b"content")
    assert disk_cache.kept("a") == b"content"
    assert (folder / disk_cache.TAG).read_bytes() == disk_cache.TAGGED


STRANGE = [
    "notes.txt",
    "src",
    "x.o",
    f"{'g' * 64}.o",
    f"{'a' * 64}.safetensors",
    f"kernel-{'a' * 63}.o",
    "CACHEDIR.TAG",
]


@pytest.mark.parametrize("name", STRANGE)
def test_a_folder_with_other_files_is_no_cache(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tagged, it would be left out by programs that make copies: nothing is written there."""
    monkeypatch.setattr(disk_cache, "_tell", disk_cache._tell.__wrapped__)
    folder.mkdir()
    (folder / name).write_text("mine")
    (folder / NAMES[0]).write_bytes(disk_cache.sealed(b"content"))
    assert disk_cache.kept(NAMES[0]) is None
    disk_cache.keep(NAMES[1], b"content")
    assert {file.name for file in folder.iterdir()} == {name, NAMES[0]} and (folder / name).read_text() == "mine"
    assert f"'{name}' in it is not foreplan's" in capsys.readouterr().err


READS = """
import os
from foreplan.base import disk_cache
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
        folder = Path(above, disk_cache.FOLDER)
        monkeypatch.setattr(disk_cache, "_folder", lambda: folder)
        before = os.umask(mask)
        try:
            disk_cache.keep("a", b"content")
        finally:
            os.umask(before)
        environment = {**os.environ, "FOREPLAN_CACHE_DIR": above}
        done = subprocess.run([sys.executable, "-c", READS], env=environment, capture_output=True, text=True)
        assert done.stdout.strip() == read, done.stderr
        assert "Permission denied" in done.stderr
        assert [file.name for file in kept_files(folder)] == ["a"]
