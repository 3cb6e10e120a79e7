"""Convolutions as cuDNN plans them for a card that need not be in this machine."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from foreplan.graph import Op, Window
from foreplan.ops.conv.ops import Conv, ConvDataGrad, ConvWeightGrad
from foreplan.runtime.cuda.device import Device
from foreplan.runtime.cuda.launch import USUAL, Arithmetic
from foreplan.runtime.cuda.libraries.cudnn import (
    ADDING,
    BETA,
    NO_COMPILER,
    TYPES,
    UIDS,
    CudnnPlan,
    CudnnTensor,
    Unanswered,
    bounded,
    check_refusal,
    falling,
    library,
    plans_kept,
    properties,
    unanswered,
    uncounted,
    workspace_told,
)

# Engine 1 of weight gradients: with unequal paddings, on an H100 (cuDNN 9.19), it gave wrong sums, which differed from
# run to run.
_UNEVEN_WRONG = re.compile(r"eng1(_|$)")


@dataclass(frozen=True)
class _Question:
    """A question to cuDNN: a convolution of at least two spatial axes, with its tensors' layouts.

    Attributes:
        left_out: engines with one of these numerical notes of cuDNN's are left out.
    """

    op: str
    tensors: tuple[CudnnTensor, CudnnTensor, CudnnTensor]
    strides: tuple[int, ...]
    pads: tuple[tuple[int, int], ...]
    dilations: tuple[int, ...]
    adds: bool
    left_out: tuple[str, ...]


def convolution_plans(
    op: Op,
    inputs: Sequence[Window],
    outputs: Sequence[Window],
    device: Device,
    *,
    adds: bool = False,
    how: Arithmetic = USUAL,
    cap: int | None = None,
) -> tuple[CudnnPlan, ...]:
    """cuDNN's plans for a convolution, its data gradient or its weight gradient: the one it ranks first, then each
    that takes less workspace than all before it. So the first plan within a limit is the best one within it.

    Engines that compile at run time are left out: their choice depends on the machine that plans.

    Args:
        op: Conv, ConvDataGrad or ConvWeightGrad.
        inputs, outputs: how the two tensors and the result lie: float32, bfloat16 or float16; sums are always float32.
            Their addresses must be multiples of 16 bytes.
        adds: add the result to the output's old content, before it is rounded.
        how: which engines are left out.
        cap: leave out plans that take more bytes of workspace.

    Returns:
        The plans; none where cuDNN has none.

    Raises:
        TargetError: cuDNN is not there.
    """
    left_out = ["REDUCED_PRECISION_REDUCTION"]
    if not how.tf32 and inputs[0].type.dtype.name == "float32":
        left_out += ["TENSOR_CORE", "DOWN_CONVERT_INPUTS"]
    if how.deterministic:
        left_out.append("NONDETERMINISTIC")
    if how.strict:
        left_out += ["WINOGRAD", "FFT"]
    question = _question(op, inputs, outputs, adds, left_out)
    if question is None:
        return ()
    return tuple(plan for plan in _answers(question, device) if cap is None or plan.workspace <= cap)


def choices(op: Op, inputs: Sequence[Window], output: Window, device: Device, *, tf32: bool) -> tuple[CudnnPlan, ...]:
    """What a program that runs cuDNN's first engine runs, as PyTorch does: the plan that cuDNN ranks first, then each
    that takes less workspace than all before it.

    Args:
        op, inputs, device: as for `convolution_plans`.
        tf32: let tensor cores round float32 factors to ten bits of mantissa.

    Returns:
        The plans; none where cuDNN has none.

    Raises:
        TargetError: cuDNN is not there.
        Unanswered: it fails.
    """
    left_out = ["DOWN_CONVERT_INPUTS"]  # with which of cuDNN's notes PyTorch's `filterEngineConfigs` leaves engines out
    if not tf32 and inputs[0].type.dtype.name == "float32":
        left_out.append("TENSOR_CORE")
    question = _question(op, inputs, [output], False, left_out)
    return () if question is None else _asked(question, device)


def _question(
    op: Op, inputs: Sequence[Window], outputs: Sequence[Window], adds: bool, left_out: Sequence[str]
) -> _Question | None:
    """The question; None if cuDNN cannot describe it."""
    if not isinstance(op, Conv | ConvDataGrad | ConvWeightGrad) or len(inputs) != 2 or len(op.strides) > 3:
        return None
    tensors = [_tensor(window) for window in (*inputs, *outputs)]
    if any(low < 0 or high < 0 for low, high in op.pads):
        return None  # crops
    a, b, y = tensors
    if a is None or b is None or y is None:
        return None
    one = len(op.strides) == 1  # cuDNN knows two spatial axes or three
    return _Question(
        op.name,
        (a, b, y),
        (1,) * one + op.strides,
        ((0, 0),) * one + op.pads,
        (1,) * one + op.dilations,
        adds,
        tuple(left_out),
    )


def _tensor(window: Window) -> CudnnTensor | None:
    """A tensor in elements; axes of extent 1 get the strides of channels last, or of C order, if either fits."""
    item, shape, steps = window.type.dtype.itemsize, window.shape, window.strides
    if window.type.dtype.name not in TYPES or not window.type.size:
        return None
    if len(shape) == 3:
        shape, steps = (*shape[:2], 1, shape[2]), (*steps[:2], 0, steps[2])
    real = [axis for axis, extent in enumerate(shape) if extent > 1]
    if any(steps[axis] <= 0 or steps[axis] % item for axis in real):
        return None
    own = tuple(step // item for step in steps)
    orders = [order for order in ((0, *range(2, len(shape)), 1), range(len(shape))) if _lies(shape, own, order)]
    if not orders:
        return None  # on a card, engines that take any strides were seen to give other bits from run to run
    for order in orders:
        dense = _dense(shape, order)
        if all(dense[axis] == own[axis] for axis in real):
            return CudnnTensor(shape, dense, window.type.dtype.name)
    filled = tuple(own[axis] if axis in real else max(own[axis], 1) for axis in range(len(shape)))
    return CudnnTensor(shape, filled, window.type.dtype.name)


def _lies(shape: Sequence[int], steps: Sequence[int], order: Sequence[int]) -> bool:
    """Whether the axes lie in this order, the outermost first, perhaps with gaps, but without gaps between elements."""
    real = [axis for axis in reversed(order) if shape[axis] > 1]
    if not real:
        return True
    neighbours = pairwise(real)
    return steps[real[0]] == 1 and all(steps[outer] >= steps[inner] * shape[inner] for inner, outer in neighbours)


def _dense(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Strides of a tensor without gaps whose axes lie in this order, the outermost first."""
    strides, step = [0] * len(shape), 1
    for axis in reversed(order):
        strides[axis] = step
        step *= shape[axis]
    return tuple(strides)


@lru_cache(maxsize=4096)
def _answers(question: _Question, device: Device) -> tuple[CudnnPlan, ...]:
    """Plans in cuDNN's order, each with less workspace than all before it; kept on disk."""
    try:
        return _asked(question, device)
    except Unanswered as error:
        return unanswered(error)


def _asked(question: _Question, device: Device) -> tuple[CudnnPlan, ...]:
    return plans_kept(repr(question), device, Path(__file__), lambda: falling(_ranked(question, device)))


def _ranked(question: _Question, device: Device) -> Iterator[CudnnPlan]:
    """Every plan that cuDNN can make, in the order of its heuristics, then its fallbacks.

    Raises:
        Unanswered: cuDNN fails.
    """
    graph = _with_engines(question, device)
    if graph is None:
        return
    cudnn = library().module
    notes = cudnn.numerical_note
    graph.deselect_numeric_notes([getattr(notes, name) for name in question.left_out])
    graph.deselect_behavior_notes([cudnn.behavior_note.RUNTIME_COMPILATION])
    # An engine's notes cannot be read, only selected: of the same engines, this graph builds those with the note.
    noted = _with_engines(question, device) if "TENSOR_CORE" not in question.left_out else None
    if noted is not None:
        noted.select_numeric_notes([notes.TENSOR_CORE])
    uneven = question.op == ConvWeightGrad.name and any(low != high for low, high in question.pads)
    for index in range(graph.get_execution_plan_count()):
        if uneven and _UNEVEN_WRONG.match(graph.get_plan_name_at_index(index)):
            continue
        if not _builds(graph, index):
            continue  # left out by a note, or does not run such tensors after all
        blob = uncounted(bytes(graph.serialize()))
        nbytes = bounded(int(graph.get_workspace_size()), blob, device)
        if question.adds:
            # The frontend cannot set beta, which every convolution of cuDNN has (cuDNN API,
            # CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_BETA): so it is set in the text, from which a plan is made again.
            if blob.count(BETA) != 1:
                continue
            blob = blob.replace(BETA, ADDING)
            try:
                nbytes = workspace_told(blob, device)
            except _errors() as error:
                check_refusal(error)
                continue
        tensor_cores = noted is not None and _builds(noted, index)
        yield CudnnPlan(graph.get_plan_name_at_index(index), nbytes, blob, tensor_cores)


def _errors() -> tuple[type[Exception], ...]:
    """The errors of cuDNN's package."""
    return library().module.cudnnGraphNotSupportedError, RuntimeError


def _with_engines(question: _Question, device: Device) -> Any:
    """cuDNN's graph of one convolution, with the engines that its heuristics name; None: there are none."""
    cudnn = library().module
    graph = _graph(question, device)
    try:
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    except _errors() as error:
        check_refusal(error, also=[NO_COMPILER])  # engines that are compiled are left out anyway
        return None
    return graph


def _builds(graph: Any, index: int) -> bool:
    """Whether an engine makes a plan, which is then the graph's."""
    try:
        graph.build_plan_at_index(index)
    except _errors() as error:
        check_refusal(error)
        return False
    return True


def _graph(question: _Question, device: Device) -> Any:
    """cuDNN's graph of one convolution."""
    cudnn = library().module
    # The number of multiprocessors is in the description; given as `sm_count` as well, it hides engines.
    graph = cudnn.pygraph(
        device_property=properties(device),
        sm_version=device.compute,
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
    )
    types = [getattr(cudnn.data_type, TYPES[tensor.dtype]) for tensor in question.tensors]
    a, b, y = question.tensors
    first, second = (
        graph.tensor(name=name, dim=list(tensor.shape), stride=list(tensor.strides), data_type=type, uid=uid)
        for name, tensor, type, uid in zip(("a", "b"), (a, b), types, UIDS)
    )
    how = {
        "pre_padding": [low for low, _ in question.pads],
        "post_padding": [high for _, high in question.pads],
        "stride": list(question.strides),
        "dilation": list(question.dilations),
    }
    if question.op == Conv.name:
        result = graph.conv_fprop(image=first, weight=second, **how)
    elif question.op == ConvDataGrad.name:
        result = graph.conv_dgrad(loss=first, filter=second, **how)
    else:
        result = graph.conv_wgrad(image=first, loss=second, **how)
    result.set_output(True).set_dim(list(y.shape)).set_stride(list(y.strides)).set_data_type(types[2]).set_uid(UIDS[2])
    return graph
