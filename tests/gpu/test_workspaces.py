"""The workspaces that cuDNN chooses in PyTorch's step, without a card: beside what an H100 had, and what cuDNN says."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import foreplan as fp
from foreplan.base.errors import TargetError
from foreplan.eager import Eager, Variant, Workspaces, as_pytorch
from foreplan.graph import Op, TensorType, Window
from foreplan.graph.types import tensor_type
from foreplan.ops.conv.ops import Conv, ConvDataGrad, ConvWeightGrad
from foreplan.runtime.cuda import workspaces
from foreplan.runtime.cuda.device import device_named
from foreplan.runtime.cuda.libraries import cudnn, cudnn_conv_plans
from foreplan.runtime.cuda.libraries.cudnn import library
from foreplan.runtime.cuda.workspaces import asked, winograd_bytes
from tests.cli.shell import answer, foreplan
from tests.eager.card import MIB, of_card, steps
from tests.gpu.check import asking_anew, with_cudnn
from tests.test_outputs import MADE

PAGE = Path(__file__).resolve().parents[2] / "docs" / "beside-pytorch.md"
SAME = ((1, 1), ((1, 1), (1, 1)), (1, 1))  # strides, pads and dilations of 3 x 3 taps that keep the extent
CHAIN = ("estimate", "conv_chain", "--loss", "mean", "--target")


nothing_kept = asking_anew(workspaces._told)


def on_h100(name: str, loss: str) -> Eager:
    """A step as it was measured: with Nesterov momentum, and without TensorFloat-32."""
    found = Workspaces(None, asked("cuda:h100", False))
    return as_pytorch(fp.models.build(name), loss, fp.optim.Nesterov(1e-4), Variant(tf32="off"), True, workspaces=found)


@with_cudnn
def test_the_chain_takes_what_it_took_on_an_h100() -> None:
    """To the byte of what is reserved, at each phase. 4 MiB more than is counted are alive there from the first forward
    pass on, which no workspace explains.
    """
    found, more = on_h100("conv_chain", "mse"), 4
    for phase, mine, theirs in zip(found.phases, found.replayed, steps(of_card(model="conv_chain")), strict=True):
        assert mine.reserved / MIB == theirs["reserved"], phase
        if phase.name == "backward":
            assert mine.allocated / MIB + more == pytest.approx(theirs["live"], abs=0.01)
            assert mine.most_allocated / MIB + more == pytest.approx(theirs["most_live"], abs=0.01)


@with_cudnn
@pytest.mark.parametrize(
    "case",
    [
        "conv_chain",
        "unet:batch=4,size=256",
        "resnet50:batch=32",
        "torchvision resnet101:batch=20",
        "torchvision mobilenet_v2:batch=32",
    ],
)
def test_peaks_are_those_of_an_h100(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the last step, and as the page has them; but for the 65 MiB of cuBLAS, which the chain does not call."""
    loss, cublas = ("mse", 0) if case == "conv_chain" else ("cross_entropy", 65)
    counted = on_h100(case.removeprefix("torchvision "), loss).replayed[-2]
    monkeypatch.setattr(workspaces, "winograd_bytes", lambda op, inputs: None)
    without = on_h100(case.removeprefix("torchvision "), loss).replayed[-2]
    theirs = steps(of_card(model=case))[-2]
    assert counted.most_allocated / MIB + cublas == pytest.approx(theirs["most_live"], rel=0.004)
    ours = [each / MIB + cublas for each in (counted.most_allocated, without.most_allocated, counted.reserved)]
    figures = (theirs["most_live"], ours[0], ours[1], theirs["reserved"], ours[2])
    page = PAGE.read_text()
    if f"cuDNN {library().version}" in page:
        assert "| " + " | ".join(f"{figure:,.0f}" for figure in figures) + " |" in page


def triple(x: str, w: str, y: str, extent: int) -> list[tuple[Op, list[TensorType], TensorType]]:
    """A convolution of 3 x 3 taps and its two gradients."""
    a, b, c = map(tensor_type, (x, w, y))
    return [
        (Conv(*SAME), [a, b], c),
        (ConvDataGrad(*SAME, spatial=(extent, extent)), [c, b], a),
        (ConvWeightGrad(*SAME, kernel=(3, 3)), [a, c], b),
    ]


@with_cudnn
@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("card", ["h100", "t4"])
def test_the_first_choice_is_what_cudnn_builds_for_pytorchs_filters(card: str, tf32: bool) -> None:
    """Engines that convert their inputs to a narrower type are left out, and those on tensor cores without TF32."""
    device, module = device_named(card), library().module
    for op, inputs, y in triple("float32[8,32,56,56]", "float32[48,32,3,3]", "float32[8,48,56,56]", 56):
        for limit in (None, MIB, 0):
            windows = [Window.dense(type) for type in (*inputs, y)]
            question = cudnn_conv_plans._question(op, windows[:2], windows[2:], False, ())
            assert question is not None
            graph = cudnn_conv_plans._graph(question, device)
            graph.validate()
            graph.build_operation_graph()
            graph.create_execution_plans([module.heur_mode.A, module.heur_mode.FALLBACK])
            notes = module.numerical_note
            graph.deselect_numeric_notes([notes.DOWN_CONVERT_INPUTS, *([] if tf32 else [notes.TENSOR_CORE])])
            if limit is not None:
                graph.deselect_workspace_greater_than(limit)
            graph.check_support()
            graph.build_plans(module.build_plan_policy.HEURISTICS_CHOICE)
            told = int(graph.get_workspace_size())
            most = cudnn.bounded(told, bytes(graph.serialize()), device)
            if limit is None or most <= limit:  # else it takes more on a card than it tells
                assert asked(f"cuda:{card}", tf32).workspace(op, inputs, y, limit) == most


@with_cudnn
def test_what_cudnn_says_nothing_of_without_a_card() -> None:
    """It names no engine with the workspace that was taken on one. If it does one day, there is nothing to assume."""
    x, w, y = "float32[1,256,1024,1024]", "float32[128,256,3,3]", "float32[1,128,1024,1024]"
    op, inputs, weights = triple(x, w, y, 1024)[2]
    strict, rounded = asked("cuda:h100", False), asked("cuda:h100", True)
    wanted = winograd_bytes(op, inputs)
    assert wanted == 36 * 4 * (256 * 256 * (256 + 128) + 256 * 128)
    windows = [Window.dense(type) for type in inputs]
    plans = cudnn_conv_plans.choices(op, windows, Window.dense(weights), strict.device, tf32=False)
    assert wanted not in [plan.workspace for plan in plans]
    assert strict.workspace(op, inputs, weights, None) == wanted
    assert strict.workspace(op, inputs, weights, 64 * MIB) != wanted
    assert rounded.workspace(op, inputs, weights, None) != wanted
    assert asked("cuda:t4", True).workspace(op, inputs, weights, None) == wanted  # which has no TensorFloat-32


@with_cudnn
def test_the_question_that_began_it() -> None:
    figures = answer(*CHAIN, "cuda:t4", "--as", "pytorch")["pytorch"]
    phases = {(row["phase"], row["iteration"]): row for row in figures["phases"]}
    assert phases["forward", 1]["most"] // MIB == 2049 and phases["backward", 1]["most"] // MIB == 6027
    assert figures["largest_workspace"]["bytes"] == 3628597248
    assert f"cuDNN {library().version} for Tesla T4" in figures["notes"][0] and "Winograd" in figures["notes"][0]
    capped = answer(*CHAIN, "cuda:t4", "--as", "pytorch:workspace=64MiB")["pytorch"]
    assert capped["peak_bytes"] // MIB < 2600 and capped["largest_workspace"]["bytes"] <= 64 * MIB
    assert "Winograd" not in capped["notes"][0] and "within 64.00 MiB" in capped["notes"][0]
    rounded = answer(*CHAIN, "cuda:h100", "--as", "pytorch")["pytorch"]
    assert "with TensorFloat-32 they were not compared" in rounded["notes"][0]


@with_cudnn
@pytest.mark.whole_search  # as the commands do
def test_the_outputs_on_the_page() -> None:
    """Those of commands that ask cuDNN, which its version is in."""
    blocks = [block for block in PAGE.read_text().split("```text\n")[1:] if block.startswith("$ foreplan")]
    assert len(blocks) == 2
    for block in blocks:
        command, _, rest = block.partition("```")[0].partition("\n")
        arguments = command.removeprefix("$ foreplan ").split()
        printed = foreplan(*arguments).stdout
        if MADE["ONCE"] in printed:  # the first in this process had to compile the planner, and says so
            printed = foreplan(*arguments).stdout
        if f"cuDNN {library().version}" not in rest:
            pytest.skip(f"the page is of another version than {library().version}")
        assert MADE["masked"](rest) == MADE["masked"](printed)


def test_without_cudnn_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cudnn", None)
    library.cache_clear()
    try:
        with pytest.raises(TargetError, match="make setup-cuda"):
            asked("cuda:t4", True)
        step = fp.compile(fp.models.build("conv_chain:size=64"), "mean", fp.optim.SGD(0.1), target="cuda:t4")
        eager = step.as_pytorch().eager
        assert eager.largest_workspace is None
        assert "not counted" in eager.notes[0] and "make setup-cuda" in eager.notes[0]
        assert step.as_pytorch(workspace="1MiB").eager.largest_workspace is not None
    finally:
        library.cache_clear()
