"""Snapshots in PyTorch's form: the viewer's figures are those of the plan and of the replay; reading them is safe."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest

import foreplan as fp
from foreplan.errors import UsageError
from foreplan.views.compare import Comparison
from foreplan.views.read_snapshot import read_snapshot
from foreplan.views.snapshot import eager_snapshot, plan_snapshot, snapshot_bytes

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
    snapshot = plan_snapshot(step.memory)
    check_segments(snapshot)
    assert sum(segment["total_size"] for segment in snapshot["segments"]) == step.arena_bytes
    assert 0.99 * step.plan.lower_bound_bytes < highest(snapshot) <= step.plan.lower_bound_bytes
    parameters = {value.name for value in fp.models.build(MODEL).parameters}
    names = {event["frames"][0]["name"] for event in snapshot["device_traces"][0] if event["frames"]}
    assert parameters <= names


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
