"""Attention, by the kernels that PyTorch has for it, or written out."""

from __future__ import annotations

from foreplan.base.units import align_up
from foreplan.eager.autograd import Grads, Needs, Saved, Tape
from foreplan.eager.rules.contraction import matmul
from foreplan.eager.rules.elementwise import add, cast, operands, unary, without_gradient
from foreplan.eager.rules.layers import softmax
from foreplan.eager.rules.shape import cut, expand, pad, permute, reshape
from foreplan.eager.storage import Tensor, strides_like
from foreplan.graph.types import BOOL, FLOAT32, INT64, Shape


def attention(tape: Tape, which: str, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """Attention of [batch, heads, tokens, depth]; keys and values may have fewer heads.

    Args:
        which: `flash`, `efficient`, `math` or `eager`; `auto`: as PyTorch chooses on the device for float32.
    """
    grouped = k.shape[1] != q.shape[1]
    if which == "eager":
        return _written_out(tape, False, q, _repeated(tape, k, q), _repeated(tape, v, q), mask, causal)
    q, k, v, mask = operands(tape, "attention", q, k, v, mask)
    with tape.casting(runs=False):
        return _kernel(tape, which, grouped, q, k, v, mask, causal)


def _kernel(
    tape: Tape, which: str, grouped: bool, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool
) -> Tensor:
    """One of PyTorch's, of which `math` computes in float32."""
    narrow, depth = q.dtype != FLOAT32, q.shape[-1]
    if which == "auto" and tape.cuda:
        unaligned = depth % (8 if narrow else 4) > 0
        which = "flash" if narrow and mask is None else "math" if grouped or unaligned else "efficient"
    elif which == "auto":
        which = "flash"
    if which == "math":
        dtype = q.dtype
        q, k, v = (cast(tape, each, FLOAT32) for each in (q, k, v))
        result = _written_out(tape, True, q, _repeated(tape, k, q), _repeated(tape, v, q), mask, causal)
        return cast(tape, result, dtype)
    if which == "efficient":
        k, v = _repeated(tape, k, q), _repeated(tape, v, q)
    if which == "flash" and tape.cuda and depth % 8:
        q, k, v = (pad(tape, each, (*each.shape[:-1], align_up(depth, 8))) for each in (q, k, v))
        return cut(tape, _fused(tape, which, q, k, v, mask), (*q.shape[:-1], depth), (1, 1, 1, 1))
    return _fused(tape, which, q, k, v, mask)


def _fused(tape: Tape, which: str, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """The flash kernel, of cards or of CPUs, or the memory-efficient one of cards. Operands, result and one number a
    query are saved.
    """
    batch, heads, tokens, _ = q.shape
    shape = (batch, heads, tokens, v.shape[-1])
    strides = strides_like(shape, q) if not tape.cuda and shape == q.shape else _tokens_first(shape)
    result = tape.new(shape, q.dtype, "attention", strides)
    sums = (batch, heads, -(-tokens // 32) * 32 if which == "efficient" else tokens)
    drawn = (tape.new((3,), INT64, "random state"),) if which == "flash" and tape.cuda else ()
    saved = (q, k, v, result, tape.new(sums, FLOAT32, "log-sum-exp"), *drawn, *(() if mask is None else (mask,)))
    tape.record((q, k, v), (result,), _fused_backward, saved)
    return result


def _written_out(tape: Tape, math: bool, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """Products, and a softmax between them. Queries and keys are scaled before (`_scaled_dot_product_attention_math`),
    or scores behind, as models write it.
    """
    if math:
        q, k = (unary(tape, "mul_scalar", each) for each in (q, k))
    scores = matmul(tape, q, permute(tape, k, (0, 1, 3, 2)))
    if not math:
        scores = unary(tape, "mul_scalar", scores)
    if causal and mask is None:
        shown = without_gradient(tape, "tril", [tape.new(scores.shape[-2:], BOOL, "ones")], BOOL)
        mask = tape.new(shown.shape, scores.dtype, "mask")
        del shown
    if mask is not None:
        scores = add(tape, scores, mask)
    scores = softmax(tape, scores)
    return matmul(tape, scores, v)


def _repeated(tape: Tape, x: Tensor, q: Tensor) -> Tensor:
    """Keys or values with as many heads as queries have."""
    batch, heads, tokens, depth = x.shape
    if heads == q.shape[1]:
        return x
    one = reshape(tape, x, (batch, heads, 1, tokens, depth))
    wide = expand(tape, one, (batch, heads, q.shape[1] // heads, tokens, depth))
    return reshape(tape, wide, (batch, q.shape[1], tokens, depth))


def _tokens_first(shape: Shape) -> tuple[int, ...]:
    """[batch, heads, tokens, depth] as it lies when the heads of a token lie side by side."""
    _, heads, tokens, depth = shape
    return (heads * tokens * depth, depth, heads * depth, 1)


def _fused_backward(tape: Tape, saved: Saved, needs: Needs, grads: Grads) -> Grads:
    given = []
    for x in saved[:3]:
        assert x is not None
        given.append(tape.new(x.shape, x.dtype, "gradient of an operand", _tokens_first(x.shape)))
    return given
