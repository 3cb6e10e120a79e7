"""Attention and its gradients in tiles of queries and keys; a block holds one pair of tiles at a time."""

from __future__ import annotations

from collections.abc import Sequence

from foreplan.graph import DType, Op, Window
from foreplan.graph.layouts import lie_alike
from foreplan.graph.op import Windows
from foreplan.graph.types import FLOAT32
from foreplan.ops.attention.blocks import AttentionOp, Extents
from foreplan.ops.attention.gradient import AttentionGrad
from foreplan.ops.attention.ops import Attention
from foreplan.runtime.cuda.device import Device
from foreplan.runtime.cuda.kernels.reduce import Axis, Terms, reduction
from foreplan.runtime.cuda.launch import (
    Address,
    Clear,
    Defines,
    Instruction,
    Launch,
    LaunchKernel,
    Scratch,
    Word,
    input_at,
    launch,
    output_at,
)
from foreplan.runtime.kernel import Refused
from foreplan.units import ceil_div

SIDE = 16  # side of the square of threads that share a tile's results; at most the rows of the tile
# Rows of a block, and rows of the other side at a time; the first pair that fits and is not mostly empty is taken.
TILES, GRADIENT_TILES = ((64, 32), (32, 32), (16, 32), (16, 16)), ((32, 64), (32, 32), (16, 32), (16, 16), (8, 16))
SHARED_BYTES = 48 * 1024  # of a block, without asking for more

Tensor = tuple[Address, Window]


def attention(op: Op, inputs: Windows, outputs: Windows, device: Device) -> LaunchKernel:
    """One launch, a block a tile of queries."""
    assert isinstance(op, Attention)
    q, k, v = ((input_at(i), inputs[i]) for i in range(3))
    o, mask = (output_at(0), outputs[0]), _mask(inputs, 3)
    e = op.sizes([x.type for x in inputs])
    none = o[0]
    tensors, vectors = [q, k, v, o, o, o, o, o], (output_at(1), none, none)
    only = _launch(op, "attention", e, e.heads, e.queries, tensors, mask, vectors)
    return LaunchKernel((only,), overwrites=((0, 0),) if lie_alike(inputs[0], outputs[0]) else ())


def gradient(op: Op, inputs: Windows, outputs: Windows, device: Device) -> LaunchKernel:
    """Queries first, then keys and values, which may take their own bytes by then; any may take the output's."""
    assert isinstance(op, AttentionGrad)
    q, k, v, o = ((input_at(i), inputs[i]) for i in range(4))
    g, mask = (input_at(5), inputs[5]), _mask(inputs, 6)
    dq, dk, dv = ((output_at(i), outputs[i]) for i in range(3))
    e, scratch = op.sizes([x.type for x in inputs]), Scratch()
    deltas = scratch.take(e.log_sums.nbytes)
    scores = deltas
    found: list[Instruction] = []
    if op.mask_gradient:
        count = e.batch * e.heads * e.queries * e.keys
        scores = scratch.take(count * FLOAT32.itemsize)
        found.append(Clear(scores, count * FLOAT32.itemsize))
    tensors, vectors = [q, k, v, o, g, dq, dk, dv], (input_at(4), deltas, scores)
    found.append(_launch(op, "attention_queries", e, e.heads, e.queries, tensors, mask, vectors))
    found.append(_launch(op, "attention_keys", e, e.kv_heads, e.keys, tensors, mask, vectors))
    if op.mask_gradient:
        found.append(_of_mask(scores, e, outputs[3]))
    pairs = ((0, 3), (1, 1), (1, 3), (2, 2), (2, 3))
    overwrites = tuple((o, i) for o, i in pairs if lie_alike(inputs[i], outputs[o]))
    return LaunchKernel(tuple(found), scratch.nbytes, overwrites)


def _mask(inputs: Windows, index: int) -> Tensor | None:
    return (input_at(index), inputs[index]) if len(inputs) > index else None


def _of_mask(scores: Address, e: Extents, mask: Window) -> Launch:
    """Gradients of scores summed over the axes along which the mask was repeated."""
    full, step = (e.batch, e.heads, e.queries, e.keys), FLOAT32.itemsize
    kept: list[Axis] = []
    reduced: list[Axis] = []
    for extent, own in reversed(list(zip(full, mask.shape))):
        (kept if own == extent else reduced).append(Axis(extent, step))
        step *= extent
    one = [Axis(1, 0)]
    terms = Terms(scores, FLOAT32, tuple(reversed(kept or one)), tuple(reversed(reduced or one)))
    return reduction("sum", terms, output_at(3), mask.type.dtype, 1, None)


def tile_of(e: Extents, rows: int, gradient: bool) -> tuple[int, int]:
    """How many of `rows` rows a block has, and how many rows of the other side it takes at a time.

    Raises:
        Refused: rows are too long, or elements too wide.
    """
    if e.dtype.wide != FLOAT32:
        raise Refused(f"attention in {e.dtype}")
    depth, values = _pitch(e.depth), _pitch(e.value_depth)
    for tall, wide in GRADIENT_TILES if gradient else TILES:
        numbers = tall * (depth + values * gradient) + wide * max(depth, values) + tall * (wide + 4) + 2 * wide
        if numbers * FLOAT32.itemsize <= SHARED_BYTES and (tall <= SIDE or 2 * rows > tall):
            return tall, wide
    raise Refused(f"heads of {e.depth} and {e.value_depth}")


def _pitch(width: int) -> int:
    """Floats from one row of a tile to the next, as in cuda/attention.cuh."""
    fours = ceil_div(width, 4)
    return 4 * (fours + (fours % 2 == 0))


def _words(
    op: AttentionOp,
    e: Extents,
    tiles: int,
    tensors: Sequence[Tensor],
    mask: Tensor | None,
    vectors: tuple[Address, Address, Address],
) -> list[Word]:
    words: list[Word] = [e.heads, e.group, e.queries, e.keys, tiles, float(op.scale)]
    for start, window in tensors:
        batch, second, third, depth = window.strides
        head, position = (third, second) if op.heads_last else (second, third)
        words += [start, batch, head, position, depth]
    if mask is None:
        words += [tensors[0][0], 0, 0, 0, 0]
    else:
        start, window = mask
        words += [start, *(0 if extent == 1 else step for extent, step in zip(window.shape, window.strides))]
    return [*words, *vectors]


def _launch(
    op: AttentionOp,
    entry: str,
    e: Extents,
    heads: int,
    rows: int,
    tensors: Sequence[Tensor],
    mask: Tensor | None,
    vectors: tuple[Address, Address, Address],
) -> Launch:
    """A block for every tile of `rows` rows, in each of `heads` heads."""
    of_mask: DType = mask[1].type.dtype if mask else FLOAT32
    tall, wide = tile_of(e, rows, isinstance(op, AttentionGrad))
    defines: Defines = (
        ("ELEMENT", e.dtype),
        ("MASK_ELEMENT", of_mask),
        ("DEPTH", e.depth),
        ("VALUE_DEPTH", e.value_depth),
        ("SIDE", min(SIDE, tall)),
        ("ROWS", tall),
        ("COLUMNS", wide),
        ("CAUSAL", int(op.causal)),
        ("MASKED", int(mask is not None)),
        ("SCORE_GRADIENTS", int(isinstance(op, AttentionGrad) and op.mask_gradient)),
    )
    tiles = ceil_div(rows, tall)
    words = _words(op, e, tiles, tensors, mask, vectors)
    file = "attention_grad.cu" if isinstance(op, AttentionGrad) else "attention.cu"
    return launch(file, entry, tiles * heads * e.batch, words, defines, threads=min(SIDE, tall) ** 2)


def reads(op: Op, index: int, window: Window) -> Window:
    """As it lies; the logarithms of sums in C order."""
    return Window.dense(window.type) if isinstance(op, AttentionGrad) and index == 4 else window
