"""Kernels run on the card in this machine, in the place of `tests.gpu.binder.Bound`."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from foreplan.base.errors import TargetError
from foreplan.runtime.cuda.engine import ready
from foreplan.runtime.cuda.launch import Address, LaunchKernel
from foreplan.runtime.cuda.libraries import driver
from foreplan.runtime.cuda.libraries.cublaslt import opened
from foreplan.runtime.cuda.libraries.cudnn import missing
from foreplan.runtime.cuda.libraries.driver import Card, CupyCard
from foreplan.runtime.cuda.libraries.nvml import Nvml


def opened_or_skipped() -> Card:
    """The card; where there is none, the module that asks is skipped, which says what is missing."""
    try:
        ctypes.CDLL("libcuda.so.1")
        return driver.card()
    except OSError as error:  # what opening a card says as well, once CuPy is imported
        pytest.skip(
            f"needs an NVIDIA card and its driver (`make gpu-check` runs this there): {error}", allow_module_level=True
        )
    except TargetError as error:
        pytest.skip(str(error), allow_module_level=True)


def whole(array: np.ndarray) -> np.ndarray:
    """What an array is a part of, with what is around it."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


class CardBound:
    """A kernel's instructions on NumPy memory, which is copied to the card, as a whole, and back."""

    def __init__(
        self,
        kernel: LaunchKernel,
        inputs: Sequence[np.ndarray],
        outputs: Sequence[np.ndarray],
        workspace: np.ndarray,
        reverse: bool = False,
    ) -> None:
        self.card = driver.card()
        self.there: dict[int, tuple[np.ndarray, object, int]] = {}
        arrays = {"input": list(inputs), "output": list(outputs), "workspace": [workspace]}
        self.starts = {of: [self._address(array) for array in found] for of, found in arrays.items()}
        made = [ready(self.card, instruction, self._where) for instruction in kernel.instructions]
        self.calls = [call for call in made if call is not None]

    def _where(self, place: Address) -> int:
        return self.starts[place.of][place.index] + place.offset

    def _address(self, array: np.ndarray) -> int:
        """Of an array's first element on the card, where it is aligned to 256 bytes as it is here."""
        memory = whole(array)
        if id(memory) not in self.there:
            block = self.card.allocate(memory.nbytes + 256)
            self.there[id(memory)] = memory, block, block.ptr + (memory.ctypes.data - block.ptr) % 256
        return self.there[id(memory)][2] + array.ctypes.data - memory.ctypes.data

    def __call__(self) -> None:
        with lost_cards_end_the_process():
            for memory, _, address in self.there.values():
                self.card.copying(address, memory.ctypes.data, memory.nbytes)()
            for call in self.calls:
                call()
            for memory, _, address in self.there.values():
                self.card.copying(memory.ctypes.data, address, memory.nbytes)()
            self.card.synchronize()


@contextlib.contextmanager
def lost_cards_end_the_process() -> Iterator[None]:
    """After an illegal address, whatever a process asks of its card fails: rather than let every further test of this
    process fail for it, end the process. pytest-xdist names the test, and goes on with another process.
    """
    try:
        yield
    except RuntimeError as error:
        try:
            driver.card().synchronize()
        except RuntimeError:
            test = os.environ.get("PYTEST_CURRENT_TEST")
            print(f"{test}: the card is lost to this process: {error}", file=sys.stderr)
            os._exit(1)
        raise


def main() -> None:
    """Say what checks on a card have, and what they have to do without."""
    try:
        found = CupyCard()
    except TargetError as error:
        sys.exit(str(error))
    print(f"{found.title}, compute capability {found.capability}")
    for name, version in driver.versions(Nvml()).items():
        print(f"{name} {version}")
    if reason := missing():
        print(f"NOT CHECKED, cuDNN: {reason}")
    try:
        print(f"cuBLASLt {opened(found.cuda.runtime.runtimeGetVersion() // 1000).version}")
    except TargetError as error:
        print(f"NOT CHECKED, cuBLASLt: {error}")


if __name__ == "__main__":
    main()
