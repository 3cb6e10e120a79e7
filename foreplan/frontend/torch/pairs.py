"""Complex numbers, which no graph holds: pairs of tensors, as far as a model turns them and comes back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from foreplan.errors import UnsupportedError
from foreplan.frontend.tracing.tensor import Tensor, as_tensor

if TYPE_CHECKING:
    from foreplan.frontend.torch.call import Call
    from foreplan.frontend.torch.table import Entry


@dataclass(frozen=True)
class Pair:
    """Complex numbers: their real and their imaginary parts, of one shape and type."""

    real: Any
    imag: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Extent along each axis."""
        return tuple(self.real.shape)


# Linear in a complex number, part by part; ops that only move elements are too.
_EACH = frozenset(
    [
        "add",
        "sub",
        "neg",
        "sum",
        "mean",
        "cat",
        "stack",
        "clone",
        "contiguous",
        "index",
        "index_select",
        "gather",
        "roll",
        "flip",
    ]
)


def as_pair(x: Any) -> Pair:
    """Numbers of any kind as complex ones."""
    if isinstance(x, Pair):
        return x
    if isinstance(x, np.ndarray) and x.dtype.kind == "c":
        return Pair(np.ascontiguousarray(x.real), np.ascontiguousarray(x.imag))
    if isinstance(x, complex):
        return Pair(x.real, x.imag)
    return Pair(x, 0.0)


def handle(c: Call, known: Entry | None, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """An op of which an argument or the result is complex.

    Raises:
        UnsupportedError: it is none of those that are written with pairs.
    """
    own = _OWN.get(c.name.removesuffix("_"))
    if own is not None:
        return own(c, *args, **kwargs)
    if known is None or not (known.views or c.name.removesuffix("_") in _EACH):
        raise UnsupportedError(
            "complex numbers in this op; foreplan turns them as pairs in products, sums and views alone"
        )
    like = _part_of(c.result)
    halves = []
    for take in (lambda pair: pair.real, lambda pair: pair.imag):
        given = [_mapped(each, take) for each in args]
        halves.append(known.handler(replace(c, result=like), *given, **kwargs))
    if isinstance(halves[0], list):
        return [Pair(a, b) for a, b in zip(*halves)]
    return Pair(*halves)


def _mapped(x: Any, take: Callable[[Pair], Any]) -> Any:
    if isinstance(x, list | tuple):
        return type(x)(_mapped(each, take) for each in x)
    is_complex = isinstance(x, Pair | complex) or (isinstance(x, np.ndarray) and x.dtype.kind == "c")
    return take(as_pair(x)) if is_complex else x


def _part_of(result: Any) -> Any:
    """What PyTorch says of a complex result, of one of its parts."""
    if isinstance(result, list | tuple):
        return [_part_of(each) for each in result]
    return result.real if result.dtype.is_complex else result


def _view_as_complex(c: Call, x: Any) -> Pair:
    tensor = c.tensor(x)
    return Pair(tensor[..., 0], tensor[..., 1])


def _view_as_real(c: Call, x: Any) -> Any:
    pair = as_pair(x)
    return np.stack([as_tensor(pair.real), as_tensor(pair.imag)], axis=-1)


def _mul(c: Call, x: Any, y: Any) -> Pair:
    a, b = as_pair(x), as_pair(y)
    return Pair(a.real * b.real - a.imag * b.imag, a.real * b.imag + a.imag * b.real)


def _conj(c: Call, x: Any, *_: Any) -> Pair:
    pair = as_pair(x)
    return Pair(pair.real, -pair.imag)


def _abs(c: Call, x: Any) -> Any:
    pair = as_pair(x)
    return np.sqrt(pair.real * pair.real + pair.imag * pair.imag)


def _polar(c: Call, size: Any, angle: Any) -> Pair:
    length, turn = c.tensor(size), c.tensor(angle)
    return Pair(length * np.cos(turn), length * np.sin(turn))


_OWN: dict[str, Callable[..., Any]] = {
    "view_as_complex": _view_as_complex,
    "view_as_real": _view_as_real,
    "mul": _mul,
    "conj": _conj,
    "_conj": _conj,
    "resolve_conj": lambda c, x, *_: as_pair(x),
    "abs": _abs,
    "real": lambda c, x: as_tensor(as_pair(x).real),
    "imag": lambda c, x: as_tensor(as_pair(x).imag),
    "complex": lambda c, x, y: Pair(c.tensor(x), c.tensor(y)),
    "polar": _polar,
}


def is_complex(leaves: list[Any], result: Any) -> bool:
    """Whether complex numbers go into an op, or come from it."""
    results = result if isinstance(result, list | tuple) else [result]
    return any(isinstance(x, Pair) for x in leaves) or any(
        getattr(getattr(x, "dtype", None), "is_complex", False)
        for x in (*leaves, *results)
        if not isinstance(x, Tensor)
    )
