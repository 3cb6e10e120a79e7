"""cuDNN's plans as kernels: which the plan of a step chooses, and what of them is in its file."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import foreplan as fp
from foreplan.base.errors import PlanError
from foreplan.frontend import nn
from foreplan.graph import Graph, Op, TensorType, Window
from foreplan.graph.layouts import channels_last
from foreplan.graph.types import DTYPES
from foreplan.ops.conv.ops import Conv, ConvDataGrad, ConvWeightGrad
from foreplan.passes import split_channels
from foreplan.runtime.cuda import table
from foreplan.runtime.cuda.engine import CudaEngine
from foreplan.runtime.cuda.kernels import cudnn_conv
from foreplan.runtime.cuda.launch import Arithmetic, Execute
from foreplan.runtime.cuda.libraries.cudnn import ADDING, BETA, CudnnPlan, workspace_of
from foreplan.runtime.cuda.libraries.cudnn_conv_plans import convolution_plans
from foreplan.runtime.cuda.libraries.driver import Run
from foreplan.runtime.cuda.memory import DeviceMemory
from foreplan.runtime.cuda.target import CudaTarget
from foreplan.runtime.kernel import Refused
from foreplan.runtime.planfile import save_plan
from tests.gpu.card import FakeCard
from tests.gpu.check import expected, run_kernel, type_of, with_cudnn
from tests.gpu.compiled import needs_gcc
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
    # Ours where cuDNN has nothing but engine 0, or nothing faster for a gradient in float32.
    for found, theirs, count in ((free, 4, 5), (capped, 2, 5), (least, 5, 6)):
        assert sum(name.startswith("cudnn ") for name, _ in found) == theirs and len(found) == count
        assert all(name.startswith("cudnn ") or name == table.OWN for name, _ in found)
    assert max(nbytes for _, nbytes in capped) <= 8 << 20 < max(nbytes for _, nbytes in free)
    assert max(nbytes for _, nbytes in least) == 0


STEM = ((2, 2), ((3, 3), (3, 3)), (1, 1))  # strides, pads and dilations of ResNet's first convolution, of 7 x 7 taps


def of_the_stem(batch: int, channels: int, dtype: str) -> list[tuple[Op, list[Window], Window]]:
    """ResNet's first convolution and its weight gradient, channels last: ops, inputs and outputs."""
    x, w, y = (
        channels_last(TensorType(DTYPES[dtype], shape))
        for shape in ((batch, channels, 224, 224), (64, channels, 7, 7), (batch, 64, 112, 112))
    )
    return [(Conv(*STEM), [x, w], y), (ConvWeightGrad(*STEM, kernel=(7, 7)), [x, y], w)]


@with_cudnn
@pytest.mark.parametrize("card", ["h100", "h200"])
def test_plans_are_priced_as_they_were_measured(card: str) -> None:
    """Of 3,400 plans that ran on an H100 with cuDNN 9.19, and of 4,400 on an H200, some of each op, type and engine, as
    far as they are there: within a factor of 3 for 19 of 20, and neither too high nor too low as a whole.
    """
    device, ratios = CudaTarget(card).device, []
    with open(Path(__file__).with_name(f"convolutions_on_{card}.csv"), newline="") as file:
        for row in csv.DictReader(file):
            op, inputs, y = measured(row)
            kernels = cudnn_conv.cudnn_kernels(op, inputs, [y], device, Arithmetic(row["tf32"] == "1"))
            if (kernel := kernels.get(f"cudnn {row['plan']}")) is not None:
                assert kernel.nanoseconds is not None
                ratios.append(kernel.nanoseconds / 1e6 / float(row["milliseconds"]))
    if len(ratios) < 50:
        pytest.skip(f"needs cuDNN 9.19, whose plans were measured: make setup-cuda; this one has {len(ratios)} of them")
    logs = np.log(ratios)
    assert np.mean(np.abs(logs) < np.log(3)) >= 0.95 and abs(np.median(logs)) < np.log(1.25)


def measured(row: Mapping[str, str]) -> tuple[Op, list[Window], Window]:
    """The convolution that a row is of: op, inputs and output as they lay."""

    def numbers(key: str) -> tuple[int, ...]:
        return tuple(map(int, row[key].split("x")))

    pads, lay = numbers("pads"), {"dense": Window.dense, "last": channels_last}
    given, _, made = row["dtype"].partition(">")
    types = [DTYPES[name] for name in (given, given, made or given)]
    tensors = [
        lay[order](TensorType(type, numbers(key)))
        for type, order, key in zip(types, row["how they lie"].split(), ("first", "second", "result"))
    ]
    geometry = (numbers("strides"), ((pads[0], pads[1]), (pads[2], pads[3])), (1, 1))
    result = numbers("result")[2:]
    more = {"conv": {}, "conv_data_grad": {"spatial": result}, "conv_weight_grad": {"kernel": result}}[row["op"]]
    kind = {"conv": Conv, "conv_data_grad": ConvDataGrad, "conv_weight_grad": ConvWeightGrad}[row["op"]]
    return kind(*geometry, **more), tensors[:2], tensors[2]


@with_cudnn
def test_resnets_first_convolution_runs_on_tensor_cores() -> None:
    """At a batch where that takes more than the 64 MiB of scratch memory which other kernels may have."""
    graph = fp.trace(lambda x: nn.conv(x, 64, 7, stride=2, padding=3, name="stem"), fp.spec((256, 3, 224, 224)))
    step = fp.compile(graph, fp.losses.mse, fp.optim.SGD(0.1), target="cuda:h100", precision="bf16")
    without = [
        plan.name for case in of_the_stem(256, 3, "bfloat16") for plan in stem_plans(*case) if not plan.tensor_cores
    ]
    found = convolutions(step)
    assert len(found) == 2 and without
    assert all(name.startswith("cudnn ") and name.removeprefix("cudnn ") not in without for name, _ in found)


def stem_plans(op: Op, inputs: list[Window], y: Window) -> tuple[CudnnPlan, ...]:
    return convolution_plans(op, inputs, [y], CudaTarget("h100").device)


@with_cudnn
def test_few_channels_are_filled_up_by_cudnn_itself() -> None:
    """In just the scratch memory that images and weights of 8 channels take, for which it needs none: to make these in
    actions of a program's own would take as much.
    """
    for few, eight in zip(of_the_stem(8, 3, "bfloat16"), of_the_stem(8, 8, "bfloat16")):
        filled = sum(
            window.type.nbytes for window in (eight[1][0], (*eight[1], eight[2])[1 if few[0].name == "conv" else 2])
        )
        by_tensor_cores = [plan.workspace for plan in stem_plans(*few) if plan.tensor_cores]
        assert filled <= min(by_tensor_cores) < filled + 512
        assert min(plan.workspace for plan in stem_plans(*eight) if plan.tensor_cores) <= 256


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


class Refusing(FakeCard):
    """It takes the plans of cuDNN's that it knows, and runs none."""

    def __init__(self, known: set[bytes]) -> None:
        super().__init__()
        self.known, self.taken = known, 0

    def executing(self, blob: bytes, *_: object) -> Run:
        assert blob in self.known
        self.taken += 1
        return lambda: None


@with_cudnn
@needs_gcc
def test_a_plan_of_cudnns_in_a_file_runs_if_the_file_is_trusted_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = compiled()
    calls = [step.program.calls[s.action] for s in step.plan.steps]
    own = {call.payload[cudnn_conv.WORD :] for call in calls if call.payload}
    foreign = [replace(call, payload=call.payload and call.payload + b"!") for call in step.program.calls]
    save_plan(str(tmp_path / "step.plan"), replace(step.program, calls=tuple(foreign)), step.plan, options=step.options)
    monkeypatch.setattr(CudaEngine, "allocate", lambda engine, heights: [DeviceMemory(engine.card, None, 0, 0)] * 3)
    engine = CudaEngine("cuda:h100", card := Refusing(own))
    read = fp.load_plan(tmp_path / "step.plan")
    engine.bind(read.program, read.plan, engine.allocate(read.plan.heights))
    assert card.taken == len([call for call in calls if call.payload])
    trusted = fp.load_plan(tmp_path / "step.plan", trust_code=True)
    theirs = CudaEngine("cuda:h100", card := Refusing({blob + b"!" for blob in own}))
    theirs.bind(trusted.program, trusted.plan, engine.allocate(trusted.plan.heights))
    assert card.taken
    table._ways.cache_clear()
    monkeypatch.setattr(cudnn_conv, "missing", lambda: "it is not there")
    with pytest.raises(PlanError, match="runs if you trust the file alone"):
        engine.bind(read.program, read.plan, engine.allocate(read.plan.heights))
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
    (found,) = run_kernel(kernel, inputs, [y], [x, w], op=op)
    np.testing.assert_allclose(found, expected(op, [x, w])[0], rtol=1e-6, atol=1e-5)


@with_cudnn
def test_convolutions_of_ranges_of_channels_are_cudnns() -> None:
    """Two float32 convolutions in turns over ranges of the channels between them: weights are views, and sums grow in
    place, by cuDNN's beta.
    """
    graph = split_channels(fp.inference(fp.models.build("conv_chain:size=256")))
    step = fp.compile(graph, fp.losses.mse, fp.optim.SGD(0.1), target="cuda:h100")
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
    for over in (None, *kernel.overwrites):
        (y,) = run_kernel(kernel, inputs, [layout], arrays, over, op=op)
        np.testing.assert_allclose(y, wanted, rtol=rounding, atol=1e-5)
