"""What holds for every test."""

from __future__ import annotations

import gc
import os
import random
import shutil
import tempfile
import time
from collections.abc import Iterator

import pytest
from hypothesis.internal.conjecture import providers
from threadpoolctl import threadpool_limits

from foreplan.compiler import kept_plans
from foreplan.lower import targets
from foreplan.passes import pipeline
from foreplan.planner.effort import USUAL
from tests import processor_time
from tests.profile import PROFILE, SECONDS, SEED, SHORT, Profile, pick, searching_by

BEGUN = time.monotonic()


def pytest_configure(config: pytest.Config) -> None:
    """Watch the processor time of each test, in which no thread waits for another by turning: on a busy machine that
    took sixty times as long. And Hypothesis takes constants from whatever modules a process has loaded,
    so that a test's draws depend on which tests ran before it; here they depend on its seed alone.
    """
    for name, value in (("OMP_NUM_THREADS", "1"), ("OPENBLAS_NUM_THREADS", "1"), ("OMP_WAIT_POLICY", "passive")):
        os.environ.setdefault(name, value)
    if "PYTHONDONTWRITEBYTECODE" in os.environ:
        keep_byte_code(config)
    config.pluginmanager.register(processor_time.plugin())
    processor_time.leave_compilation_out()
    if hasattr(providers, "_get_local_constants"):
        providers._get_local_constants = lambda: providers._local_constants


def keep_byte_code(config: pytest.Config) -> None:
    """Where Python may not write beside the sources, processes that tests start read byte code of a folder of this run:
    each would else compile a thousand modules again.
    """
    folder = tempfile.mkdtemp(prefix="byte-code-")
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    os.environ["PYTHONPYCACHEPREFIX"] = folder
    del os.environ["PYTHONDONTWRITEBYTECODE"]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """The garbage collector neither runs meanwhile nor looks later at what is made here, which stays to the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what the profile does not ask for; and draw the order of files, if a seed is given."""
    least = {"slow": Profile.USUAL, "thorough": Profile.ALL}
    left = [item for item in items if any(least.get(mark.name, PROFILE) > PROFILE for mark in item.iter_markers())]
    if left:
        dropped = set(left)
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in dropped]
    if SEED is not None:
        files = sorted({item.path for item in items})
        random.Random(SEED).shuffle(files)
        place = {path: at for at, path in enumerate(files)}
        items.sort(key=lambda item: place[item.path])


def pytest_runtest_setup(item: pytest.Item) -> None:
    """After the time of this run nothing begins."""
    if time.monotonic() - BEGUN > SECONDS:
        pytest.skip(f"the {SECONDS:.0f} seconds of FOREPLAN_TESTS_SECONDS are over")


@pytest.fixture(scope="session", autouse=True)
def short_searches() -> Iterator[None]:
    """Plans within budgets are found in a tenth of the time; most tests ask no more of them than to be right."""
    with searching_by(SHORT):
        yield


@pytest.fixture(scope="session", autouse=True)
def plans_are_the_same_on_every_machine() -> Iterator[None]:
    """What names no target is for numpy, whose plans depend on no processor; other processes have the usual default."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(targets, "resolved", lambda target: "numpy" if target == targets.AUTO else target)
        yield


@pytest.fixture(scope="session", autouse=True)
def one_thread_on_every_machine() -> Iterator[None]:
    """A target that names no number of threads has one, or two where all is tested; NumPy's products have one."""
    from foreplan.runtime.cpu import engine, target
    from foreplan.runtime.numpy import engine as numpy_engine

    with pytest.MonkeyPatch.context() as patch, threadpool_limits(1):
        patch.setattr(target, "cores", lambda: pick(1, 1, 2))
        for module in (engine, numpy_engine):
            patch.setattr(module, "limit_threads", lambda count: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def every_plan_is_found() -> Iterator[None]:
    """No test takes a plan from disk that an earlier run has found, but those of this alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept_plans, "in_use", False)
        yield


@pytest.fixture(scope="session", autouse=True)
def passes_hold_what_they_say() -> Iterator[None]:
    """What passes require and ensure is checked, whatever is compiled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "checked", True)
        yield


@pytest.fixture(autouse=True)
def whole_searches(request: pytest.FixtureRequest) -> Iterator[None]:
    """Where a test is marked `whole_search`."""
    with searching_by(USUAL if request.node.get_closest_marker("whole_search") else SHORT):
        yield


@pytest.fixture
def own_garbage() -> None:
    """The garbage collector looks at what the test itself makes, and not at all that the tests before it have left."""
    gc.freeze()


@pytest.fixture
def compiled_ahead(request: pytest.FixtureRequest) -> None:
    """What the test launches on the card that is not there is compiled, together with what tests behind it do."""
    from tests.gpu.ahead import compile_ahead

    compile_ahead(request.node)


@pytest.fixture(scope="session", autouse=True)
def nobodys_settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The user's own settings change no result, and are not changed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("settings")))
        patch.delenv("FOREPLAN_PLANS", raising=False)
        yield
