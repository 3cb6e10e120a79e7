"""The profile of the card in this machine, from its driver's answers."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from foreplan.base.errors import TargetError
from foreplan.runtime.cuda.device import PER_NODE, Device, pcie_of
from foreplan.runtime.cuda.libraries.number import own_number

# cudaDeviceAttr, by number (CUDA Runtime API, data types).
_CLOCK_KHZ, _MULTIPROCESSORS, _MEMORY_CLOCK_KHZ, _MEMORY_BITS = 13, 16, 36, 37
_L2_BYTES, _THREADS, _MAJOR, _MINOR, _SHARED, _SHARED_OF_BLOCK, _BLOCKS = 38, 39, 75, 76, 81, 97, 106


@dataclass(frozen=True)
class Architecture:
    """The work of a multiprocessor in a clock, by compute capability; no driver tells it.

    Attributes:
        lanes: float32 multiply-adds.
        products: multiply-adds of dense bfloat16 or float16 products with float32 sums, by tensor cores.
        bus_bytes_per_second: of sixteen lanes of such cards' PCIe generation, in one direction.
        narrow: the precisions of tensor cores.
    """

    lanes: int
    products: int
    bus_bytes_per_second: int
    narrow: tuple[str, ...] = ("tensorfloat32", "bfloat16", "float16")


# From NVIDIA's white papers of Turing, Ampere (GA100, GA102), Ada, Hopper and Blackwell.
ARCHITECTURES = {
    75: Architecture(64, 512, 16_000_000_000, ("float16",)),
    80: Architecture(64, 1024, 32_000_000_000),
    86: Architecture(128, 512, 32_000_000_000),
    90: Architecture(128, 2048, 64_000_000_000),
    100: Architecture(128, 4096, 64_000_000_000),
    120: Architecture(128, 512, 64_000_000_000),
}


def peaks_of(title: str, compute: int, multiprocessors: int, clock_hz: int) -> tuple[tuple[str, int], ...]:
    """Operations per second of dense products by precision, a multiply-add being two, at this clock.

    tensorfloat32 goes half as fast as bfloat16; GeForce cards sum to float32 at half the speed of others.
    """
    made = architecture_of(compute)
    every_clock = 2 * multiprocessors * clock_hz
    products = made.products // 2 if "GeForce" in title else made.products
    rates = {"tensorfloat32": products // 2, "bfloat16": products, "float16": products}
    tensor = tuple((name, rates[name] * every_clock) for name in made.narrow)
    return (("float32", made.lanes * every_clock), *tensor)


def architecture_of(compute: int) -> Architecture:
    """The architecture of a compute capability (90 for 9.0), or of the newest known one before it."""
    older = [known for known in ARCHITECTURES if known <= compute]
    return ARCHITECTURES[max(older, default=min(ARCHITECTURES))]


def device_from(attribute: Callable[[int], int], title: str, memory_bytes: int) -> Device:
    """A profile from the driver's answers.

    Args:
        attribute: the value of a cudaDeviceAttr.
        title: the card's name.
        memory_bytes: total device memory as cudaMemGetInfo gives it.
    """
    major, minor = attribute(_MAJOR), attribute(_MINOR)
    multiprocessors, clock_hz = attribute(_MULTIPROCESSORS), 1000 * attribute(_CLOCK_KHZ)
    memory_clock_hz = 1000 * attribute(_MEMORY_CLOCK_KHZ)
    bus = architecture_of(10 * major + minor).bus_bytes_per_second
    short = title.replace("NVIDIA", "").replace("GeForce", "").lower()
    return Device(
        name=re.sub(r"[^a-z0-9]+", "-", short).strip("-") or "gpu",
        title=title,
        capability=f"{major}.{minor}",
        multiprocessors=multiprocessors,
        memory_bytes=memory_bytes,
        bytes_per_second=2 * memory_clock_hz * attribute(_MEMORY_BITS) // 8,
        bus_bytes_per_second=bus,
        l2_bytes=attribute(_L2_BYTES),
        shared_bytes_per_multiprocessor=attribute(_SHARED),
        shared_bytes_per_block=attribute(_SHARED_OF_BLOCK),
        threads_per_multiprocessor=attribute(_THREADS),
        blocks_per_multiprocessor=attribute(_BLOCKS),
        clock_hz=clock_hz,
        memory_clock_hz=memory_clock_hz,
        link=pcie_of(title, bus),
        per_node=PER_NODE,
        peaks=peaks_of(title, 10 * major + minor, multiprocessors, clock_hz),
        sources=(
            "the driver of this card: memory, counts, sizes and clocks",
            "computed from them and the architecture: bandwidth and peaks at the highest clock",
            "assumed: the bus, the link and the node",
        ),
    )


def captured() -> Device:
    """The profile of the card in this machine; of several, of the one for this process.

    Raises:
        TargetError: CuPy is not installed, or finds no card or no driver that goes with it.
    """
    try:
        from cupy.cuda import runtime
    except ImportError as error:
        raise TargetError(
            f"CuPy, which asks a card for its figures, cannot be imported: {error}; install it with "
            f"`pip install 'foreplan[cuda13]'`, or 'foreplan[cuda12]' for a driver older than 580"
        ) from None
    try:
        if own := own_number(runtime):
            runtime.setDevice(own)  # what is asked for memory gets a context
        title = runtime.getDeviceProperties(own)["name"].decode()
        return device_from(lambda number: int(runtime.deviceGetAttribute(number, own)), title, runtime.memGetInfo()[1])
    except runtime.CUDARuntimeError as error:
        raise TargetError(f"there is no card to ask in this machine, or no driver for it: {error}") from None
