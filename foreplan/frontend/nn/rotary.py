"""Rotary position embedding."""

from __future__ import annotations

from typing import Any

import numpy as np

from foreplan.base.arguments import flag, listed, number_in, whole
from foreplan.base.errors import ShapeError
from foreplan.frontend.tracing.elementwise import apply, convert
from foreplan.frontend.tracing.tensor import Tensor, as_tensor, takes_tensors


@takes_tensors
def rotary_embedding(
    x: Tensor,
    positions: Any = None,
    base: float = 10000.0,
    interleaved: bool = False,
    width: int | None = None,
    heads_last: bool = False,
    frequencies: Any = None,
) -> Tensor:
    """Turn pairs of elements by angles that grow with the position (RoPE, Su et al. 2021). The shape stays.

    Pair i of `width`/2 turns by position · base^(−2i/width): (a, b) → (a·cos − b·sin, b·cos + a·sin). Give it queries
    and keys, before `attention`.

    Args:
        x: [B, H, T, D], as `attention` takes it.
        positions: integers [T] or [B, T], a tensor or an array; 0, 1, …, T − 1 by default.
        base: of the angles; 10,000 in the paper, larger in models for long texts.
        interleaved: neighbours make a pair, (0, 1), (2, 3), …, as in the paper, GPT-J and the first Llama; by default
            element i and element i + width/2 make one, as in GPT-NeoX and the Llama of Hugging Face.
        width: the number of leading elements of D that turn; all by default.
        heads_last: `x` is [B, T, H, D], as `split_heads` gives it.
        frequencies: an array [`width`/2], the angle of each pair per position, instead of base^(−2i/`width`): for
            models that stretch them to longer texts.

    Raises:
        ShapeError: `x` does not have four axes, the positions or the frequencies do not fit it, or the width is odd
            or exceeds D.
        UsageError: the width, the base or a frequency is no such number.
    """
    if x.ndim != 4:
        raise ShapeError(f"rotary_embedding needs [batch, heads, positions, depth], and got {x!r}")
    depth, length = x.shape[3], x.shape[1 if flag("heads_last", heads_last) else 2]
    turned = depth if width is None else whole("rotary_embedding's width", width, 0)
    if turned % 2 or turned > depth:
        raise ShapeError(f"rotary_embedding of {x!r}: a width of {turned} is odd or exceeds the depth {depth}")
    speeds = number_in("rotary_embedding's base", base, 1e-30, np.inf) ** (-np.arange(0, turned, 2) / max(turned, 1))
    if frequencies is not None:
        given = [number_in("a frequency", each, -np.inf, np.inf) for each in listed("frequencies", frequencies)]
        if len(given) != len(speeds):
            raise ShapeError(f"rotary_embedding of {x!r}: {len(given)} frequencies for {len(speeds)} pairs")
        speeds = np.array(given)
    cos, sin = _turns(positions, x, length, speeds, heads_last)
    rest = [x[..., turned:]] if turned < depth else []
    if flag("interleaved", interleaved):
        pairs = x[..., :turned].reshape(*x.shape[:3], turned // 2, 2)
        a, b = _turn(pairs[..., 0], pairs[..., 1], cos, sin)
        both: Any = np.stack([a, b], -1)
        both = both.reshape(*x.shape[:3], turned)
        return as_tensor(np.concatenate([both, *rest], -1))
    a, b = _turn(x[..., : turned // 2], x[..., turned // 2 : turned], cos, sin)
    joined: Any = np.concatenate([a, b, *rest], -1)
    return as_tensor(joined)


def _turns(positions: Any, x: Tensor, length: int, speeds: np.ndarray, heads_last: bool) -> tuple[Any, Any]:
    """The cosines and sines of all angles, in a shape that broadcasts to half of `x`."""
    places = np.arange(length) if positions is None else positions
    places = places if isinstance(places, Tensor) else np.asarray(places)
    if places.shape not in ((length,), (x.shape[0], length)):
        raise ShapeError(
            f"rotary_embedding of {x!r}: positions of the shape {list(places.shape)} are neither [{length}] nor "
            f"[{x.shape[0]}, {length}]"
        )
    shape = (*places.shape[:-1], *((length, 1) if heads_last else (1, length)), len(speeds))
    if isinstance(places, Tensor):
        angles = convert(places, "float32").reshape(*places.shape, 1) * speeds.astype(np.float32)
        cos, sin = np.cos(angles).reshape(shape), np.sin(angles).reshape(shape)
        return convert(cos, x.dtype), convert(sin, x.dtype)
    angles = places[..., None] * speeds
    cos, sin = (as_tensor(f(angles).reshape(shape).astype(x.dtype)) for f in (np.cos, np.sin))
    return cos, sin


def _turn(a: Tensor, b: Tensor, cos: Any, sin: Any) -> tuple[Tensor, Tensor]:
    first = apply("turned", lambda a, b, c, s: a * c - b * s, a, b, cos, sin)
    return first, apply("turned", lambda a, b, c, s: b * c + a * s, a, b, cos, sin)
