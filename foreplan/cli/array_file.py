"""An .npz file whose arrays are read when they are asked for. What it holds is told from headers, at once.

A few bytes of a compressed array stand for a thousand times as many, and nobody may want it.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, replace
from typing import IO, TYPE_CHECKING

from foreplan.base.errors import UsageError
from foreplan.base.units import format_bytes
from foreplan.base.untrusted import Allowance

if TYPE_CHECKING:
    import numpy as np

_WAYS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # to compress, of which NumPy has these


@dataclass(frozen=True)
class Header:
    """What stands before the elements of an array in a file.

    Attributes:
        shape: extents.
        dtype: the element type.
        length: bytes of the header.
        checksum: of header and elements, which the archive has; reading compares it.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    length: int
    checksum: str = ""

    @property
    def nbytes(self) -> int:
        """Of all elements."""
        count = self.dtype.itemsize
        for extent in self.shape:
            count *= extent
        return count

    @classmethod
    def of(cls, file: IO[bytes], held: int) -> Header:
        """Of a file in NumPy's format, read from its beginning.

        Args:
            held: bytes that the file has.

        Raises:
            ValueError: it is none, holds objects, or breaks off.
        """
        import numpy as np

        version = np.lib.format.read_magic(file)
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"its format {version} holds records")
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file)
        if dtype.hasobject:
            raise ValueError("it holds pickled objects")
        header = cls(shape, dtype, file.tell())
        if min(shape, default=0) < 0 or not dtype.itemsize or header.length + header.nbytes > held:
            raise ValueError(f"it breaks off before the end of an array {list(shape)} of {dtype}")
        return header


class ArrayFile(Mapping[str, "np.ndarray"]):
    """The arrays of an .npz file, by name. One is read when it is asked for, and kept.

    Attributes:
        path: of the file.
        headers: by name.
    """

    headers: Mapping[str, Header]

    def __init__(self, path: str, size: int) -> None:
        """Read all headers.

        Args:
            size: bytes of the file.

        Raises:
            OSError, ValueError, zipfile.BadZipFile: it cannot be read, is no such file, or has something that is no
                array.
        """
        self.path, self._allowance = path, Allowance("data", size)
        self._read: dict[str, np.ndarray] = {}
        headers = {}
        with zipfile.ZipFile(path) as archive:
            self._entries = {entry.filename.removesuffix(".npy"): entry for entry in archive.infolist()}
            for name, entry in self._entries.items():
                if not entry.filename.endswith(".npy"):
                    raise ValueError(f"{name!r} in it is no array")
                if entry.compress_type not in _WAYS:
                    raise ValueError(f"{name!r} is compressed in a way that NumPy does not write")
                with archive.open(entry) as file:
                    headers[name] = replace(Header.of(file, entry.file_size), checksum=f"{entry.CRC:08x}")
        self.headers = headers

    def only(self, names: Iterable[str]) -> ArrayFile:
        """The same file with some of its arrays."""
        some = copy(self)
        some.headers = {name: self.headers[name] for name in names}
        return some

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self.headers:
            raise KeyError(name)
        if name not in self._read:
            self._read[name] = self._array(name, self.headers[name])
        return self._read[name]

    def _array(self, name: str, header: Header) -> np.ndarray:
        import numpy as np

        from foreplan.runtime.room import room

        if not self._allowance.has(header.nbytes):
            raise UsageError(
                f"{self.path!r}: the array {name!r} takes {format_bytes(header.nbytes)}, and with those before it "
                "that is more than a file of this size can hold"
            )
        available = room()
        if available is not None and header.nbytes > available.nbytes:
            raise UsageError(
                f"{self.path!r}: the array {name!r} takes {format_bytes(header.nbytes)} of memory, and "
                f"{format_bytes(available.nbytes)} are available ({available.source})"
            )
        try:
            with zipfile.ZipFile(self.path) as archive, archive.open(self._entries[name]) as file:
                return np.lib.format.read_array(file, allow_pickle=False)
        except MemoryError:
            raise UsageError(
                f"{self.path!r}: there is no memory for {name!r}, which takes {format_bytes(header.nbytes)}"
            ) from None
        except Exception as error:  # whatever zipfile, zlib and NumPy raise at bytes that they did not write
            reason = str(error) or type(error).__name__
            raise UsageError(f"{self.path!r} is damaged: {name!r} cannot be read ({reason})") from None

    def __contains__(self, name: object) -> bool:
        return name in self.headers

    def __iter__(self) -> Iterator[str]:
        return iter(self.headers)

    def __len__(self) -> int:
        return len(self.headers)
