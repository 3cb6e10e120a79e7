"""Snapshots in PyTorch's form: the viewer's figures are those of the plan and of the replay; reading them is safe."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest

import foreplan as fp
from foreplan.base.errors import UsageError
from foreplan.report.memory import Memory
from foreplan.views.compare import Comparison
from foreplan.views.read_snapshot import read_snapshot
from foreplan.views.snapshot import eager_snapshot, plan_snapshot, snapshot_bytes
from tests.views.small import EVIL, KIB, many_lives, small

MODEL = "resnet18:batch=2,size=32"


@pytest.fixture(scope="module")
def step() -> fp.Compiled:
    return fp.compile(fp.models.build(MODEL), "cross_entropy", fp.optim.Nesterov(0.1))


def highest(snapshot: dict[str, Any]) -> int:
    """As the viewer's "Active Memory Timeline" draws it (`process_alloc_data` in MemoryViz.js)."""
    sizes: dict[int, int] = {}
    now = most = 0
    for event in snapshot["device_traces"][0]:
        if event["action"] == "alloc":
            assert event["addr"] not in sizes
            sizes[event["addr"]] = event["size"]
            now += event["size"]
        elif event["action"] == "free_completed":
            now -= sizes.pop(event["addr"])
        most = max(most, now)
    left = {
        b["address"]: b["requested_size"]
        for s in snapshot["segments"]
        for b in s["blocks"]
        if b["state"] == "active_allocated"
    }
    assert left == sizes
    return most


def check_segments(snapshot: dict[str, Any]) -> None:
    """The viewer takes the place of a block from the sizes of those before it."""
    for segment in snapshot["segments"]:
        at = segment["address"]
        for block in segment["blocks"]:
            assert block["address"] == at and block["size"] > 0
            at += block["size"]
        assert at == segment["address"] + segment["total_size"]


def test_of_a_plan(step: fp.Compiled) -> None:
    snapshot = plan_snapshot(step.memory, "resnet18")
    check_segments(snapshot)
    assert sum(segment["total_size"] for segment in snapshot["segments"]) == step.arena_bytes
    assert 0.99 * step.plan.lower_bound_bytes < highest(snapshot) <= step.plan.lower_bound_bytes
    parameters = {value.name for value in fp.models.build(MODEL).parameters}
    names = {event["frames"][0]["name"] for event in snapshot["device_traces"][0] if event["frames"]}
    assert parameters <= names


def test_a_block_says_what_it_is() -> None:
    """Worked out by hand: tests/views/small.py has the table."""
    snapshot = plan_snapshot(Memory(*many_lives()), "many lives")
    trace = snapshot["device_traces"][0]
    taken = [event for event in trace if event["action"] == "alloc"]
    assert [
        (each["frames"][0]["name"], each["frames"][0]["filename"], each["frames"][0]["line"]) for each in taken
    ] == [
        ("x", "there before the step", 0),
        ("block.a", "block.f", 0),
        ("block.b", "block.g", 2),
        ("block.a", "block.a/back", 3),
        ("c", "use", 4),
        ("d", "rest", 5),
        ("block.a", "block.f", 6),
        ("y", "end", 7),
    ]
    assert [each["time_us"] for each in taken] == [0, 0, 3, 4, 6, 7, 8, 9]
    assert [each["addr"] - taken[0]["addr"] for each in taken] == [k * KIB for k in (0, 1, 5, 1, 6, 5, 1, 6)]
    assert taken[3]["user_metadata"] == {
        "phase": "copy",
        "alive": "instructions 3 to 4; the step has 8",
        "read by": "instruction 4",
        "place": "arena, offset 1,024",
    }
    # `annotate_snapshot` of the page fails where events have categories and none of them is "unknown".
    assert {event.get("category") for event in trace} == {
        None, "segments", "inputs", "activations", "outputs", "unknown",
    }  # fmt: skip
    assert all(event["frames"] for event in trace)  # the page tells of damage where there are none
    assert snapshot["allocator_settings"]["arena bytes"] == 7 * KIB


def test_a_plan_is_plain_data_under_any_name(tmp_path: Path) -> None:
    path = tmp_path / "plan.pickle"
    path.write_bytes(snapshot_bytes(plan_snapshot(Memory(*small(evil=True)), EVIL)))
    found = read_snapshot(path)
    # The weight has an update, and is there before it.
    assert [each.name for each in found.alive if each.nbytes == 4 * KIB] == ["w (there before the step:0)"]
    assert (found.reserved, found.peak) == (17 * KIB, 17 * KIB)
    assert [each.nbytes for each in found.alive] == [8 * KIB, 4 * KIB, 3 * KIB, 2 * KIB]


def test_regions_of_any_height_lie_apart() -> None:
    step = Memory(*small(scale=1 << 20))
    segments = plan_snapshot(step, "large")["segments"]
    low, high = sorted((each["address"], each["total_size"]) for each in segments)
    assert high[1] > 8 << 30 and high[0] >= low[0] + low[1]
    assert high[0] % (1 << 33) == 0  # the last digits are the offset


def test_of_pytorchs_step(step: fp.Compiled) -> None:
    eager = step.as_pytorch(device="cuda").eager
    snapshot = eager_snapshot(eager)
    check_segments(snapshot)
    assert highest(snapshot) == max(phase.most for phase in eager.phases)
    assert sum(segment["total_size"] for segment in snapshot["segments"]) == eager.replayed[-1].reserved
    assert sum(segment["allocated_size"] for segment in snapshot["segments"]) == eager.replayed[-1].allocated


def test_what_is_written_is_read_and_compared(step: fp.Compiled, tmp_path: Path) -> None:
    eager, path = step.as_pytorch(device="cuda").eager, tmp_path / "snapshot.pickle"
    path.write_bytes(snapshot_bytes(eager_snapshot(eager)))
    found = read_snapshot(path)
    assert found.peak == max(phase.most for phase in eager.phases)
    assert found.peak < found.reserved <= eager.replayed[-1].reserved
    assert sum(each.nbytes for each in found.alive) == found.peak
    assert found.allocations == sum(
        event >= 0 and eager.memory.blocks[event].nbytes > 0 for event in eager.memory.events
    )
    comparison = Comparison(found, step.memory)
    figures = comparison.as_json()
    assert figures["reserved_bytes"] == {"pytorch": found.reserved, "plan": step.arena_bytes}
    text = str(comparison)
    assert "reserved and not allocated" in text and f"{found.allocations:,}" in text
    assert found.alive[0].name in text and step.memory.largest(1)[0].name in text


def test_a_record_that_begins_late_counts_what_was_there(tmp_path: Path) -> None:
    """1,000 bytes in 512-byte rounding were there; 600 come and go, 100 stay."""
    frames = [
        {"name": "cpp", "filename": "a.cpp", "line": 1},
        {"name": "train", "filename": "/home/me/loop.py", "line": 7},
    ]
    events = [("alloc", 4096, 600), ("free_requested", 4096, 600), ("free_completed", 4096, 600), ("alloc", 4096, 100)]
    blocks = [(0, 1024, 1000), (4096, 512, 100)]
    snapshot = {
        "segments": [
            {
                "device": 0,
                "address": 0,
                "total_size": 2 << 20,
                "allocated_size": 1536,
                "requested_size": 1100,
                "blocks": [
                    {"address": a, "size": n, "requested_size": r, "state": "active_allocated"} for a, n, r in blocks
                ],
            }
        ],
        "device_traces": [[{"action": a, "addr": n, "size": s, "frames": frames} for a, n, s in events]],
    }
    path = tmp_path / "late.pickle"
    path.write_bytes(pickle.dumps(snapshot))
    found = read_snapshot(path)
    assert (found.peak, found.reserved, found.allocations) == (1600, 2 << 20, 2)
    assert [(each.name, each.nbytes) for each in found.alive] == [
        ("(allocated before the record began)", 1000),
        ("train (loop.py:7)", 600),
    ]


class Hostile:
    def __reduce__(self) -> Any:
        return os.system, ("touch it_ran",)


@pytest.mark.parametrize("protocol", range(6))
def test_a_hostile_pickle_is_refused_before_it_runs(
    protocol: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [[Hostile()]]}, protocol=protocol))
    with pytest.raises(UsageError, match=r"snapshot\.pickle is refused: it would import (posix|nt)\.system"):
        read_snapshot(path)
    assert not Path("it_ran").exists()


@pytest.mark.parametrize("data", [b"", b"no pickle", pickle.dumps([1, 2]), pickle.dumps({"segments": 3}), b"\x80\x04("])
def test_what_is_no_snapshot_is_told(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "other.pickle"
    path.write_bytes(data)
    with pytest.raises(UsageError, match=r"other\.pickle is (no snapshot of PyTorch's memory|refused)"):
        read_snapshot(path)


def test_a_snapshot_without_a_record_says_how_to_get_one(tmp_path: Path) -> None:
    path = tmp_path / "empty.pickle"
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [[]]}))
    with pytest.raises(UsageError, match="_record_memory_history"):
        read_snapshot(path)
    with pytest.raises(UsageError, match="cannot be read"):
        read_snapshot(tmp_path / "none.pickle")
