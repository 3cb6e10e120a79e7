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
from foreplan.gpu.launch import Execute
from foreplan.graph import Graph, Op, TensorType, Window
from foreplan.graph.layouts import channels_last
from foreplan.lower.cuda import CudaTarget
from foreplan.ops.conv import Conv, ConvDataGrad, ConvWeightGrad
from tests.gpu.binder import Bound, needs_gcc
from tests.gpu.check import Memory, expected, laid_out, type_of, with_cudnn

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
def test_a_result_that_is_added_to_has_memory_of_its_own_first() -> None:
    """Of a gradient that is added to another, cuDNN's result is workspace, and a map adds it."""

    def model(x: Any) -> Any:
        y = nn.conv(x, 64, 3, padding=1, name="stem")
        return nn.conv(y, 64, 3, padding=1, name="a") + nn.conv(y, 64, 3, padding=1, name="b")

    graph = fp.trace(model, fp.spec((2, 64, 32, 32)))
    program = fp.compile(graph, fp.losses.mse, fp.optim.SGD(0.1), target="cuda:h100").program
    added = [
        (call, action)
        for call, action in zip(program.calls, program.actions)
        if call.op.name == "conv_data_grad" and len(call.inputs) == 3 and call.payload
    ]
    assert added
    for call, action in added:
        assert action.workspace >= call.outputs[0].type.nbytes


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
    kernel = cudnn_conv.cudnn_kernel(op, (512).to_bytes(cudnn_conv.WORD, "little") + b"plan", inputs, [layout])
    memory = Memory(kernel.workspace, 0xFF)
    given, (_, y) = [laid_out(w, x)[1] for w, x in zip(inputs, arrays)], laid_out(layout)
    Bound(kernel, given, [y], memory.bytes, op=op)()
    memory.check()
    (wanted,) = expected(op, arrays)
    rounding = 2.0**-8 if arrays[0].dtype != np.float32 else 1e-6
    np.testing.assert_allclose(y, wanted, rtol=rounding, atol=1e-5)
