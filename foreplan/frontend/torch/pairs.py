"""Complex numbers, which no graph holds: pairs of tensors, as far as a model turns them and comes back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from foreplan.base.errors import UnsupportedError
from foreplan.frontend.torch.call import dtype_of
from foreplan.frontend.torch.ops.elementwise import broadcast
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
        "pad",
        "constant_pad_nd",
        "rsub",
        "index_put",
        "zeros_like",
        "to",
        "_to_copy",
    ]
)
_ADDS = frozenset(["add", "sub", "rsub"])
_BILINEAR = frozenset(["matmul", "bmm", "mm", "mv", "dot", "einsum"])


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
    name = c.name.removesuffix("_")
    if name in _OWN:
        return _OWN[name](c, *args, **kwargs)
    if name.startswith("_fft") and known is not None:
        return known.handler(c, *args, **kwargs)
    if name in _BILINEAR and known is not None:
        return _bilinear(c, known, args, kwargs)
    if known is None or not (known.views or c.name.removesuffix("_") in _EACH):
        raise UnsupportedError(
            "complex numbers in this op; foreplan turns them as pairs in products, sums and views alone"
        )
    like = _part_of(c.result)
    halves = []
    for take in (lambda pair: pair.real, lambda pair: pair.imag):
        given = [_mapped(each, take, name in _ADDS or ("pad" in name and i > 1), i > 0) for i, each in enumerate(args)]
        halves.append(known.handler(replace(c, result=like), *given, **kwargs))
    if isinstance(halves[0], list):
        return [Pair(a, b) for a, b in zip(*halves)]
    return Pair(*(broadcast(c.tensor(half), c.shape) for half in halves))


def _bilinear(c: Call, known: Entry, args: list[Any], kwargs: dict[str, Any]) -> Pair:
    """A product of two: real and imaginary parts of each by those of the other."""
    part = replace(c, result=_part_of(c.result))
    places = [i for i, x in enumerate(args) if isinstance(x, list | Tensor | np.ndarray | Pair)]
    given = args[places[0]] if isinstance(args[places[0]], list) else [args[i] for i in places]
    if len(given) != 2:
        raise UnsupportedError("a product of other than two factors with complex numbers; multiply two at a time")
    a, b = (as_pair(x) for x in given)

    def product(x: Any, y: Any) -> Any:
        if isinstance(x, float) or isinstance(y, float):  # a real factor's imaginary part
            return 0.0
        new = [x, y]
        own = list(args)
        if isinstance(args[places[0]], list):
            own[places[0]] = new
        else:
            own[places[0]], own[places[1]] = new
        return known.handler(part, *own, **kwargs)

    return Pair(product(a.real, b.real) - product(a.imag, b.imag), product(a.real, b.imag) + product(a.imag, b.real))


def _mapped(x: Any, take: Callable[[Pair], Any], numbers: bool, places: bool) -> Any:
    """The real or imaginary parts of an argument; integers, which say places, and numbers that are not added stay."""
    if isinstance(x, list | tuple):
        return type(x)(_mapped(each, take, numbers, places) for each in x)
    if isinstance(x, Tensor | np.ndarray) and not (places and np.dtype(x.dtype).kind in "iub"):
        return take(as_pair(x) if np.dtype(x.dtype).kind == "c" else Pair(x, np.zeros(x.shape, x.dtype)))
    return take(as_pair(x)) if isinstance(x, Pair | complex) or (numbers and isinstance(x, int | float)) else x


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


def _div(c: Call, x: Any, y: Any, rounding_mode: str | None = None) -> Pair:
    if not (isinstance(y, Pair | complex) or (isinstance(y, np.ndarray) and y.dtype.kind == "c")):
        pair = as_pair(x)
        return Pair(pair.real / y, pair.imag / y)
    b = as_pair(y)
    size = b.real * b.real + b.imag * b.imag
    return _mul(c, x, Pair(b.real / size, -b.imag / size))


def _exp(c: Call, x: Any) -> Pair:
    pair = as_pair(x)
    size = np.exp(pair.real)
    return Pair(size * np.cos(pair.imag), size * np.sin(pair.imag))


def _angle(c: Call, x: Any) -> Any:
    pair = as_pair(x)
    return np.arctan2(pair.imag, pair.real)


def _copy(c: Call, x: Any, y: Any, non_blocking: bool = False) -> Pair:
    pair = as_pair(y)
    return Pair(
        *(broadcast(c.tensor(part, dtype_of(_part_of(c.result).dtype)), c.shape) for part in (pair.real, pair.imag))
    )


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
    "conj_physical": _conj,
    "_conj_physical": _conj,
    "resolve_conj": lambda c, x, *_: as_pair(x),
    "abs": _abs,
    "real": lambda c, x: as_tensor(as_pair(x).real),
    "imag": lambda c, x: as_tensor(as_pair(x).imag),
    "complex": lambda c, x, y: Pair(broadcast(c.tensor(x), c.shape), broadcast(c.tensor(y), c.shape)),
    "div": _div,
    "exp": _exp,
    "angle": _angle,
    "copy": _copy,
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
