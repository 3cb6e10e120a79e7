"""Where the bytes of parameters, state and constants come from: described here, drawn when a session binds."""

from __future__ import annotations

import os
import stat
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np

from foreplan.errors import ModelError
from foreplan.graph.types import TensorType


class Initializer(Protocol):
    """Describes the first content of a stored value without holding it."""

    def fill(self, out: np.ndarray, rng: np.random.Generator) -> None:
        """Write the content into `out`, drawing from `rng` if it is random."""

    def __str__(self) -> str: ...


def generator_for(seed: int, name: str) -> np.random.Generator:
    """The generator of one named value: depends on the seed and the name alone, not on the order of drawing."""
    return np.random.Generator(np.random.Philox(key=[seed, zlib.crc32(name.encode())]))


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
        out[...] = rng.standard_normal(out.shape, dtype=np.float32) * self.std + self.mean

    def __str__(self) -> str:
        return f"normal(std={self.std!r}, mean={self.mean!r})"


@dataclass(frozen=True)
class TruncatedNormal:
    """Draws from N(0, std²), redrawn where they fall outside two standard deviations."""

    std: float

    def fill(self, out: np.ndarray, rng: np.random.Generator) -> None:
        """Draw, and draw again where a sample lies outside."""
        sample = rng.standard_normal(out.shape, dtype=np.float32)
        outside = np.abs(sample) > 2
        while outside.any():
            sample[outside] = rng.standard_normal(int(outside.sum()), dtype=np.float32)
            outside = np.abs(sample) > 2
        out[...] = sample * self.std

    def __str__(self) -> str:
        return f"truncated_normal(std={self.std!r})"


@dataclass(frozen=True)
class Uniform:
    """Independent draws from [low, high)."""

    low: float
    high: float

    def fill(self, out: np.ndarray, rng: np.random.Generator) -> None:
        """Draw."""
        out[...] = rng.random(out.shape, dtype=np.float32) * (self.high - self.low) + self.low

    def __str__(self) -> str:
        return f"uniform(low={self.low!r}, high={self.high!r})"


@dataclass(frozen=True)
class RandomSeed:
    """The first state of the random ops, uint64[2]: a seed drawn from the session's own, and step 0."""

    def fill(self, out: np.ndarray, rng: np.random.Generator) -> None:
        """Draw the seed."""
        out[:] = rng.integers(1 << 63), 0

    def __str__(self) -> str:
        return "random_seed()"


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
            with open(self.path, "rb") as file:
                self._check(file)
                data = np.fromfile(file, dtype=self.type.dtype.numpy, count=self.type.size)
        except OSError as error:
            raise ModelError(f"the weights in {self.path} cannot be read: {error.strerror}") from None
        if data.size != self.type.size:
            raise self._changed()
        out[...] = data.reshape(out.shape)

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
