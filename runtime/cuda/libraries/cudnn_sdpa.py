"""Attention as cuDNN plans it for a card that need not be in this machine.

cuDNN compiles all its engines for attention when it plans, and only if it finds the driver's library. So a separate
process asks, in which another library stands in for the driver's (stand_in.py).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from foreplan.base.errors import TargetError
from foreplan.base.units import align_up
from foreplan.graph import Op, TensorType, Window
from foreplan.graph.types import FLOAT32
from foreplan.ops.attention.gradient import AttentionGrad
from foreplan.ops.attention.ops import Attention
from foreplan.runtime.cuda.device import Device
from foreplan.runtime.cuda.libraries import stand_in
from foreplan.runtime.cuda.libraries.cudnn import (
    ADDRESS_ALIGNMENT,
    TYPES,
    WORKSPACE_ALIGNMENT,
    CudnnPlan,
    CudnnTensor,
    Unanswered,
    check_refusal,
    description,
    falling,
    library,
    missing,
    plans_kept,
    unanswered,
    uncounted,
)
from foreplan.runtime.cuda.libraries.libraries import library_files
from foreplan.runtime.cuda.libraries.nvrtc import Nvrtc

LEAST_COMPUTE = 80  # compute capability 8.0, Ampere: cuDNN's first with engines for attention
_SECONDS = 300  # seconds that the other process may take; it takes about one for each engine


@dataclass(frozen=True)
class _Question:
    """A question to cuDNN: attention or its gradient, and the layouts of inputs and outputs, in the op's order.

    All are [batch, heads, positions, depth], the log-sum-exp has a depth of 1. Their uids count from 1; a mask's is the
    last.
    """

    backward: bool
    tensors: tuple[CudnnTensor, ...]
    mask: CudnnTensor | None
    scale: float
    causal: bool
    deterministic: bool


def attention_plans(
    op: Op, inputs: Sequence[Window], outputs: Sequence[Window], device: Device, *, deterministic: bool = True
) -> tuple[CudnnPlan, ...]:
    """cuDNN's plans for attention or its gradient: the one it ranks first, then each that takes less workspace than
    all before it.

    cuDNN's statistics are what the op calls lse: the natural logarithm of the sum of exponentials of scaled scores.

    Args:
        op: Attention or AttentionGrad, the latter without the mask's gradient.
        inputs, outputs: how the tensors lie: bfloat16 or float16, each row's elements side by side; the log-sum-exp
            float32 in C order. Their addresses must be multiples of 16 bytes. Tensor 1 + i of a plan is the i-th of
            the inputs and outputs, counted through. The mask, if there is one, is left out of that: the plan takes
            `expanded_mask` as its last tensor, of finite numbers, since of -inf cuDNN makes NaN where it leaves a query
            no key.
        deterministic: leave out engines, and ways of engines, that may give other bits from run to run.

    Returns:
        The plans; none where cuDNN has none, or cannot be asked: this is no Linux on x86-64, or, which a warning says,
        it fails, or there is no NVRTC of its CUDA that compiles.
    """
    question = _question(op, inputs, outputs, deterministic)
    if question is None or device.compute < LEAST_COMPUTE or not stand_in.can_stand_in() or missing():
        return ()
    return _answers(question, device)


def _question(op: Op, inputs: Sequence[Window], outputs: Sequence[Window], deterministic: bool) -> _Question | None:
    """The question; None if cuDNN cannot describe it."""
    if not isinstance(op, Attention | AttentionGrad) or (isinstance(op, AttentionGrad) and op.mask_gradient):
        return None
    windows = [*inputs[: unmasked(op)], *outputs]
    dtype = inputs[0].type.dtype
    if dtype.name not in TYPES or dtype.itemsize != 2 or not all(window.type.size for window in windows):
        return None
    log_sums = 4  # its place, in either op
    tensors = [_log_sums(x) if i == log_sums else _tensor(x, op.heads_last) for i, x in enumerate(windows)]
    found = tuple(tensor for tensor in tensors if tensor is not None)
    if len(found) < len(tensors):
        return None
    mask = expanded_mask(op, inputs)
    lying = None if mask is None else _tensor(Window.dense(mask), False)
    if mask is not None and lying is None:
        return None
    return _Question(isinstance(op, AttentionGrad), found, lying, op.scale, op.causal, deterministic)


def unmasked(op: Attention | AttentionGrad) -> int:
    """How many inputs there are without a mask."""
    return 6 if isinstance(op, AttentionGrad) else 3


def expanded_mask(op: Attention | AttentionGrad, inputs: Sequence[Window]) -> TensorType | None:
    """The mask in a plan's form, in C order: float32, a number for each query and key. None: there is no mask."""
    if len(inputs) == unmasked(op):
        return None
    e = op.sizes([x.type for x in inputs])
    return TensorType(FLOAT32, (*inputs[unmasked(op)].shape[:2], e.queries, e.keys))


def _log_sums(window: Window) -> CudnnTensor | None:
    """[B, H, T] in C order as [B, H, T, 1]."""
    batch, heads, queries = window.shape
    if not window.is_dense:
        return None
    return CudnnTensor((batch, heads, queries, 1), (heads * queries, queries, 1, 1), window.type.dtype.name)


def _tensor(window: Window, heads_last: bool) -> CudnnTensor | None:
    """A tensor as [batch, heads, positions, depth], in elements; an axis of extent 1 steps over all inner axes."""
    item, step = window.type.dtype.itemsize, 1
    shape = list(window.shape)
    strides: list[int] = []
    for axis in (3, 2, 1, 0):
        own = window.strides[axis]
        if shape[axis] > 1:
            if own <= 0 or own % (item if axis == 3 else ADDRESS_ALIGNMENT):
                return None
            step = own // item
        strides.insert(0, step)
        step *= shape[axis]
    if strides[3] != 1:
        return None
    if heads_last:
        shape[1:3], strides[1:3] = reversed(shape[1:3]), reversed(strides[1:3])
    return CudnnTensor(tuple(shape), tuple(strides), window.type.dtype.name)


@lru_cache(maxsize=1)
def _nvrtc() -> Nvrtc:
    """NVRTC of cuDNN's CUDA.

    Raises:
        Unanswered: there is no such NVRTC, or it cannot compile.
    """
    major, failed = str(library().cuda // 1000), []
    for file in library_files("nvrtc"):
        if file.rpartition(".so.")[2].partition(".")[0] == major:
            try:
                return Nvrtc(file)
            except (OSError, TargetError) as error:
                failed.append(str(error))
    raise Unanswered("; ".join(failed) or f"there is no NVRTC of CUDA {major}, by which it compiles its engines")


@lru_cache(maxsize=4096)
def _answers(question: _Question, device: Device) -> tuple[CudnnPlan, ...]:
    """Plans in cuDNN's order, each with less workspace than all before it; kept on disk."""
    try:
        nvrtc = _nvrtc()
        asked = {
            "question": asdict(question),
            "device": description(device),
            "compute": device.compute,
            "nvrtc": nvrtc.path,
        }
        return plans_kept(f"{nvrtc.version} {question}", device, Path(__file__), lambda: _asked_elsewhere(asked))
    except Unanswered as error:
        return unanswered(error)


def _asked_elsewhere(asked: dict[str, Any]) -> list[CudnnPlan]:
    """The answer of a separate process.

    Raises:
        Unanswered: there is none.
    """
    paths = [path or os.getcwd() for path in sys.path]
    command = [sys.executable or "python3", "-c", f"from {__name__} import answer; answer()"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    try:
        done = subprocess.run(
            command, input=json.dumps(asked), env=environment, capture_output=True, text=True, timeout=_SECONDS
        )
        if done.returncode:
            raise Unanswered(done.stderr.strip()[-500:] or f"its process ended with {done.returncode}")
        return [CudnnPlan.from_json(record) for record in json.loads(done.stdout.splitlines()[-1])]
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired) as error:
        raise Unanswered(str(error)) from None


def answer() -> None:
    """Read a question from standard input, ask cuDNN, and print its plans as the last line: the other process."""
    asked = json.load(sys.stdin)
    stand_in.load()
    Nvrtc(asked["nvrtc"])  # cuDNN now finds the stand-in by that name
    about = asked["question"]
    given = [*about.pop("tensors"), about.pop("mask")]
    *tensors, mask = (x and CudnnTensor(tuple(x["shape"]), tuple(x["strides"]), x["dtype"]) for x in given)
    question = _Question(tensors=tuple(tensors), mask=mask, **about)
    try:
        plans = list(falling(_ranked(question, asked["device"], asked["compute"])))
    except Unanswered as error:
        sys.exit(str(error))
    print("\n" + json.dumps([plan.as_json() for plan in plans]))


def _ranked(question: _Question, device: str, compute: int) -> Iterator[CudnnPlan]:
    """Every plan that cuDNN can make, in the order of its heuristics, then its fallbacks.

    Raises:
        Unanswered: cuDNN fails, or lacks something for making plans, or a plan is not read back as it was written.
    """
    cudnn = library().module
    refusal = (cudnn.cudnnGraphNotSupportedError, RuntimeError)
    surroundings = {"device_property": cudnn.create_device_properties(device), "sm_version": compute}
    graph = _graph(question, surroundings)
    try:
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    except refusal as error:
        check_refusal(error)
        return
    if question.deterministic:
        graph.deselect_numeric_notes([cudnn.numerical_note.NONDETERMINISTIC])
    for index in range(graph.get_execution_plan_count()):
        name = graph.get_plan_name_at_index(index)
        if not name.startswith("eng"):
            continue  # one of the package's own, written in Python, which cannot be serialised
        try:
            graph.build_plan_at_index(index)
        except refusal as error:
            check_refusal(error)
            continue  # left out by a note, or does not run such tensors after all
        nbytes, blob = int(graph.get_workspace_size()), uncounted(bytes(graph.serialize()))
        again = cudnn.pygraph(**surroundings)
        again.deserialize(bytearray(blob))
        if again.get_workspace_size() != nbytes:
            raise Unanswered(f"{name} needs {again.get_workspace_size()} bytes of workspace and said {nbytes}")
        yield CudnnPlan(name, align_up(nbytes, WORKSPACE_ALIGNMENT), blob)


def _graph(question: _Question, surroundings: dict[str, Any]) -> Any:
    """cuDNN's graph of one attention."""
    cudnn = library().module
    graph = cudnn.pygraph(
        **surroundings,
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
    )
    types = [getattr(cudnn.data_type, TYPES[tensor.dtype]) for tensor in question.tensors]
    laid = [(list(tensor.shape), list(tensor.strides)) for tensor in question.tensors]
    given = [
        graph.tensor(name=f"t{i}", dim=shape, stride=strides, data_type=type, uid=i + 1)
        for i, ((shape, strides), type) in enumerate(zip(laid, types))
        if i < (6 if question.backward else 3)
    ]
    how = {"attn_scale": question.scale, "use_causal_mask": question.causal}
    if question.mask is not None:
        shape, strides = list(question.mask.shape), list(question.mask.strides)
        type, uid = getattr(cudnn.data_type, TYPES[question.mask.dtype]), len(laid) + 1
        how["bias"] = graph.tensor(name="mask", dim=shape, stride=strides, data_type=type, uid=uid)
    if question.backward:
        q, k, v, o, log_sums, g = given
        made = graph.sdpa_backward(
            q=q, k=k, v=v, o=o, dO=g, stats=log_sums, use_deterministic_algorithm=question.deterministic, **how
        )
    else:
        q, k, v = given
        # The plan then contains the statistics as operations, for which cuDNN finds a fused kernel.
        written_out = cudnn.attention_implementation.COMPOSITE
        made = graph.sdpa(q=q, k=k, v=v, generate_stats=True, implementation=written_out, **how)
    for i, tensor in enumerate(made, len(given)):
        shape, strides = laid[i]
        tensor.set_output(True).set_dim(shape).set_stride(strides).set_data_type(types[i]).set_uid(i + 1)
    return graph
