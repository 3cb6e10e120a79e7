"""CuPy that is not installed: what a card is asked when it is opened."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest


class DriverError(RuntimeError):
    pass


def stand_in(
    monkeypatch: pytest.MonkeyPatch, driver_version: int, error: str = "", cards: int = 1, used: list[int] | None = None
) -> None:
    """CuPy for CUDA 13, with a driver of some version.

    Args:
        used: gets the number of each card that a thread begins to use.
    """

    def attribute(number: int, device: int) -> int:
        if error:
            raise DriverError(error)
        return {75: 9, 76: 0}[number]

    runtime = SimpleNamespace(
        driverGetVersion=lambda: driver_version,
        runtimeGetVersion=lambda: 13020,
        CUDARuntimeError=DriverError,
        deviceGetAttribute=attribute,
        deviceGetPCIBusId=lambda device: f"0000:{0x3B + device:02X}:00.0",
        getDeviceCount=lambda: cards,
        setDevice=([] if used is None else used).append,
        getDeviceProperties=lambda device: {"name": b"A card"} if not error else attribute(75, device),
    )
    package, cuda = ModuleType("cupy"), ModuleType("cupy.cuda")
    package.cuda, package.__version__ = cuda, "14.2.0"  # type: ignore[attr-defined]
    cuda.runtime, cuda.Stream = runtime, lambda non_blocking: SimpleNamespace(ptr=7)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupy", package)
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
