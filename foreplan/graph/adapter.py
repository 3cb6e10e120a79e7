"""Low-rank adapters of weights (LoRA, Hu et al. 2021, arXiv:2106.09685) as stored values: their names, and how the
adapted weight is W + scale · B·A.

A is [rank, in] and B is [out, rank], for a convolution A is [rank, in, *taps] and B is [out, rank, 1, …]. Names are
those of PEFT: `attn.lora_A.weight` and `attn.lora_B.weight` stand beside `attn.weight`, `wte.lora_embedding_A` and
`wte.lora_embedding_B` beside the table `wte.weight`.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass

import numpy as np

from foreplan.graph.init import Initializer

FACTORS = (".lora_A.weight", ".lora_B.weight")
OF_TABLES = (".lora_embedding_A", ".lora_embedding_B")


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
class Adapter:
    """One adapter among stored values.

    Attributes:
        module: the part of the model that holds the weight; for a weight without a module, its own name.
        a, b: names of the two factors.
        weight: name of the weight.
        scale, transposed: see `AdapterZero`.
    """

    module: str
    a: str
    b: str
    weight: str
    scale: float
    transposed: bool

    def change(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """What the weight gets: scale · B·A, in the weight's shape."""
        product = np.tensordot(b.reshape(b.shape[:2]), a, 1) * a.dtype.type(self.scale)
        return product.T if self.transposed else product


def module_of(weight: str) -> str:
    """The module of a weight, as PEFT names adapters after it."""
    return weight.removesuffix(".weight")


def is_factor(name: str) -> bool:
    """Whether a stored value of this name is a factor of an adapter."""
    return name.endswith((*FACTORS, *OF_TABLES))


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
            found.append(Adapter(module, a, b, weight, init.scale, init.transposed))
    return tuple(found)
