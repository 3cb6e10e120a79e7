"""The cards in this machine by NVIDIA's management library, as in nvidia-smi: it needs no context."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_char_p, c_uint, c_ulonglong, c_void_p

from foreplan.base.errors import TargetError

FILE = "libnvidia-ml.so.1"  # a part of the driver


class Memory(ctypes.Structure):
    """nvmlMemory_v2_t."""

    _fields_ = [
        ("version", c_uint),
        ("total", c_ulonglong),
        ("reserved", c_ulonglong),
        ("free", c_ulonglong),
        ("used", c_ulonglong),
    ]


VERSION = ctypes.sizeof(Memory) | 2 << 24  # nvmlMemory_v2
SIGNATURES = {
    "nvmlInit_v2": (),
    "nvmlSystemGetDriverVersion": (c_char_p, c_uint),
    "nvmlDeviceGetCount_v2": (POINTER(c_uint),),
    "nvmlDeviceGetHandleByIndex_v2": (c_uint, POINTER(c_void_p)),
    "nvmlDeviceGetHandleByPciBusId_v2": (c_char_p, POINTER(c_void_p)),
    "nvmlDeviceGetIndex": (c_void_p, POINTER(c_uint)),
    "nvmlDeviceGetName": (c_void_p, c_char_p, c_uint),
    "nvmlDeviceGetMemoryInfo_v2": (c_void_p, POINTER(Memory)),
}
_TEXT = 96  # bytes of a name or a version, at most


class Nvml:
    """The library, opened.

    Attributes:
        driver: its version, such as "580.105.08".
        titles: names of the cards, in the library's own order.
    """

    def __init__(self) -> None:
        """Loads the library.

        Raises:
            TargetError: there is no driver, or none that works.
        """
        try:
            self.library = ctypes.CDLL(FILE)
            for name, arguments in SIGNATURES.items():
                getattr(self.library, name).argtypes = arguments
        except (OSError, AttributeError) as error:
            raise TargetError(
                f"there is no driver for an NVIDIA card in this machine, or one that is too old: {error}"
            ) from None
        self.library.nvmlErrorString.restype, self.library.nvmlErrorString.argtypes = c_char_p, (ctypes.c_int,)
        self._call("nvmlInit_v2")
        self.driver = self._text("nvmlSystemGetDriverVersion")
        count = c_uint()
        self._call("nvmlDeviceGetCount_v2", byref(count))
        self._cards = [self._handle("nvmlDeviceGetHandleByIndex_v2", i) for i in range(count.value)]
        self.titles = [self._text("nvmlDeviceGetName", card) for card in self._cards]

    def used(self) -> list[int]:
        """Bytes of each card's memory that are taken, by all processes."""
        found = []
        for card in self._cards:
            memory = Memory(version=VERSION)
            self._call("nvmlDeviceGetMemoryInfo_v2", card, byref(memory))
            found.append(int(memory.used))
        return found

    def place_of(self, bus: str) -> int:
        """The card with this address on the PCI bus, as CUDA writes it."""
        place = c_uint()
        card = self._handle("nvmlDeviceGetHandleByPciBusId_v2", bus.encode())
        self._call("nvmlDeviceGetIndex", card, byref(place))
        return place.value

    def _handle(self, function: str, which: int | bytes) -> c_void_p:
        card = c_void_p()
        self._call(function, which, byref(card))
        return card

    def _text(self, function: str, *arguments: object) -> str:
        text = ctypes.create_string_buffer(_TEXT)
        self._call(function, *arguments, text, _TEXT)
        return text.value.decode(errors="replace")

    def _call(self, name: str, *arguments: object) -> None:
        if status := getattr(self.library, name)(*arguments):
            said = self.library.nvmlErrorString(status).decode()
            raise TargetError(f"the driver of this machine does not answer: {name}: {said}")
