"""Plans in an object store: S3's protocol, spoken by a server of this machine."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from foreplan.base import disk_cache
from foreplan.compiler import shared_plans
from foreplan.compiler.kept_plans import kept_plan
from tests.compiler.sharing import HOSTILE, Machine, only
from tests.compiler.test_shared_plans import alike, at_once
from tests.planner.problems import training_chain

pytest.importorskip("s3fs", reason="s3fs is not installed: pip install s3fs 'moto[server]'")
pytest.importorskip("moto", reason="moto is not installed: pip install s3fs 'moto[server]'")


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of a store, with a bucket in it."""
    import s3fs
    from moto.server import ThreadedMotoServer

    with pytest.MonkeyPatch.context() as patch:
        made = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        made.start()
        host, port = made.get_host_and_port()
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "a-key")
        s3fs.S3FileSystem().mkdir("bucket")
        yield f"http://{host}:{port}"
        made.stop()


class Store:
    """A place in the bucket."""

    def __init__(self, path: str) -> None:
        import s3fs

        self.path, self.files = path, s3fs.S3FileSystem(use_listings_cache=False)

    def only(self) -> str:
        """The path of the only object."""
        (name,) = self.files.ls(self.path)
        return str(name)


@pytest.fixture
def store(server: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A place of this test's own, where plans are shared."""
    path = f"bucket/{abs(hash(request.node.name))}"
    monkeypatch.setenv(shared_plans.VARIABLE, f"s3://{path}/")
    return Store(path)


def test_another_machine_takes_the_plan(machine: Machine, store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    first = machine.found()
    assert alike(first, machine.plan(training_chain(1))) is False  # which is of another problem
    planned = machine.planned
    assert machine.found() == first and machine.planned == planned
    assert store.only() and not capsys.readouterr().err


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_hostile_objects_are_no_plans(
    content: bytes, machine: Machine, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are planned anew, and replaced."""
    right = machine.found()
    name = store.only()
    good = store.files.cat_file(name)
    store.files.pipe_file(name, content)
    assert machine.found() == right and machine.planned == 2 and not capsys.readouterr().err
    assert store.files.cat_file(name) == good


def test_a_forked_process_goes_on(machine: Machine, store: Store, capfd: pytest.CaptureFixture[str]) -> None:
    """A library's connections are those of the process that made them."""
    machine.found()
    name = Path(store.only()).name
    child = os.fork()
    if not child:
        signal.alarm(60)
        found = None
        try:
            found = shared_plans.shared(name)
        finally:
            os._exit(found is None)
    assert os.waitpid(child, 0)[1] == 0 and not capfd.readouterr().err


def test_a_bucket_that_is_not_there_is_told_once(
    machine: Machine, store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(shared_plans.VARIABLE, "s3://no-such-bucket/plans")
    assert machine.found() is not None
    (note,) = capsys.readouterr().err.splitlines()
    assert "plans cannot be written to the place that FOREPLAN_PLANS names" in note and "no-such" not in note


def test_a_store_that_does_not_answer_is_told_once(
    machine: Machine, store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is asked once, which takes the library up to half a minute."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    store.files.clear_instance_cache()
    started = time.monotonic()
    assert machine.found() is not None and time.monotonic() - started < 30
    started = time.monotonic()
    assert kept_plan(training_chain(1), None, "auto") and time.monotonic() - started < 2
    (note,) = capsys.readouterr().err.splitlines()
    assert "plans cannot be read from the place that FOREPLAN_PLANS names" in note
    store.files.clear_instance_cache()


@pytest.mark.slow
@pytest.mark.parametrize("count", [pytest.param(64, marks=pytest.mark.thorough), 8])
def test_many_processes_at_once_come_to_one_plan(count: int, tmp_path: Path, store: Store) -> None:
    """With a private cache each, as on as many machines. A store has no locks: several plan, and put the same bytes."""
    private = {disk_cache.VARIABLE: str(tmp_path / "private{}"), "FOREPLAN_JIT": "off"}
    assert at_once(tmp_path, os.environ[shared_plans.VARIABLE], count, **private) == [0] * count
    done = [file.read_text() for file in (tmp_path / "done").iterdir()]
    assert len(done) == count and len(set(done)) == 1
    content = store.files.cat_file(store.only())
    assert {only(tmp_path / f"private{i}").read_bytes() for i in range(count)} == {content}
