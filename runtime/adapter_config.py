"""`adapter_config.json` as PEFT writes it: what it says of each module's adapter. Nothing in it is trusted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Config:
    """What a configuration says, each of the right type.

    Attributes:
        alpha, r: of modules that no pattern names; None: not said.
        alphas, ranks: by pattern.
        is_rs: whether the scale is alpha / √rank, as rank-stabilised adapters have it, and not alpha / rank.
        is_dora: whether adapters have magnitudes.
    """

    alpha: float
    r: int | None
    alphas: Patterns
    ranks: Patterns
    is_rs: bool
    is_dora: bool

    @classmethod
    def of(cls, found: Any) -> Config:
        """The configuration that a JSON value describes.

        Raises:
            ValueError: it describes no adapters as foreplan has them; says why.
        """
        if not isinstance(found, dict) or found.get("peft_type") != "LORA":
            raise ValueError("does not describe LoRA's adapters")
        if other := [key for key in ("use_bdlora", "lora_bias") if found.get(key)]:
            raise ValueError(f"has {other[0]}, which foreplan's adapters do not have")
        for key in ("use_rslora", "use_dora"):
            if not isinstance(found.get(key), bool | None):
                raise ValueError(f"has {key} that is neither true nor false")
        return cls(
            _alpha(found.get("lora_alpha"), "lora_alpha"),
            None if found.get("r") is None else _count(found["r"], "r"),
            Patterns.of({key: _alpha(each, "alpha_pattern") for key, each in _table(found, "alpha_pattern").items()}),
            Patterns.of({key: _count(each, "rank_pattern") for key, each in _table(found, "rank_pattern").items()}),
            bool(found.get("use_rslora")),
            bool(found.get("use_dora")),
        )

    def rank(self, module: str) -> int | None:
        """The rank of a module's adapter; None: not said."""
        return self.ranks.first(module, self.r)

    def scale(self, module: str, rank: int) -> float:
        """What PEFT multiplies the product of a module's factors with."""
        alpha: float = self.alphas.first(module, self.alpha)
        return alpha / (math.sqrt(rank) if self.is_rs else rank)


@dataclass(frozen=True)
class Patterns:
    """Values by the ends of modules' names. Keys are taken literally, and not as expressions.

    Attributes:
        whole, ends: of keys that mean one module, and of others: where a key stands among all, and its value.
    """

    whole: Mapping[str, tuple[int, Any]]
    ends: Mapping[str, tuple[int, Any]]

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Patterns:
        """Of a table of PEFT's; a key that means one module begins with `^`."""
        whole: dict[str, tuple[int, Any]] = {}
        ends: dict[str, tuple[int, Any]] = {}
        for i, (key, value) in enumerate(values.items()):
            literal = key.replace("\\", "")
            if literal.startswith("^"):
                whole.setdefault(literal[1:], (i, value))
            else:
                ends.setdefault(literal, (i, value))
        return cls(whole, ends)

    def first(self, module: str, default: Any) -> Any:
        """The value of the first key that means a module."""
        parts = module.split(".")
        found = [self.ends.get(".".join(parts[i:])) for i in range(len(parts))]
        known = [each for each in (self.whole.get(module), *found) if each is not None]
        return min(known, key=lambda each: each[0])[1] if known else default


def _table(found: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    table = found.get(key)
    if table is not None and not isinstance(table, dict):
        raise ValueError(f"has {key} that is no table")
    return table or {}


def _alpha(value: Any, key: str) -> float:
    try:
        number = math.nan if isinstance(value, bool) or not isinstance(value, int | float) else float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"has no number as {key}")
    return number


def _count(value: Any, key: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 31:
        raise ValueError(f"has no whole number above 0 as {key}")
    return value
