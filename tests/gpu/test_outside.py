"""What lies outside the arena: assumed near what others measured, calibrated where a calibration applies."""

from __future__ import annotations

import dataclasses

import pytest

import foreplan as fp
from foreplan.base.calibration import read_table
from foreplan.base.errors import TargetError
from foreplan.base.outside import Part
from foreplan.base.units import align_up
from foreplan.lower.outside import Use
from foreplan.runtime.cuda import lacking as module
from foreplan.runtime.cuda.calibration import CARDS, LIBRARIES, calibrations
from foreplan.runtime.cuda.code import instructions
from foreplan.runtime.cuda.device import Device, device_named
from foreplan.runtime.cuda.outside import PAGE, outside, outside_arena
from foreplan.runtime.cuda.target import CudaTarget
from tests.gpu.card import OwnTarget

H100 = device_named("h100")
ENTRY = """
[[calibrated]]
card = "NVIDIA H100 80GB HBM3"
versions = { driver = "580.105.08", cudnn = "9.19.0" }
context_bytes = 500
code_bytes = 10
cudnn_bytes = 200
cublaslt_bytes = 30
graph_bytes_per_launch = 4
"""


def table(*entries: str):
    assumed = "[assumed]\ncontext_bytes_per_thread = 2\ncode_bytes = 3\ncudnn_bytes = 5\ncublaslt_bytes = 7\n"
    assumed += "nccl_bytes = 13\nnccl_bytes_per_peer = 17\n"
    return read_table(assumed + "graph_bytes_per_launch = 11\n" + "".join(entries), "table.toml", CARDS)


def by_name(parts: tuple[Part, ...]) -> dict[str, int]:
    return {part.name: part.nbytes for part in parts}


def card(multiprocessors: int, threads: int) -> Device:
    return dataclasses.replace(
        H100, title="another", multiprocessors=multiprocessors, threads_per_multiprocessor=threads
    )


# Multiprocessors, threads of each, and MiB of a bare context as published; see calibration.toml.
@pytest.mark.parametrize(
    ("device", "published"),
    [(card(82, 1536), 256), (card(34, 1536), 107), (card(142, 1536), 426), (card(188, 1536), 555)],
    ids=["RTX 3090", "RTX 4060 Ti", "RTX 6000 Ada", "RTX PRO 6000"],
)
def test_an_assumed_context_is_near_what_was_published(device: Device, published: int) -> None:
    context = by_name(outside_arena(device, 0, 0))["context"]
    assert context / (published << 20) == pytest.approx(1, abs=0.05)


def test_an_uncalibrated_card() -> None:
    another = card(132, 2048)
    parts = outside_arena(another, 3 * PAGE - 1, 1000, ["cudnn"])
    assert [part.basis for part in parts] == ["exact", *["assumed"] * 4]
    found = by_name(parts)
    assert found["rest of the arena's last page"] == 1
    assert found["captured graph"] == 10 << 20  # 1,000 of 10 KiB, in pages
    assert found["cudnn"] == calibrations().assumed["cudnn_bytes"] and "cublaslt" not in found
    assert by_name(outside_arena(another, PAGE, 0)) == {
        "rest of the arena's last page": 0,
        "context": 528 << 20,
        "code of kernels": calibrations().assumed["code_bytes"],
        "captured graph": 0,
    }


def test_a_calibrated_card() -> None:
    known = {"driver": "580.105.08"}
    parts = outside_arena(H100, PAGE, 3, ["cublaslt", "cudnn"], known, table(ENTRY))
    assert [part.basis for part in parts] == ["exact", *["calibrated"] * 5]
    assert by_name(parts) == {
        "rest of the arena's last page": 0,
        "context": 500,
        "code of kernels": 10,
        "cudnn": 200,
        "cublaslt": 30,
        "captured graph": PAGE,
    }
    assert "driver 580.105.08, cudnn 9.19.0" in parts[1].source
    # Another driver: the same figures, which nobody measured with it. Another card: assumed.
    other = outside_arena(H100, PAGE, 3, (), {"driver": "570.1"}, table(ENTRY))
    assert by_name(other)["context"] == 500 and other[1].basis == "assumed"
    assert outside_arena(device_named("h200"), PAGE, 3, (), known, table(ENTRY))[1].basis == "assumed"


def test_the_calibration_with_the_right_versions_is_taken() -> None:
    newer = ENTRY.replace("580.105.08", "590.1").replace("500", "501")
    for versions, expected in (({}, 501), ({"driver": "580.105.08"}, 500), ({"driver": "590.1"}, 501)):
        (_, context, *_) = outside_arena(H100, 0, 0, (), versions, table(ENTRY, newer))
        assert (context.nbytes, context.basis) == (expected, "calibrated")


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        (ENTRY.replace("context_bytes = 500", ""), "needs context_bytes"),
        (ENTRY.replace("= 500", "= -1"), "needs context_bytes"),
        (ENTRY.replace("card =", "cards ="), "needs a card"),
        (ENTRY.replace('"9.19.0"', "9"), "no texts"),
        (ENTRY.replace("[[calibrated]]", "[calibrated]"), r"needs entries \[\[calibrated"),
        ("calibrated", "no table"),
    ],
)
def test_a_broken_table_is_refused(entry: str, told: str) -> None:
    with pytest.raises(TargetError, match=told):
        table(entry)


def test_the_libraries_of_a_step_are_those_that_its_kernels_name() -> None:
    graph = fp.models.build("mlp:batch=4,width=40,layers=2")
    for target, libraries in ((CudaTarget("h100"), {"cublaslt"}), (OwnTarget("h100"), set())):
        step = fp.compile(graph, target=target)
        assert {part.name for part in outside(step.program, step.plan, Use())} & set(LIBRARIES) == libraries


@pytest.mark.parametrize(("ranks", "shard", "peers"), [(1, "none", None), (4, "parameters", 3), (16, "state", 7)])
def test_what_nccl_holds_grows_with_the_cards_of_a_node(ranks: int, shard: str, peers: int | None) -> None:
    graph, assumed = fp.models.build("mlp:batch=4,width=40,layers=2"), calibrations().assumed
    options = {"ranks": ranks, "shard": shard} if ranks > 1 else {}
    step = fp.compile(graph, fp.losses.mean, fp.optim.SGD(0.1), target="cuda:h100", **options)
    found = by_name(outside(step.program, step.plan, Use()))
    assert found.get("nccl") == (None if peers is None else align_up(assumed["nccl_bytes"], PAGE))
    buffers = found.get("nccl's buffers for others")
    assert buffers == (None if peers is None else align_up(peers * assumed["nccl_bytes_per_peer"], PAGE))


def test_each_group_and_each_way_has_a_communicator() -> None:
    """The middle one of three stages, of two cards each, has four ways to others; all stages exchange their loss, and
    the two cards of each their gradients.
    """
    graph, assumed = fp.models.build("mlp:batch=4,width=40,layers=4"), calibrations().assumed
    options = {"ranks": 6, "stages": 3, "stage": 1, "accumulate": 2, "target": "cuda:h100"}
    step = fp.compile(graph, fp.losses.cross_entropy, fp.optim.SGD(0.1), **options)
    found = by_name(outside(step.program, step.plan, Use()))
    assert found["nccl"] == align_up(2 * assumed["nccl_bytes"], PAGE)
    assert found["nccl's buffers for others"] == align_up(4 * assumed["nccl_bytes_per_peer"], PAGE)


def test_both_halves_of_a_step_are_captured() -> None:
    graph = fp.models.build("mlp:batch=4,width=40,layers=2")
    step = fp.compile(graph, fp.losses.mean, fp.optim.SGD(0.1), target="cuda:h100", accumulate=2)
    assert step.update is not None
    halves = [(step.program, step.plan), (step.update.program, step.update.plan)]
    counts = [sum(1 for _ in instructions(*half, H100)) for half in halves]
    assert min(counts) > 0
    launches, (first, second) = sum(counts), halves
    figure = next(each for each in calibrations().calibrated if each.name == H100.title).figures
    for one, other in ((first, second), (second, first)):
        found = by_name(outside(*one, Use(other=other)))["captured graph"]
        assert found == -(-figure["graph_bytes_per_launch"] * launches // PAGE) * PAGE
        assert by_name(outside(*one, Use()))["captured graph"] <= found


def test_a_plan_without_cudnn_says_so_where_cudnn_would_have_been_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    narrow, wide = (
        fp.compile(fp.models.build(name), target=target, precision=precision)
        for name, target, precision in (
            ("gpt2_small:batch=1,seq=32,layers=1,width=32,heads=2,vocabulary=50", "cuda:h100", "bf16"),
            ("gpt2_small:batch=1,seq=32,layers=1,width=32,heads=2,vocabulary=50", "cuda:h100", "float32"),
        )
    )
    for reason, told in (("none here", True), ("", False)):
        monkeypatch.setattr(module, "missing", lambda reason=reason: reason)
        own = all(call.kernel == "launches" for call in narrow.program.calls if "attention" in call.op.name)
        assert bool(narrow.verdict.lacking) == (told and own)
        assert not wide.verdict.lacking  # float32 attention is foreplan's own in any case
