"""cuDNN's plans as kernels: which the plan of a step chooses, and what of them is in its file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import foreplan as fp
from foreplan.frontend import nn
from foreplan.gpu import cudnn_conv, table
from foreplan.gpu.cudnn import ADDING, BETA, workspace_of
from foreplan.gpu.launch import Execute, Refused
from foreplan.graph import Graph, Op, TensorType, Window
from foreplan.graph.layouts import channels_last
from foreplan.lower.cuda import CudaTarget
from foreplan.ops.conv import Conv, ConvDataGrad, ConvWeightGrad
from tests.gpu.binder import Bound, needs_gcc
from tests.gpu.check import Memory, expected, laid_out, type_of, with_cudnn
from tests.gpu.cudnn_graph import written_by_cudnn

SAME = ((1, 1), ((1, 1), (1, 1)), (1, 1))  # strides, pads and dilations of 3 x 3 taps that keep the extent
RNG = np.random.default_rng(0)


def model() -> Graph:
    """Two convolutions with bias, wide enough for engines of several workspaces."""

    def two(x: Any) -> Any:
        return nn.conv(nn.relu(nn.conv(x, 128, 3, padding=1, name="first")), 64, 3, padding=1, name="second")

    return fp.trace(two, fp.spec((1, 256, 256, 256)))


def compiled(**options: Any) -> fp.Compiled:
    return fp.compile(model(), fp.losses.mse, fp.optim.SGD(0.1), target="cuda:h100", **options)


def convolutions(step: fp.Compiled) -> list[tuple[str, int]]:
    """Kernels and workspaces of what the plan runs, in the order of its steps."""
    program = step.program
    found = [(program.calls[s.action], program.actions[s.action]) for s in step.plan.steps]
    return [(call.kernel, action.workspace) for call, action in found if call.op.name.startswith("conv")]


@with_cudnn
def test_convolutions_run_by_cudnn_within_the_cap() -> None:
    free, capped, least = (convolutions(compiled(workspace=size)) for size in ("unlimited", "8MiB", 0))
    for found in (free, capped, least):
        assert len(found) == 5 and all(name.startswith("cudnn ") for name, _ in found)
    assert max(nbytes for _, nbytes in capped) <= 8 << 20 < max(nbytes for _, nbytes in free)
    assert max(nbytes for _, nbytes in least) == 0


@with_cudnn
def test_what_is_chosen_is_in_the_file_and_needs_no_cudnn_to_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = compiled()
    step.save(tmp_path / "step.plan")
    table._ways.cache_clear()
    monkeypatch.setattr(cudnn_conv, "missing", lambda: "it is not there")
    read = fp.load_plan(tmp_path / "step.plan")
    assert read.plan == step.plan
    for s in step.plan.steps:
        assert read.program.calls[s.action].payload == step.program.calls[s.action].payload
    target = CudaTarget("h100")
    for call in (read.program.calls[s.action] for s in read.plan.steps):
        if call.payload:
            windows = [[x.window for x in operands] for operands in (call.inputs, call.outputs)]
            kernel = table.kernel_named(call.op, call.kernel, call.payload, *windows, target.device)
            assert kernel is not None and isinstance(kernel.instructions[0], Execute)
            assert kernel.instructions[0].blob == call.payload[cudnn_conv.WORD :]
    table._ways.cache_clear()


@with_cudnn
def test_cudnn_adds_its_result_in_place() -> None:
    """Of a gradient that is added to another: cuDNN's own beta, as cuDNN reads it back, and no memory for a result."""

    def model(x: Any) -> Any:
        y = nn.conv(x, 64, 3, padding=1, name="stem")
        return nn.conv(y, 64, 3, padding=1, name="a") + nn.conv(y, 64, 3, padding=1, name="b")

    graph = fp.trace(model, fp.spec((2, 64, 32, 32)))
    program = fp.compile(graph, fp.losses.mse, fp.optim.SGD(0.1), target="cuda:h100").program
    calls = [
        (call, action)
        for call, action in zip(program.calls, program.actions)
        if call.op.name == "conv_data_grad" and call.payload
    ]
    added = [each for each in calls if len(each[0].inputs) == 3]
    assert 0 < len(added) < len(calls)
    for call, action in calls:
        blob = call.payload[cudnn_conv.WORD :]
        (node,) = written_by_cudnn(blob)["operationGraph"]["nodes"]
        assert (node["alpha"], node["beta"]) == (1, len(call.inputs) == 3 or 0)
        assert action.workspace == workspace_of(blob, CudaTarget("h100").device)
    assert all(action.overwrites for _, action in added)
    assert min(action.workspace for _, action in added) < added[0][0].outputs[0].type.nbytes


@needs_gcc
@pytest.mark.parametrize("op", [Conv(*SAME), ConvDataGrad(*SAME, spatial=(7, 9))])
def test_weights_that_are_a_range_of_channels_are_copied(op: Op) -> None:
    """cuDNN has no engine for weights with gaps."""
    x, w = f32(2, 5 if isinstance(op, Conv) else 6, 7, 9), f32(6, 5, 3, 3)
    steps = type_of(w).strides
    inputs = [channels_last(type_of(x)), Window(type_of(w), (steps[0] * 2, *steps[1:]))]
    (result,) = op.infer([each.type for each in inputs])
    y = channels_last(result)
    kernel = cudnn_conv.cudnn_kernel(op, (512).to_bytes(cudnn_conv.WORD, "little") + BETA, inputs, [y])
    assert kernel.workspace == 512 + w.nbytes
    memory, found = Memory(kernel.workspace, 0xFF), laid_out(y)[1]
    Bound(kernel, [laid_out(each, array)[1] for each, array in zip(inputs, (x, w))], [found], memory.bytes, op=op)()
    memory.check()
    np.testing.assert_allclose(found, expected(op, [x, w])[0], rtol=1e-6, atol=1e-5)


@with_cudnn
def test_convolutions_of_ranges_of_channels_are_cudnns() -> None:
    """Two float32 convolutions in turns over ranges of the channels between them: weights are views, and sums grow in
    place, by cuDNN's beta.
    """
    step = fp.compile(fp.models.build("conv_chain:size=256"), fp.losses.mse, fp.optim.SGD(0.1), target="cuda:h100")
    used = [step.program.calls[s.action] for s in step.plan.steps]
    ranges = [call for call in used if call.op.name in ("conv", "conv_data_grad") and call.inputs[1].type.rank == 4]
    ranges = [call for call in ranges if not call.inputs[1].window.is_compact]
    assert len(ranges) >= 8 and {call.kernel.split(" ")[0] for call in ranges} == {"cudnn"}
    added = [call for call in ranges if len(call.inputs) == 3 and call.inputs[2].type == call.outputs[0].type]
    assert added and all(ADDING in call.payload for call in added)


def test_a_plan_that_adds_is_for_what_is_added_to() -> None:
    """One of an earlier version, whose result was added by a map, is refused; so is one that would add to nothing."""
    x, w = channels_last(type_of(f32(2, 5, 7, 9))), Window.dense(type_of(f32(6, 5, 3, 3)))
    y = channels_last(type_of(f32(2, 6, 7, 9)))
    payload = bytes(cudnn_conv.WORD) + b'{"alpha":1.0,%s}'
    for blob, inputs in ((BETA, [x, w, y]), (ADDING, [x, w])):
        with pytest.raises(Refused):
            cudnn_conv.cudnn_kernel(Conv(*SAME), payload % blob, inputs, [y])
    for blob, inputs in ((BETA, [x, w]), (ADDING, [x, w, y])):
        assert len(cudnn_conv.cudnn_kernel(Conv(*SAME), payload % blob, inputs, [y]).instructions) == len(inputs) - 1


def f32(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


CASES: dict[str, tuple[Op, list[np.ndarray]]] = {
    "forward": (Conv(*SAME), [f32(2, 5, 7, 9), f32(6, 5, 3, 3)]),
    "forward with a bias": (Conv(*SAME), [f32(2, 5, 9, 9), f32(9, 5, 3, 3), f32(9)]),
    "forward added to": (Conv(*SAME), [f32(2, 5, 7, 9), f32(6, 5, 3, 3), f32(2, 6, 7, 9)]),
    "one axis with a bias": (Conv((1,), ((1, 1),), (1,)), [f32(2, 5, 9), f32(4, 5, 3), f32(4)]),
    "data gradient added to": (
        ConvDataGrad(*SAME, spatial=(7, 9)),
        [f32(2, 6, 7, 9), f32(6, 5, 3, 3), f32(2, 5, 7, 9)],
    ),
    "weight gradient added to": (
        ConvWeightGrad(*SAME, kernel=(3, 3)),
        [f32(2, 5, 7, 9), f32(2, 6, 7, 9), f32(6, 5, 3, 3)],
    ),
    "wide weight gradient": (
        ConvWeightGrad(*SAME, kernel=(3, 3), wide=True),
        [x.astype(ml_dtypes.bfloat16) for x in (f32(2, 5, 7, 9), f32(2, 6, 7, 9))],
    ),
}


@needs_gcc
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("lie", [channels_last, Window.dense])
def test_what_is_done_to_cudnns_result(case: str, lie: Callable[[TensorType], Window]) -> None:
    """With NumPy's convolution in the place of cuDNN's."""
    op, arrays = CASES[case]
    inputs = [lie(type_of(x)) for x in arrays]
    (result,) = op.infer([x.type for x in inputs])
    layout = lie(result)
    blob = ADDING if cudnn_conv._adds(inputs, [layout]) else BETA
    kernel = cudnn_conv.cudnn_kernel(op, (512).to_bytes(cudnn_conv.WORD, "little") + blob, inputs, [layout])
    (wanted,) = expected(op, arrays)
    rounding = 2.0**-8 if arrays[0].dtype != np.float32 else 1e-6
    for over in (False, True) if kernel.overwrites else (False,):
        memory = Memory(kernel.workspace, 0xFF)
        given = [laid_out(w, x)[1] for w, x in zip(inputs, arrays)]
        y = given[2] if over else laid_out(layout)[1]
        Bound(kernel, given, [y], memory.bytes, op=op)()
        memory.check()
        np.testing.assert_allclose(y, wanted, rtol=rounding, atol=1e-5)
