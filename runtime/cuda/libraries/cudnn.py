"""cuDNN, its plans, and the cards that it plans for, which need not be in this machine.

cuDNN's graph interface (through nvidia-cudnn-frontend) ranks its engines for a described device without a driver, says
how many bytes of workspace each takes, and serialises what will run there.
"""

from __future__ import annotations

import base64
import ctypes
import json
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from pathlib import Path
from typing import Any

from foreplan.base.disk_cache import file_name, keep, kept
from foreplan.base.errors import TargetError
from foreplan.base.units import align_up
from foreplan.runtime.cuda.device import Device, device_named

WORKSPACE_ALIGNMENT = 256  # bytes; cuDNN's own sizes are odd
ADDRESS_ALIGNMENT = 16  # bytes; plans need this alignment of every operand
UIDS = (1, 2, 3)  # the two inputs and the output, in the op's order
_INTEGERS = {b"i": 1, b"U": 1, b"I": 2, b"u": 2, b"l": 4, b"m": 4, b"L": 8, b"M": 8}  # UBJSON's, by their bytes
TYPES = {"float32": "FLOAT", "bfloat16": "BFLOAT16", "float16": "HALF"}
_DATA = b"cudnn_backend_dataS"  # behind it, a serialised plan has the length of cuDNN's own bytes, and these bytes
_PROFILE = re.compile(rb'(?<="GPUProfile":)\{[^{}]*\}')
_KNOBS = re.compile(rb'(?<="knobChoices":)\{[^{}]*\}')
# Engines with the knob WORKSPACE at 0 (Hopper's, of convolutions) split sums among multiprocessors that would be idle.
# They keep a tile of float32 sums for some of these, and a few counters. The number of tiles cuDNN asks from the card,
# not from its description: without a card it counts none. On an H100 (cuDNN 9.19) up to 130 of 132 had one, of these
# bytes by the knob TILE_SIZE, and counters took less than 1 KiB; no tile is larger than a multiprocessor's registers.
_TILES = {0: 1 << 16, 1: 1 << 15, 3: 1 << 17, 4: 1 << 16, 5: 1 << 14, 6: 1 << 17, 7: 1 << 15, 9: 1 << 16}
_LARGEST_TILE = 1 << 18
_COUNTERS = 1 << 10
_SPLIT_TILE = 4096  # results of a tile, about; the knob SPLIT_K is the number of parts of its sums
BETA, ADDING = b'"beta":0.0', b'"beta":1.0'  # of a serialised plan of one convolution: how much of what is there stays
# cuDNN's statuses for: no engine for this, or such tensors are not taken. With any other status, something fails or is
# missing.
_NO_ENGINE = {
    "BAD_PARAM",
    "NOT_SUPPORTED",
    *(
        f"NOT_SUPPORTED_{of}"
        for of in (
            *("GRAPH_PATTERN", "SHAPE", "DATA_TYPE", "LAYOUT", "ARCH_MISMATCH", "SHARED_MEMORY_INSUFFICIENT"),
            *("PADDING", "BAD_LAUNCH_PARAM", "CUDA_GRAPH_NATIVE_API", "INVALID_DYNAMIC_SHAPE"),
        )
    ),
}
NO_COMPILER = "NOT_SUPPORTED_RUNTIME_PREREQUISITE_MISSING"  # of engines that are compiled, without a driver


@dataclass(frozen=True)
class CudnnPlan:
    """One way that cuDNN runs an op, on one compute capability.

    Attributes:
        name: cuDNN's name of the engine and its knobs, such as `eng28_k2=4_k3=0`.
        workspace: bytes, a multiple of 256: as many as it takes on any card of the device's kind, or a few more.
        blob: the plan, serialised; equal for equal questions.
        tensor_cores: whether its engine has cuDNN's numerical note that it uses them.
    """

    name: str
    workspace: int
    blob: bytes
    tensor_cores: bool = True

    def as_json(self) -> list[Any]:
        """The form that `from_json` takes."""
        return [self.name, self.workspace, base64.b64encode(self.blob).decode(), self.tensor_cores]

    @classmethod
    def from_json(cls, record: list[Any]) -> CudnnPlan:
        """A plan from the form that `as_json` gives."""
        name, workspace, blob, tensor_cores = record
        return cls(name, workspace, base64.b64decode(blob), tensor_cores)


@dataclass(frozen=True)
class CudnnTensor:
    """Extents, and elements from one to the next along each axis."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str


class Unanswered(Exception):
    """cuDNN fails at a question, or lacks something for an answer. This does not mean that it has no plan."""


def check_refusal(error: Exception, also: Collection[str] = ()) -> None:
    """Accept an error that says: cuDNN does not support something.

    Args:
        error: of cuDNN's package: by its own checks, or with cuDNN's statuses in its text.
        also: further statuses with this meaning here.

    Raises:
        Unanswered: the error says something else.
    """
    said = set(re.findall(r"CUDNN_STATUS_(\w+)", str(error)))
    if said - _NO_ENGINE - set(also) or not (said or isinstance(error, library().module.cudnnGraphNotSupportedError)):
        raise Unanswered(f"cuDNN {library().version} says: {str(error).strip()[:400]}") from None


def unanswered(error: Unanswered) -> tuple[CudnnPlan, ...]:
    """No plans, and a warning with the reason."""
    warnings.warn(f"cuDNN could not be asked, so that kernels of foreplan's own run instead: {error}", stacklevel=2)
    return ()


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


def workspace_of(blob: bytes, device: Device) -> int:
    """Bytes of workspace that a serialised plan takes, asked from cuDNN again, rounded up as in `CudnnPlan`.

    Raises:
        TargetError: cuDNN is not there, or does not take the plan: damaged, or made by another version.
    """
    try:
        return workspace_told(blob, device)
    except Exception as error:  # the package's own errors have no common type
        raise TargetError(f"cuDNN {library().version} does not take this plan: {error}") from None


def workspace_told(blob: bytes, device: Device) -> int:
    """As `workspace_of`, but errors are the package's own."""
    graph = library().module.pygraph(device_property=properties(device), sm_version=device.compute)
    graph.deserialize(bytearray(on_card(blob, description(device))))
    return bounded(int(graph.get_workspace_size()), blob, device)


def bounded(told: int, blob: bytes, device: Device) -> int:
    """Bytes of workspace that a serialised plan takes at most on a card, rounded up as in `CudnnPlan`.

    Args:
        told: the bytes that cuDNN tells without the card.
    """
    knobs = _knobs(blob)
    if knobs.get("WORKSPACE") == 0:
        told += device.multiprocessors * _TILES.get(knobs.get("TILE_SIZE", -1), _LARGEST_TILE) + _COUNTERS
    return align_up(told, WORKSPACE_ALIGNMENT)


def busy(blob: bytes, results: int, device: Device) -> float:
    """The share of a card's multiprocessors that work on `results` results.

    One multiprocessor makes all sums of a tile, or one of the plan's parts of them. The share is less than 1 if there
    are fewer parts than multiprocessors.
    """
    knobs = _knobs(blob)
    split = knobs.get("SPLIT_K", knobs.get("SPLIT_K_SLC"))
    if split is not None:
        return device.at_work(ceil(results / _SPLIT_TILE) * max(1, split))
    tile = _TILES.get(knobs.get("TILE_SIZE", -1))
    if knobs.get("WORKSPACE") != 1 or tile is None:
        return 1.0
    return device.at_work(ceil(4 * results / tile))


def in_clusters(blob: bytes) -> bool:
    """Whether multiprocessors share their loads in a plan's engine, as in Hopper's engines."""
    return "TILE_CGA_M" in _knobs(blob)


def _knobs(blob: bytes) -> dict[str, int]:
    """The settings of a serialised plan's engine, by the names of cuDNN's knobs."""
    found = _KNOBS.search(blob)
    return {name.removeprefix("CUDNN_KNOB_TYPE_"): n for name, n in json.loads(found[0]).items()} if found else {}


def on_card(blob: bytes, described: str) -> bytes:
    """A serialised plan, changed to one for another card of its compute capability, or for another driver.

    A plan describes its card, and cuDNN reads the plan only on a card with an equal description, which includes the
    number of multiprocessors and the driver's version. Engines and workspaces depend on neither.

    Args:
        described: the card, as cuDNN's `device_properties` are serialised.
    """
    before, key, after = blob.partition(_DATA)
    count = _INTEGERS.get(after[:1], 0)
    size = int.from_bytes(after[1 : 1 + count], "big")
    text, rest = after[1 + count : 1 + count + size], after[1 + count + size :]
    profile = _PROFILE.search(text)
    if profile is None or not count:
        return blob  # cuDNN will refuse it
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


def plans_kept(
    question: str, device: Device, file: Path, make: Callable[[], Iterable[CudnnPlan]]
) -> tuple[CudnnPlan, ...]:
    """Plans from disk, if they were made before by the same libraries and the same text of `file` and this file.

    Raises:
        Unanswered: there is no answer; then nothing is kept.
    """
    found = library()
    asked = repr((found.version, found.frontend, found.cuda, description(device), question)).encode()
    said = b"".join(each.read_bytes() for each in (Path(__file__), file))
    name = file_name(asked + said, "json", "cudnn")
    content = kept(name)
    if content is None:
        plans = tuple(make())
        keep(name, json.dumps([plan.as_json() for plan in plans]).encode())
        return plans
    return tuple(CudnnPlan.from_json(record) for record in json.loads(content))


def falling(plans: Iterator[CudnnPlan]) -> Iterator[CudnnPlan]:
    """The plans with less workspace than all before. After a plan without workspace, no further one is made."""
    least: int | None = None
    for plan in plans:
        if least is None or plan.workspace < least:
            least = plan.workspace
            yield plan
        if not least:
            return


def uncounted(blob: bytes) -> bytes:
    """A serialised plan (UBJSON) without the number of graphs made before it, which differs from run to run."""
    before, key, after = blob.partition(b"i\x03gid")
    if not key or after[:1] not in _INTEGERS:
        return blob
    return before + key + b"i\x01" + after[1 + _INTEGERS[after[:1]] :]


@lru_cache(maxsize=64)
def properties(device: Device) -> Any:
    """cuDNN's own description of a card."""
    return library().module.create_device_properties(description(device))
