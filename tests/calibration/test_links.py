"""Links between ranks are measured: every figure is found back where exchanges take what the figures say."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from foreplan.base.calibration import read_entries, record
from foreplan.base.errors import TargetError
from foreplan.calibration import links as module
from foreplan.calibration.links import GLOO, LARGE, MEMORY, SMALL, calibrate_link
from foreplan.lower.links import LINKS

RATE, TOGETHER, HOP = 8_000_000_000, 24_000_000_000, 7_000


def pretended(link: str, ranks: int) -> dict[str, Any]:
    """Ranks as the figures have them: each reaches a rate, all together no more than another."""
    rate = min(RATE, TOGETHER / ranks)
    seconds = {nbytes: HOP / 1e9 + (nbytes - SMALL) * (ranks - 1) / ranks / rate for nbytes in (SMALL, LARGE)}
    return {"library": "a library", "ranks": ranks, "seconds": {str(key): value for key, value in seconds.items()}}


@pytest.mark.parametrize(("cores", "together"), [(1, 2 * RATE), (2, 2 * RATE), (6, TOGETHER), (64, TOGETHER)])
def test_every_figure_is_found_back(cores: int, together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_job", pretended)
    monkeypatch.setattr(module, "cores", lambda: cores)
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: name)
    found = calibrate_link(MEMORY)
    assert (found.kind, found.name, found.versions["library"]) == (LINKS, MEMORY, "a library")
    assert list(found.figures.values()) == pytest.approx([RATE, together, HOP], rel=1e-3)


def test_what_is_missing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for link, package in ((MEMORY, "mpi4py"), (GLOO, "torch")):
        with monkeypatch.context() as patch:
            patch.setattr(module.importlib.util, "find_spec", lambda _: None)
            with pytest.raises(TargetError, match=f"{package} is not installed: pip install 'foreplan"):
                calibrate_link(link)


def test_ranks_that_fail_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the last words of theirs, or of the launcher's, which may stand in a frame."""
    code = "import sys; sys.exit('OSError: no way' + chr(10) + '-' * 70)"
    monkeypatch.setattr(module, "start", lambda link, ranks: [sys.executable, "-c", code, "x"])
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: name)
    with pytest.raises(TargetError, match="2 ranks could not be measured: OSError: no way"):
        calibrate_link(GLOO)


def test_ranks_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are measured and written, and read back; a machine reaches between 10 MB/s and 1 TB/s."""
    pytest.importorskip("mpi4py", reason="mpi4py is not installed: pip install 'foreplan[mpi]'")
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    if shutil.which("mpiexec") is None:
        pytest.skip("no MPI launcher is installed: pip install 'foreplan[mpi]'")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(module, "cores", lambda: 2)
    found = calibrate_link(MEMORY)
    assert read_entries(record(found).read_text(), "the file", LINKS) == (found,)
    rate, together, hop = found.figures.values()
    assert 10**7 < rate <= together < 10**12 and 100 < hop < 10**8
