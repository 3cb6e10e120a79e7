"""Low-rank adapters of weights (LoRA, Hu et al. 2021, arXiv:2106.09685) as stored values: their names, and how the
adapted weight is W + scale · B·A. With a magnitude m (DoRA, Liu et al. 2024, arXiv:2402.09353), each output's part of
that sum is scaled to have the norm that m says.

A is [rank, in] and B is [out, rank], for a convolution A is [rank, in, *taps] and B is [out, rank, 1, …]. Names are
those of PEFT: `attn.lora_A.weight` and `attn.lora_B.weight` stand beside `attn.weight`, `wte.lora_embedding_A` and
`wte.lora_embedding_B` beside the table `wte.weight`. m is `attn.lora_magnitude_vector`, [out], for a convolution
[1, out, 1, …].
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable
from dataclasses import dataclass

import numpy as np

from foreplan.graph.init import Initializer

FACTORS = (".lora_A.weight", ".lora_B.weight")
OF_TABLES = (".lora_embedding_A", ".lora_embedding_B")
MAGNITUDE = ".lora_magnitude_vector"
LEAST_NORM = float(np.finfo(np.float32).tiny)  # is divided by where a part of a weight is zero: that part stays so


@dataclass(frozen=True)
class AdapterZero:
    """Zeros: the first content of the factor with which an adapter begins as none. It tells how the adapter is used.

    Attributes:
        scale: alpha / rank.
        transposed: whether the weight is held as [in, out], as tables are, so that it gets the transpose of B·A.
    """

    scale: float
    transposed: bool = False

    def fill(self, out: np.ndarray, rng: np.random.Generator) -> None:
        """Write zeros."""
        out[...] = 0

    def __str__(self) -> str:
        return f"adapter_zero(scale={self.scale!r}, transposed={self.transposed!r})"


@dataclass(frozen=True)
class AdapterMagnitude:
    """The norms of the adapted weight, which a session writes when it has the weight."""

    def fill(self, out: np.ndarray, rng: np.random.Generator) -> None:
        """Write ones, as long as there is no weight."""
        out[...] = 1

    def __str__(self) -> str:
        return "adapter_magnitude()"


@dataclass(frozen=True)
class Adapter:
    """One adapter among stored values.

    Attributes:
        module: the part of the model that holds the weight; for a weight without a module, its own name.
        a, b: names of the two factors.
        weight: name of the weight.
        scale, transposed: see `AdapterZero`.
        magnitude: name of the magnitudes; None without DoRA.
    """

    module: str
    a: str
    b: str
    weight: str
    scale: float
    transposed: bool
    magnitude: str | None = None

    @property
    def stored(self) -> tuple[str, ...]:
        """The names of what belongs to the adapter."""
        return (self.a, self.b) if self.magnitude is None else (self.a, self.b, self.magnitude)

    def adapted(
        self, weight: np.ndarray, a: np.ndarray, b: np.ndarray, magnitude: np.ndarray | None = None
    ) -> np.ndarray:
        """The weight with its adapter; all in one type."""
        product = np.tensordot(b.reshape(b.shape[:2]), a, 1) * a.dtype.type(self.scale)
        changed: np.ndarray = weight + (product.T if self.transposed else product)
        if magnitude is None:
            return changed
        gain = magnitude.reshape(-1) / np.maximum(self.norms(changed), LEAST_NORM)
        return changed * gain.astype(weight.dtype).reshape(-1, *[1] * (0 if self.transposed else weight.ndim - 1))

    def norms(self, weight: np.ndarray) -> np.ndarray:
        """The norm of each output's part of a weight: float64[out]."""
        flat = weight.reshape(len(weight), math.prod(weight.shape[1:]))
        squares = np.einsum("ij,ij->j" if self.transposed else "ij,ij->i", flat, flat, dtype=np.float64)
        return np.asarray(np.sqrt(squares))


def module_of(weight: str) -> str:
    """The module of a weight, as PEFT names adapters after it."""
    return weight.removesuffix(".weight")


def is_of_adapter(name: str) -> bool:
    """Whether a stored value of this name belongs to an adapter."""
    return name.endswith((*FACTORS, *OF_TABLES, MAGNITUDE))


def adapters_in(stored: Iterable[tuple[str, Initializer | None]], names: Container[str]) -> tuple[Adapter, ...]:
    """The adapters among stored values, given as names and first contents.

    Args:
        names: of all stored values.
    """
    found = []
    for name, init in stored:
        if isinstance(init, AdapterZero):
            ends = next(ends for ends in (FACTORS, OF_TABLES) if name.endswith(ends))
            module = name.removesuffix(ends[0]).removesuffix(ends[1])
            weight = f"{module}.weight" if f"{module}.weight" in names else module
            a, b = (module + end for end in ends)
            magnitude = module + MAGNITUDE if module + MAGNITUDE in names else None
            found.append(Adapter(module, a, b, weight, init.scale, init.transposed, magnitude))
    return tuple(found)
