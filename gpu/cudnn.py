"""cuDNN, and convolutions as it plans them for a card that need not be in this machine.

cuDNN's graph interface (through nvidia-cudnn-frontend) ranks its engines for a described device without a driver, says
how many bytes of workspace each takes, and serialises what will run there.
"""

from __future__ import annotations

import base64
import ctypes
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from foreplan.errors import TargetError
from foreplan.gpu.device import Device, device_named
from foreplan.graph import Op, Window
from foreplan.kept import keep, kept
from foreplan.ops.conv import Conv, ConvDataGrad, ConvWeightGrad
from foreplan.units import align_up

WORKSPACE_ALIGNMENT = 256  # bytes; cuDNN's own sizes are odd
ADDRESS_ALIGNMENT = 16  # bytes; what plans demand of every operand's address
UIDS = (1, 2, 3)  # the two inputs and the output, in the op's order
_INTEGERS = {b"i": 1, b"U": 1, b"I": 2, b"u": 2, b"l": 4, b"m": 4, b"L": 8, b"M": 8}  # UBJSON's, by their bytes
TYPES = {"float32": "FLOAT", "bfloat16": "BFLOAT16", "float16": "HALF"}
_DATA = b"cudnn_backend_dataS"  # behind it, a serialised plan has the length of what cuDNN itself has written, and that
_PROFILE = re.compile(rb'(?<="GPUProfile":)\{[^{}]*\}')
BETA, ADDING = b'"beta":0.0', b'"beta":1.0'  # of a serialised plan of one convolution: how much of what is there stays


@dataclass(frozen=True)
class CudnnPlan:
    """One way that cuDNN runs an op, on one compute capability.

    Attributes:
        name: cuDNN's name of the engine and its knobs, such as `eng28_k2=4_k3=0`.
        workspace: bytes, a multiple of 256.
        blob: the plan, serialised; equal for equal questions.
    """

    name: str
    workspace: int
    blob: bytes

    def as_json(self) -> list[Any]:
        """What `from_json` takes."""
        return [self.name, self.workspace, base64.b64encode(self.blob).decode()]

    @classmethod
    def from_json(cls, record: list[Any]) -> CudnnPlan:
        """The plan that `as_json` has given."""
        name, workspace, blob = record
        return cls(name, workspace, base64.b64decode(blob))


@dataclass(frozen=True)
class CudnnTensor:
    """Extents, and elements from one to the next along each axis."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class _Question:
    """What cuDNN is asked: a convolution of at least two spatial axes, the two inputs and the output as they lie."""

    op: str
    tensors: tuple[CudnnTensor, CudnnTensor, CudnnTensor]
    strides: tuple[int, ...]
    pads: tuple[tuple[int, int], ...]
    dilations: tuple[int, ...]
    adds: bool
    tf32: bool
    deterministic: bool


@dataclass(frozen=True)
class Library:
    """cuDNN, loaded.

    Attributes:
        module: the Python package `cudnn`.
        version: of cuDNN itself, such as "9.19.0".
        frontend: of the package.
        cuda: the CUDA version that cuDNN was built for, such as 13000.
    """

    module: Any
    version: str
    frontend: str
    cuda: int


@lru_cache(maxsize=1)
def library() -> Library:
    """cuDNN, loaded once; needs no card and no driver.

    Raises:
        TargetError: it is not installed or cannot be loaded; says how to get it.
    """
    advice = (
        "install it with `pip install 'foreplan[cuda13]'` or 'foreplan[cuda12]' (in this repository: make setup-cuda)"
    )
    try:
        import cudnn

        version = str(cudnn.backend_version_string())
        cuda = int(ctypes.CDLL("libcudnn.so.9").cudnnGetCudartVersion())  # the package has loaded it
        cudnn.create_device_properties(description(device_named("h100")))  # newer ones want a driver even for this
    except ModuleNotFoundError as error:
        raise TargetError(f"cuDNN is not installed ({error}); {advice}") from None
    except Exception as error:  # the package's own errors have no common type
        raise TargetError(f"cuDNN cannot plan for a device that is not there: {error}; {advice}") from None
    return Library(cudnn, version, cudnn.__version__, cuda)


def missing() -> str:
    """Why cuDNN cannot be asked here; empty if it can."""
    try:
        library()
    except TargetError as error:
        return str(error)
    return ""


def convolution_plans(
    op: Op,
    inputs: Sequence[Window],
    outputs: Sequence[Window],
    device: Device,
    *,
    adds: bool = False,
    tf32: bool = False,
    deterministic: bool = True,
    cap: int | None = None,
) -> tuple[CudnnPlan, ...]:
    """cuDNN's plans for a convolution, its data gradient or its weight gradient: the one it ranks first, then each
    that takes less workspace than all before it. So the first that fits a limit is the best that does.

    Engines that compile at run time are left out: which of them there are depends on the machine that plans.

    Args:
        op: Conv, ConvDataGrad or ConvWeightGrad.
        inputs, outputs: how the two tensors and the result lie: float32, bfloat16 or float16; sums are always float32.
            Their addresses must be multiples of 16 bytes.
        adds: add the result to what lies where it goes, before it is rounded.
        tf32: let tensor cores round float32 factors to ten bits of mantissa.
        deterministic: leave out engines that may give other bits from run to run.
        cap: leave out plans that take more bytes of workspace.

    Returns:
        The plans; none where cuDNN has none.

    Raises:
        TargetError: cuDNN is not there.
    """
    question = _question(op, inputs, outputs, adds, tf32, deterministic)
    if question is None:
        return ()
    return tuple(plan for plan in _answers(question, device) if cap is None or plan.workspace <= cap)


def workspace_of(blob: bytes, device: Device) -> int:
    """Bytes of workspace that a serialised plan takes, asked of cuDNN anew, rounded up as in `CudnnPlan`.

    Raises:
        TargetError: cuDNN is not there, or does not take the plan: damaged, or made by another version.
    """
    found = library()
    graph = found.module.pygraph(device_property=_properties(device), sm_version=device.compute)
    try:
        graph.deserialize(bytearray(on_card(blob, description(device))))
        nbytes = int(graph.get_workspace_size())
    except Exception as error:  # the package's own errors have no common type
        raise TargetError(f"cuDNN {found.version} does not take this plan: {error}") from None
    return align_up(nbytes, WORKSPACE_ALIGNMENT)


def on_card(blob: bytes, described: str) -> bytes:
    """A serialised plan as one for another card of its compute capability, or for another driver.

    A plan describes the card that it was made for, and cuDNN reads it only where the card is described alike, by the
    number of multiprocessors and the driver's version, too. Engines and workspaces depend on neither.

    Args:
        described: the card, as cuDNN's `device_properties` are serialised.
    """
    before, key, after = blob.partition(_DATA)
    count = _INTEGERS.get(after[:1], 0)
    size = int.from_bytes(after[1 : 1 + count], "big")
    text, rest = after[1 + count : 1 + count + size], after[1 + count + size :]
    profile = _PROFILE.search(text)
    if profile is None or not count:
        return blob  # which cuDNN will refuse
    told = json.loads(profile[0])
    told |= {name: value for name, value in json.loads(described).items() if name in told and name != "deviceVer"}
    made = json.dumps(told, separators=(",", ":")).encode()
    text = text[: profile.start()] + made + text[profile.end() :]
    return before + key + b"l" + len(text).to_bytes(4, "big") + text + rest


def description(device: Device) -> str:
    """A card as cuDNN's `create_device_properties` reads it."""
    return json.dumps(
        {
            "maxGridSize": [2147483647, 65535, 65535],
            "maxBlockSize": [1024, 1024, 64],
            "regsPerBlock": 65536,
            "multiProcessorCount": device.multiprocessors,
            "warpSize": 32,
            "maxSharedMemoryPerBlock": 49152,
            "maxSharedMemoryPerBlockOptin": device.shared_bytes_per_block,
            "reservedSharedMemoryPerBlock": device.shared_bytes_per_multiprocessor - device.shared_bytes_per_block,
            "maxRegistersPerSM": 65536,
            "maxCtasPerSM": device.blocks_per_multiprocessor,
            "maxThreadsPerBlock": 1024,
            "maxThreadsPerSM": device.threads_per_multiprocessor,
            "pciDeviceId": 0,
            "isTccDriver": 0,
            "supportCoopLaunch": 1,
            "totalGlobalMem": device.memory_bytes,
            "smClockRateKHz": device.clock_hz // 1000,
            "memClockRateKHz": device.memory_clock_hz // 1000,
            "l2CacheSize": device.l2_bytes,
            "cudaDeviceId": 0,
            "deviceVer": 10 * device.compute,
            "driverVer": 13000,
            "deviceName": device.title,
        },
        separators=(",", ":"),
    )


def _question(
    op: Op, inputs: Sequence[Window], outputs: Sequence[Window], adds: bool, tf32: bool, deterministic: bool
) -> _Question | None:
    """What to ask; None for what cuDNN has no words for."""
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
        tf32 or a.dtype != "float32",
        deterministic,
    )


def _tensor(window: Window) -> CudnnTensor | None:
    """A tensor in elements; axes of extent 1 have the strides of channels last, or of C order, where either fits."""
    item, shape, steps = window.type.dtype.itemsize, window.shape, window.strides
    if window.type.dtype.name not in TYPES or not window.type.size:
        return None
    if len(shape) == 3:
        shape, steps = (*shape[:2], 1, shape[2]), (*steps[:2], 0, steps[2])
    real = [axis for axis, extent in enumerate(shape) if extent > 1]
    if any(steps[axis] <= 0 or steps[axis] % item for axis in real):
        return None
    own = tuple(step // item for step in steps)
    for order in ((0, *range(2, len(shape)), 1), range(len(shape))):
        dense = _dense(shape, order)
        if all(dense[axis] == own[axis] for axis in real):
            return CudnnTensor(shape, dense, window.type.dtype.name)
    filled = tuple(own[axis] if axis in real else max(own[axis], 1) for axis in range(len(shape)))
    return CudnnTensor(shape, filled, window.type.dtype.name)


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
    return plans_kept(repr(question), device, Path(__file__), lambda: falling(_ranked(question, device)))


def plans_kept(
    question: str, device: Device, file: Path, make: Callable[[], Iterable[CudnnPlan]]
) -> tuple[CudnnPlan, ...]:
    """Plans from disk, if they were made before: by the same libraries, and by the same text of `file` and this one."""
    found = library()
    asked = repr((found.version, found.frontend, found.cuda, description(device), question)).encode()
    said = b"".join(each.read_bytes() for each in (Path(__file__), file))
    name = f"cudnn-{hashlib.sha256(asked + said).hexdigest()}"
    content = kept(name)
    if content is None:
        plans = tuple(make())
        keep(name, json.dumps([plan.as_json() for plan in plans]).encode())
        return plans
    return tuple(CudnnPlan.from_json(record) for record in json.loads(content))


def falling(plans: Iterator[CudnnPlan]) -> Iterator[CudnnPlan]:
    """Those with less workspace than all before; none is made that comes after one with none."""
    least: int | None = None
    for plan in plans:
        if least is None or plan.workspace < least:
            least = plan.workspace
            yield plan
        if not least:
            return


def _ranked(question: _Question, device: Device) -> Iterator[CudnnPlan]:
    """Every plan that cuDNN can make, in the order of its heuristics, then its fallbacks."""
    cudnn = library().module
    refusal = (cudnn.cudnnGraphNotSupportedError, RuntimeError)
    graph = _graph(question, device)
    try:
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    except refusal:
        return
    notes = cudnn.numerical_note
    refused = [notes.REDUCED_PRECISION_REDUCTION]
    if not question.tf32:
        refused += [notes.TENSOR_CORE, notes.DOWN_CONVERT_INPUTS]
    if question.deterministic:
        refused.append(notes.NONDETERMINISTIC)
    graph.deselect_numeric_notes(refused)
    graph.deselect_behavior_notes([cudnn.behavior_note.RUNTIME_COMPILATION])
    for index in range(graph.get_execution_plan_count()):
        try:
            graph.build_plan_at_index(index)
        except refusal:
            continue  # left out by a note, or does not run such tensors after all
        nbytes = align_up(int(graph.get_workspace_size()), WORKSPACE_ALIGNMENT)
        blob = uncounted(bytes(graph.serialize()))
        if question.adds:
            # The frontend has no word for beta, which every convolution of cuDNN's has (cuDNN API,
            # CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_BETA): what is read back from the text is a plan anew.
            if blob.count(BETA) != 1:
                continue
            blob = blob.replace(BETA, ADDING)
            try:
                nbytes = workspace_of(blob, device)
            except TargetError:
                continue
        yield CudnnPlan(graph.get_plan_name_at_index(index), nbytes, blob)


def uncounted(blob: bytes) -> bytes:
    """A serialised plan (UBJSON) without the number of graphs made before it, which would differ from run to run."""
    before, key, after = blob.partition(b"i\x03gid")
    if not key or after[:1] not in _INTEGERS:
        return blob
    return before + key + b"i\x01" + after[1 + _INTEGERS[after[:1]] :]


def _graph(question: _Question, device: Device) -> Any:
    """cuDNN's graph of one convolution."""
    cudnn = library().module
    # The number of multiprocessors is in the description; given as `sm_count` as well, it hides engines.
    graph = cudnn.pygraph(
        device_property=_properties(device),
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


@lru_cache(maxsize=64)
def _properties(device: Device) -> Any:
    """cuDNN's own description of a card."""
    return library().module.create_device_properties(description(device))
