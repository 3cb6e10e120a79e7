"""What a session would take is held against what the machine and its control groups leave."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import foreplan as fp
from foreplan.runtime import room as module
from foreplan.runtime.room import Room, room
from tests.runtime.micro_batches import compiled, data_for, perceptron
from tests.runtime.test_offload import GPT2
from tests.runtime.test_offload import compiled as offloaded

MIB, GIB = 1 << 20, 1 << 30
NONE = 9223372036854771712  # what version 1 writes for no limit


def written(root: Path, files: dict[str, str]) -> tuple[Path, Path]:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root / "proc", root / "cgroup"


def machine(available: int, swap: int = 0) -> str:
    lines = {"MemTotal": 16 * GIB, "MemFree": 1 * GIB, "MemAvailable": available, "SwapTotal": swap, "SwapFree": swap}
    return "".join(f"{name}: {nbytes // 1024:>12} kB\n" for name, nbytes in lines.items()) + "HugePages_Total: 0\n"


def v2(limit: str, used: int, cache: int = 0, **more: str) -> dict[str, str]:
    stat = f"anon {used - cache}\nfile {cache + 7}\ninactive_file {cache // 2}\nactive_file {cache - cache // 2}\n"
    return {"memory.max": f"{limit}\n", "memory.current": f"{used}\n", "memory.stat": stat, **more}


def v1(limit: int, used: int, cache: int = 0, **more: str) -> dict[str, str]:
    stat = f"inactive_file 5\ntotal_inactive_file {cache}\ntotal_active_file 0\n"
    return {"memory.limit_in_bytes": f"{limit}", "memory.usage_in_bytes": f"{used}", "memory.stat": stat, **more}


def at(folder: str, files: dict[str, str]) -> dict[str, str]:
    return {f"cgroup/{folder}/{name}": text for name, text in files.items()}


MACHINE = {"proc/meminfo": machine(8 * GIB)}
IN_V2, IN_V1 = {"proc/self/cgroup": "0::/a/b\n"}, {"proc/self/cgroup": "5:cpu,memory:/a/b\n4:pids:/\n0::/\n"}


@pytest.mark.parametrize(
    ("files", "nbytes", "source"),
    [
        (MACHINE, 8 * GIB, "meminfo"),
        ({"proc/meminfo": machine(8 * GIB, swap=2 * GIB)}, 10 * GIB, "meminfo"),
        ({**MACHINE, **IN_V2, **at("a/b", v2("max", GIB))}, 8 * GIB, "meminfo"),
        ({**MACHINE, **IN_V2, **at("a/b", v2(str(4 * GIB), GIB))}, 3 * GIB, "a/b/memory.max"),
        # What holds copies of files is no obstacle.
        ({**MACHINE, **IN_V2, **at("a/b", v2(str(4 * GIB), 3 * GIB, 2 * GIB))}, 3 * GIB, "a/b/memory.max"),
        # The one around it is tighter, and so is the root of what a container sees.
        ({**MACHINE, **IN_V2, **at("a/b", v2("max", 0)), **at("a", v2(str(2 * GIB), GIB))}, GIB, "a/memory.max"),
        ({**MACHINE, "proc/self/cgroup": "0::/\n", **at(".", v2(str(2 * GIB), GIB))}, GIB, "memory.max"),
        ({**MACHINE, "proc/self/cgroup": "0::/../../x\n", **at(".", v2(str(GIB), 0))}, GIB, "memory.max"),
        ({**MACHINE, **IN_V2, **at("a/b", v2(str(GIB), 2 * GIB))}, 0, "memory.max"),
        # Swap counts as far as the group may take it.
        (
            {"proc/meminfo": machine(8 * GIB, 4 * GIB), **IN_V2,
             **at("a/b", v2(str(GIB), 0, **{"memory.swap.max": f"{3 * GIB}", "memory.swap.current": f"{GIB}"}))},
            3 * GIB, "memory.max",
        ),
        (
            {"proc/meminfo": machine(8 * GIB, 4 * GIB), **IN_V2,
             **at("a/b", v2(str(GIB), 0, **{"memory.swap.max": "0", "memory.swap.current": "0"}))},
            GIB, "memory.max",
        ),
        ({**MACHINE, **IN_V1, **at("memory/a/b", v1(4 * GIB, GIB))}, 3 * GIB, "limit_in_bytes"),
        ({**MACHINE, **IN_V1, **at("memory/a/b", v1(NONE, GIB))}, 8 * GIB, "meminfo"),
        ({**MACHINE, **IN_V1, **at("memory/a", v1(4 * GIB, 4 * GIB, GIB))}, GIB, "limit_in_bytes"),
        ({**MACHINE, **IN_V1, **at("memory", v1(4 * GIB, 3 * GIB))}, GIB, "limit_in_bytes"),
        (
            {"proc/meminfo": machine(8 * GIB, 4 * GIB), **IN_V1,
             **at("memory/a/b", v1(GIB, 0, **{"memory.memsw.limit_in_bytes": f"{2 * GIB}"}))},
            2 * GIB, "limit_in_bytes",
        ),
        # Version 2 beside version 1, as this is mounted where both are used.
        ({**MACHINE, "proc/self/cgroup": "0::/x\n", **at("unified/x", v2(str(GIB), 0))}, GIB, "unified/x"),
        ({**IN_V2, **at("a/b", v2(str(GIB), 0))}, GIB, "memory.max"),
        ({**MACHINE, **IN_V2, **at("a/b", v2("nonsense", 0))}, 8 * GIB, "meminfo"),
        ({**MACHINE, "proc/self/cgroup": "\n:\n0\n"}, 8 * GIB, "meminfo"),
    ],
)  # fmt: skip
def test_room_is_the_least_of_all_limits(files: dict[str, str], nbytes: int, source: str, tmp_path: Path) -> None:
    found = room(*written(tmp_path, files))
    assert found is not None and found.nbytes == nbytes and source in found.source


def test_where_nothing_is_told_anything_goes(tmp_path: Path) -> None:
    assert room(tmp_path / "proc", tmp_path / "cgroup") is None
    assert room(*written(tmp_path, {"proc/meminfo": "\x00", "proc/self/cgroup": "0::/\n"})) is None


def test_this_machine_tells() -> None:
    found = room()
    assert found is not None and 0 < found.nbytes < found.total


@pytest.mark.parametrize("target", ["numpy", "cpu:threads=1"])
def test_an_arena_beyond_the_room_is_refused_with_both_figures(monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    step = compiled(perceptron(8), target=target)
    monkeypatch.setattr(module, "room", lambda: Room(step.arena_bytes - 1, GIB, "a test"))
    with pytest.raises(
        fp.DoesNotFitError, match=r"takes .*KiB.*KiB of 1\.00 GiB are available \(a test\).*--budget"
    ) as e:
        step.bind()
    assert (e.value.needed, e.value.capacity, e.value.exit_code) == (step.arena_bytes, step.arena_bytes - 1, 3)
    monkeypatch.setattr(module, "room", lambda: Room(step.arena_bytes, GIB, "a test"))
    session = step.bind()
    # What it shares is there already.
    examiner = fp.compile(perceptron(8), target=target)
    monkeypatch.setattr(module, "room", lambda: Room(2048, GIB, "a test"))
    assert examiner.bind(share=session).step({"x": data_for(step, 0)["x"]}).outputs


def test_host_memory_of_offload_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    step = offloaded(GPT2, offload=True, budget=0.7, remat="off")
    assert step.host_bytes
    needed = step.arena_bytes + step.host_bytes
    monkeypatch.setattr(module, "room", lambda: Room(needed - 1, GIB, "a test"))
    with pytest.raises(fp.DoesNotFitError) as error:
        step.bind()
    assert error.value.needed == needed


def test_a_process_that_asks_for_more_than_there_is_lives(tmp_path: Path) -> None:
    found = room()
    assert found is not None
    width = int((2 * found.nbytes / 4) ** 0.5)  # a layer of width × width float32 is twice the room
    code = f"""
import foreplan as fp
graph = fp.trace(lambda x: fp.nn.linear(x, {width}, name="huge"), fp.spec((1, {width})))
try:
    fp.compile(graph).bind()
except fp.DoesNotFitError as error:
    print("refused", error.needed > error.capacity, error.exit_code)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "refused True 3\n"), done.stderr
