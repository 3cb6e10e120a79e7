"""Hostile files take no more time and memory than the rule of their format says, and raise errors of foreplan's."""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.connection
import pickle
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import foreplan as fp
from foreplan.base.units import format_bytes
from foreplan.base.untrusted import ANY, LEAST_BYTES, LEAST_SECONDS, RULES
from foreplan.cli.data import read_arrays, samples_in
from foreplan.planner import read_intervals
from foreplan.runtime.adapters import _read_config
from foreplan.runtime.cuda.device import device_named
from foreplan.views.read_snapshot import read_snapshot
from tests.base.hostile_files import LARGE, NODE, ROOM, WRITERS, save

SECONDS = 60  # of processor time, at which a reader is ended


@cache
def step() -> fp.Compiled:
    model = fp.models.build("mlp:batch=2,width=4,layers=2,inputs=6,classes=3")
    return fp.compile(model, fp.losses.cross_entropy, fp.optim.SGD(0.1), target="numpy")


def read_data(path: Path) -> None:
    arrays = read_arrays(str(path))
    samples_in(step().program, arrays, str(path))


READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "snapshot": ("a.pickle", read_snapshot),
    "data": ("a.npz", read_data),
    "adapters": ("adapter_config.json", lambda path: _read_config(str(path)).scale("a.b", 1)),
    "checkpoint": ("a.safetensors", lambda path: step().bind().load(path)),
    "plan": ("a.plan", fp.load_plan),
    "CSV": ("a.csv", read_intervals),
    "TOML": ("a.toml", lambda path: device_named(str(path))),
    "ONNX": ("a.onnx", fp.from_onnx),
}


def measured(read: Callable[[], object]) -> tuple[float, int, str]:
    """Processor seconds, bytes of memory more at the peak, and what was raised, in a process of its own."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_measure, args=(read, theirs))
    process.start()
    theirs.close()
    try:
        found: tuple[float, int, str] = ours.recv()
    except EOFError:
        process.join()
        found = SECONDS, 0, f"ended by signal {-(process.exitcode or 0)}"
    process.join()
    return found


def _measure(read: Callable[[], object], pipe: multiprocessing.connection.Connection) -> None:
    signal.setitimer(signal.ITIMER_PROF, SECONDS)  # which ends the process
    gc.freeze()  # what the parent has made, which a collection here would go through, and copy page by page
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, start, said = _peak(), time.process_time(), "nothing"
    try:
        read()
    except fp.ForeplanError as error:
        said = f"refused: {error}"
    except BaseException as error:
        said = f"raw: {type(error).__name__}: {error}"
    pipe.send((time.process_time() - start, _peak() - before, said))


def _peak() -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


SIZE = 48 << 10  # bytes of the files, about
CASES = [(format, name) for format, writers in WRITERS.items() for name in writers]


LONG = {"functions_that_call_two", "known_products"}  # which take the most of what they may


@pytest.mark.parametrize(
    ("format", "name"), [pytest.param(*case, marks=[pytest.mark.thorough] * (case[1] in LONG)) for case in CASES]
)
def test_a_hostile_file_takes_no_more_than_its_format_may(format: str, name: str, tmp_path: Path) -> None:
    step()
    file, read = READERS[format]
    WRITERS[format][name](tmp_path / file, SIZE)
    size = (tmp_path / file).stat().st_size
    seconds, nbytes, said = measured(lambda: read(tmp_path / file))
    assert not said.startswith(("raw", "ended")), said
    assert seconds <= RULES[format].processor_seconds(size)
    assert nbytes <= RULES[format].nbytes(size)


@pytest.mark.thorough
@pytest.mark.parametrize(("format", "name"), CASES)
def test_twice_the_file_takes_no_more_than_twice_the_time(format: str, name: str, tmp_path: Path) -> None:
    """Three times, since processors are not that even."""
    step()
    file, read = READERS[format]
    seconds = []
    for size in (1 << 20, 1 << 21):
        WRITERS[format][name](tmp_path / file, size)
        seconds.append(measured(lambda: read(tmp_path / file))[0])
    assert seconds[1] <= 3 * seconds[0] + 0.5


def test_each_format_has_a_row_on_the_page_that_says_who_is_trusted() -> None:
    page = (Path(__file__).parents[2] / "docs" / "trust.md").read_text()
    (least,) = re.findall(r"Every file may take\s+(\d+) MiB of memory and (\d+) seconds of processor time", page)
    assert (int(least[0]) << 20, int(least[1])) == (LEAST_BYTES, LEAST_SECONDS)
    found = re.findall(r"^\| ([\w ]+) \| ([\w. ]+) \| ([\d,]+) \| ([\d.]+) \|", page, re.MULTILINE)
    stated = {name: (largest, int(times.replace(",", "")), float(seconds)) for name, largest, times, seconds in found}
    rules = {
        name: ("any" if rule.largest == ANY else format_bytes(rule.largest), rule.times, rule.seconds)
        for name, rule in RULES.items()
    }
    assert stated == rules


@pytest.mark.parametrize("format", RULES)
def test_a_file_that_is_too_large_is_refused_unread(format: str, tmp_path: Path) -> None:
    largest = RULES[format].largest
    if format in READERS and largest < ANY:
        file, read = READERS[format]
        with open(tmp_path / file, "wb") as made:
            made.truncate(largest + 1)
        if largest < 1 << 25:  # a larger one would be read, which takes its time
            with pytest.raises(fp.ForeplanError, match=f"more than {re.escape(format_bytes(largest))}"):
                read(tmp_path / file)


def test_what_is_computed_at_import_and_too_much_stays_in_the_graph(tmp_path: Path) -> None:
    """And means the same there."""
    import onnxruntime

    count = 400  # of a MiB each
    nodes = [LARGE, *(NODE("Add", [f"c{i}", "one"], [f"c{i + 1}"]) for i in range(count))]
    nodes += [NODE("ReduceMax", [f"c{count}"], ["t"], keepdims=0), NODE("Cast", ["t"], ["u"], to=1)]
    save(tmp_path / "a.onnx", [*nodes, NODE("Add", ["x", "u"], ["y"])], {**ROOM, "one": np.array([1])})
    graph = fp.from_onnx(tmp_path / "a.onnx")
    assert 100 < len(graph.nodes) < count
    x = np.ones(2, np.float32)
    (expected,) = onnxruntime.InferenceSession(tmp_path / "a.onnx").run(None, {"x": x})
    outputs = fp.compile(graph, target="numpy").bind().step({"x": x}).outputs
    np.testing.assert_array_equal(outputs["y"], expected)


SLOW = """
import signal, sys, traceback
from foreplan.cli import main

def alarm(number, frame):
    # While modules are imported, Python itself may lose a Ctrl-C: in the callbacks of weak references.
    if any(each.filename.endswith("plain_pickle.py") for each in traceback.extract_stack(frame)):
        signal.raise_signal(signal.SIGINT)
    else:
        signal.setitimer(signal.ITIMER_REAL, 0.02)

signal.signal(signal.SIGINT, signal.default_int_handler)  # which is ignored where tests run in the background
signal.signal(signal.SIGALRM, alarm)
signal.setitimer(signal.ITIMER_REAL, 0.5)
sys.argv = ["foreplan", "compare", sys.argv[1], "mlp:width=8,layers=1,batch=2"]
main()
"""


def test_a_snapshot_that_is_read_can_be_interrupted(tmp_path: Path) -> None:
    """A large one, by Ctrl-C."""
    event = pickle.dumps({"action": "alloc", "addr": 1, "size": 1, "frames": []}, protocol=2)[2:-1]
    (tmp_path / "a.pickle").write_bytes(b"\x80\x02}X\x0d\x00\x00\x00device_traces](](" + event * 1_000_000)
    done = subprocess.run([sys.executable, "-c", SLOW, tmp_path / "a.pickle"], capture_output=True, text=True)
    assert done.returncode == 130 and "Traceback" not in done.stderr, (done.returncode, done.stderr)
