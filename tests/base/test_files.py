"""A file is written whole or not at all, and a failure says which path and why."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import threading
import time

import pytest

from foreplan.base.errors import SessionError, UsageError
from foreplan.base.files import check_writable, open_atomically, write_atomically


def run(code: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, **options)


def test_writes_bytes_and_text(tmp_path):
    write_atomically(tmp_path / "a", b"\x00\xff")
    write_atomically(str(tmp_path / "b"), "µs\n")
    write_atomically(tmp_path / "c", memoryview(b"xyz"))
    assert (tmp_path / "a").read_bytes() == b"\x00\xff"
    assert (tmp_path / "b").read_bytes() == "µs\n".encode()
    assert (tmp_path / "c").read_bytes() == b"xyz"
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "c"]


def test_replaces_and_keeps_access_rights(tmp_path):
    path = tmp_path / "a"
    path.write_text("old")
    path.chmod(0o640)
    write_atomically(path, "new")
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_new_file_follows_the_umask(tmp_path):
    done = run(
        f"import os; os.umask(0o027)\nfrom foreplan.base.files import *\nwrite_atomically({str(tmp_path / 'a')!r}, '')"
    )
    assert done.returncode == 0, done.stderr
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "link").symlink_to("deep/real")
    write_atomically(tmp_path / "link", "1")  # dangling at first
    write_atomically(tmp_path / "link", "2")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "deep" / "real").read_text() == "2"
    assert os.listdir(tmp_path / "deep") == ["real"]


def test_the_longest_name_a_file_system_takes(tmp_path):
    path = tmp_path / ("n" * 255)
    write_atomically(path, "x")
    assert path.read_text() == "x"


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_an_exception_in_the_block_leaves_the_old_file(tmp_path, error):
    path = tmp_path / "a"
    path.write_text("old")
    with pytest.raises(error), open_atomically(path) as file:
        file.write(b"half")
        raise error
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a"]


def test_an_error_of_another_file_passes_through(tmp_path):
    with pytest.raises(FileNotFoundError), open_atomically(tmp_path / "a") as file:
        file.write((tmp_path / "other").read_bytes())
    assert os.listdir(tmp_path) == []


def test_names_a_missing_directory(tmp_path):
    with pytest.raises(UsageError, match=r"no-such.*No such file or directory; create the directory"):
        write_atomically(tmp_path / "no-such" / "a", b"")


@pytest.mark.parametrize("end", ["new/", "new/.", "new/..", "new//"])
def test_a_path_that_ends_as_a_folders_is_no_file(tmp_path, end):
    """`-o out/` wrote a file `out` where there was nothing, and said that it had written `out/`."""
    for write in (check_writable, lambda path: write_atomically(path, "text")):
        with pytest.raises(UsageError, match="Is a directory"):
            write(f"{tmp_path}/{end}")
    assert not os.listdir(tmp_path)


def test_names_a_directory(tmp_path):
    with pytest.raises(UsageError, match="Is a directory"):
        write_atomically(tmp_path, b"")
    with pytest.raises(UsageError, match="Not a directory"):
        (tmp_path / "file").write_text("")
        write_atomically(tmp_path / "file" / "a", b"")


@pytest.mark.parametrize(("path", "message"), [("", "cannot write"), ("a\0b", "no null character")])
def test_refuses_what_is_no_path(path, message):
    with pytest.raises(UsageError, match=message):
        write_atomically(path, b"")


def test_names_a_full_device():
    with pytest.raises(SessionError, match=r"'/dev/full': No space left on device"):
        write_atomically("/dev/full", b"x" * 10)


def test_without_space_the_old_file_stays(tmp_path):
    path = tmp_path / "a"
    path.write_text("old")
    # A file-size limit fails a regular file in mid-write, as a full disk does; Python ignores the signal.
    done = run(
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "from foreplan.base.files import write_atomically\nfrom foreplan.base.errors import SessionError\n"
        f"try: write_atomically({str(path)!r}, bytes(100_000))\n"
        "except SessionError as error: print(error)"
    )
    assert "File too large" in done.stdout and str(path) in done.stdout, done.stderr
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a"]


def test_without_permission(tmp_path):
    (tmp_path / "closed").mkdir()
    (tmp_path / "open").mkdir()
    path = tmp_path / "open" / "a"
    path.write_text("old")
    path.chmod(0o444)
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "closed").chmod(0o555)
    tmp_path.chmod(0o755)
    code = (
        "import os\nfrom foreplan.base.errors import UsageError\nfrom foreplan.base.files import write_atomically\n"
        f"os.chdir({str(tmp_path)!r})\nif os.geteuid() == 0: os.setgid(65534); os.setuid(65534)\n"
        "for path in ('closed/new', 'open/a'):\n"
        "    try: write_atomically(path, b'')\n    except UsageError as error: print(error)"
    )
    done = run(code)
    assert done.stdout.count("Permission denied") == 2, done.stdout + done.stderr
    assert path.read_text() == "old"
    assert os.listdir(tmp_path / "closed") == [] and os.listdir(tmp_path / "open") == ["a"]


def test_a_pipe_is_written_directly(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    got = []
    reader = threading.Thread(target=lambda: got.append(path.read_bytes()))
    reader.start()
    write_atomically(path, b"through")
    reader.join(10)
    assert got == [b"through"]
    assert stat.S_ISFIFO(path.stat().st_mode)


def test_standard_output_by_name(tmp_path):
    code = "from foreplan.base.files import *\nprint('first', end=' ')\nwrite_atomically('/dev/stdout', 'second')"
    assert run(code).stdout == "first second"
    log = tmp_path / "log"
    log.write_text("kept ")
    with open(log, "a") as file:
        subprocess.run([sys.executable, "-c", code], stdout=file, timeout=60, check=True)
    assert log.read_text() == "kept first second"


def test_a_reader_that_has_gone_is_the_callers(tmp_path):
    code = (
        "import os\nfrom foreplan.base.files import *\nr, w = os.pipe(); os.close(r)\n"
        "try: write_atomically(f'/dev/fd/{w}', b'x' * 10)\nexcept BrokenPipeError: print('broken')"
    )
    assert run(code).stdout == "broken\n"


KILLED = """
import os, signal
from foreplan.base.files import open_atomically
with open_atomically({path!r}) as file:
    file.write(bytes(100_000))
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_left_goes_with_the_next_save(tmp_path):
    path = tmp_path / ("ö" * 120)  # 240 bytes: more of them than characters
    for other in ("a", "b.c"):
        assert run(KILLED.format(path=str(tmp_path / other))).returncode == -9
    for _ in range(3):
        assert run(KILLED.format(path=str(path))).returncode == -9
    assert len(os.listdir(tmp_path)) == 5 - 2  # each of the last two removed the one before
    write_atomically(path, "whole")
    assert path.read_text() == "whole"
    left = [name for name in os.listdir(tmp_path) if name != path.name]
    assert sorted(name[:3] for name in left) == [".a.", ".b."]


def test_a_file_that_another_process_writes_stays(tmp_path):
    path = tmp_path / "a"
    with open_atomically(path) as file:
        file.write(b"mine")
        done = run(f"from foreplan.base.files import *\nwrite_atomically({str(path)!r}, 'theirs')")
        assert done.returncode == 0, done.stderr
        assert path.read_text() == "theirs" and len(os.listdir(tmp_path)) == 2
    assert path.read_text() == "mine" and os.listdir(tmp_path) == ["a"]


def test_many_writers_of_one_path(tmp_path):
    path = tmp_path / "a"
    code = f"from foreplan.base.files import *\nfor i in range(200): write_atomically({str(path)!r}, 'whole' * 1000)"
    writers = [subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE) for _ in range(4)]
    assert [writer.communicate()[1] for writer in writers] == [b""] * 4
    assert path.read_text() == "whole" * 1000 and os.listdir(tmp_path) == ["a"]


def test_left_overs_of_another_machine_stay_for_a_day(tmp_path):
    names = {hours: f".a.0123456789ab.{hours:012x}.tmp" for hours in (1, 30)}
    for hours, name in names.items():
        (tmp_path / name).write_text("half")
        os.utime(tmp_path / name, (time.time() - hours * 3600,) * 2)
    write_atomically(tmp_path / "a", "whole")
    assert sorted(os.listdir(tmp_path)) == sorted(["a", names[1]])


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def refuse(*arguments):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    (tmp_path / ".a.0123456789ab.0123456789ab.tmp").write_text("half")
    os.utime(tmp_path / ".a.0123456789ab.0123456789ab.tmp", (0, 0))
    write_atomically(tmp_path / "a", "whole")
    assert sorted(os.listdir(tmp_path)) == [".a.0123456789ab.0123456789ab.tmp", "a"]


@pytest.mark.parametrize("path", [None, 3, b"a", object()])
def test_a_path_is_a_text_or_a_path(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="path"):
        write_atomically(path, "x")
    with pytest.raises(UsageError, match="path"):
        check_writable(path)
    assert os.listdir(tmp_path) == []
