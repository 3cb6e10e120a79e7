"""Where the bytes of parameters, state and constants come from: described here, drawn when a session binds."""

from __future__ import annotations

import errno
import os
import stat
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np

from foreplan.base.errors import ModelError
from foreplan.graph.types import TensorType

BLOCK = 1 << 20  # bytes that are drawn or read at a time: nothing as large as the content lies beside it


class Initializer(Protocol):
    """Describes the first content of a stored value without holding it."""

    def fill(self, out: np.ndarray, rng: np.random.Generator) -> None:
        """Write the content into `out`, drawing from `rng` if it is random."""

    def __str__(self) -> str: ...


def generator_for(seed: int, name: str) -> np.random.Generator:
    """The generator of one named value: depends on the seed and the name alone, not on the order of drawing."""
    return np.random.Generator(np.random.Philox(key=[seed, zlib.crc32(name.encode())]))


def blocks(out: np.ndarray) -> Iterator[np.ndarray]:
    """An array as parts of at most BLOCK bytes, or of one element, in C order."""
    if out.nbytes <= BLOCK or out.size == 1:
        yield out
        return
    rows = BLOCK * len(out) // out.nbytes
    if not rows:
        for row in out:
            yield from blocks(row)
        return
    for start in range(0, len(out), rows):
        yield out[start : start + rows]


@dataclass(frozen=True)
class Fill:
    """One number everywhere."""

    value: float

    def fill(self, out: np.ndarray, rng: np.random.Generator) -> None:
        """Write the number."""
        out[...] = self.value

    def __str__(self) -> str:
        return f"fill({self.value!r})"


@dataclass(frozen=True)
class Normal:
    """Independent draws from N(mean, std²)."""

    std: float
    mean: float = 0.0

    def fill(self, out: np.ndarray, rng: np.random.Generator) -> None:
        """Draw."""
        for block in blocks(out):
            block[...] = rng.standard_normal(block.shape, dtype=np.float32) * self.std + self.mean

    def __str__(self) -> str:
        return f"normal(std={self.std!r}, mean={self.mean!r})"


@dataclass(frozen=True)
class TruncatedNormal:
    """Draws from N(0, std²), redrawn where they fall outside two standard deviations."""

    std: float

    def fill(self, out: np.ndarray, rng: np.random.Generator) -> None:
        """Draw, and draw again where a sample lies outside."""
        start, found = 0, []
        for block in blocks(out):
            sample = rng.standard_normal(block.shape, dtype=np.float32)
            block[...] = sample * self.std
            found.append(start + np.flatnonzero(np.abs(sample) > 2))
            start += block.size
        outside = np.concatenate(found)
        while outside.size:
            sample = rng.standard_normal(outside.size, dtype=np.float32)
            out.flat[outside] = sample * self.std
            outside = outside[np.abs(sample) > 2]

    def __str__(self) -> str:
        return f"truncated_normal(std={self.std!r})"


@dataclass(frozen=True)
class Uniform:
    """Independent draws from [low, high)."""

    low: float
    high: float

    def fill(self, out: np.ndarray, rng: np.random.Generator) -> None:
        """Draw."""
        for block in blocks(out):
            block[...] = rng.random(block.shape, dtype=np.float32) * (self.high - self.low) + self.low

    def __str__(self) -> str:
        return f"uniform(low={self.low!r}, high={self.high!r})"


@dataclass(frozen=True)
class RandomSeed:
    """The first state of the random ops, uint64[2]: a seed drawn from the session's own, and step 0. Ranks have other
    seeds.

    Attributes:
        alike: of so many neighbouring ranks the seed is the same.
    """

    alike: int = 1

    def __post_init__(self) -> None:
        if self.alike < 1:
            raise ValueError(f"alike must be 1 or more, and is {self.alike}")

    def fill(self, out: np.ndarray, rng: np.random.Generator) -> None:
        """Draw the seed."""
        out[:] = rng.integers(1 << 63), 0

    def __str__(self) -> str:
        return f"random_seed({f'alike={self.alike}' if self.alike > 1 else ''})"


@dataclass(frozen=True)
class Missing:
    """No content yet, as that of a module on PyTorch's device `meta`: a session steps when it has been loaded."""

    def fill(self, out: np.ndarray, rng: np.random.Generator) -> None:
        """Write what is no number, or zeros."""
        out[...] = np.nan if out.dtype.kind in "fV" else 0

    def __str__(self) -> str:
        return "missing()"


@dataclass(frozen=True, eq=False)
class Array:
    """Content held in memory; for what is small or was handed over by the user."""

    array: np.ndarray

    def fill(self, out: np.ndarray, rng: np.random.Generator) -> None:
        """Copy the array."""
        out[...] = self.array.reshape(out.shape)

    def __str__(self) -> str:
        if self.array.size <= 64:
            return f"array({self.array.tolist()!r})"
        return f"array(crc32=0x{zlib.crc32(np.ascontiguousarray(self.array).view(np.uint8).data):08x})"


@dataclass(frozen=True)
class Stored:
    """Content at a byte range of a file, dense and in C order, read only when a session binds.

    Attributes:
        path: of the file, absolute.
        offset: of the first byte.
        type: of the content.
        file_nbytes: size of the whole file.
        before: the bytes right before the content, such as its name and length in an ONNX file. With the size they
            tell another model that has taken the file's place, and let newer weights of the same model pass.
    """

    path: Path
    offset: int
    type: TensorType
    file_nbytes: int
    before: bytes = b""

    def fill(self, out: np.ndarray, rng: np.random.Generator) -> None:
        """Read the bytes.

        Raises:
            ModelError: the file has gone, or is another one by now.
        """
        try:
            if not self.path.is_file():  # to open a pipe would wait for ever
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            with open(self.path, "rb") as file:
                self._check(file)
                for block in blocks(out):
                    data = np.fromfile(file, dtype=self.type.dtype.numpy, count=block.size)
                    if data.size != block.size:
                        raise self._changed()
                    block[...] = data.reshape(block.shape)
        except OSError as error:
            raise ModelError(f"the weights in {self.path} cannot be read: {error.strerror}") from None

    def _check(self, file: BinaryIO) -> None:
        """Leave the file where the content begins."""
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_size != self.file_nbytes or self.offset < len(self.before):
            raise self._changed()
        file.seek(self.offset - len(self.before))
        if file.read(len(self.before)) != self.before:
            raise self._changed()

    def _changed(self) -> ModelError:
        return ModelError(
            f"{self.path} is not the file that the weights at its offset {self.offset} belong to: it has changed since "
            "the model was imported; import it, or plan, again"
        )

    def __str__(self) -> str:
        return f"stored({self.path.name!r}, offset={self.offset})"
