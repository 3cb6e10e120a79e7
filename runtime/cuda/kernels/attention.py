"""Attention and its gradients in tiles of queries and keys; a block holds one pair of tiles at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from foreplan.base.units import ceil_div
from foreplan.graph import DType, Op, Window
from foreplan.graph.layouts import lie_alike
from foreplan.graph.op import Windows
from foreplan.graph.types import FLOAT32
from foreplan.ops.attention.blocks import AttentionOp, Extents
from foreplan.ops.attention.gradient import AttentionGrad
from foreplan.ops.attention.ops import Attention
from foreplan.runtime.cuda.device import Device
from foreplan.runtime.cuda.kernels.attention_tiles import FORWARD, KEYS, QUERIES, tile_for
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

TENSOR_CORES = 80  # the compute capability from which on they have TensorFloat-32

Tensor = tuple[Address, Window]


def attention(op: Op, inputs: Windows, outputs: Windows, device: Device, tensor_cores: bool = False) -> LaunchKernel:
    """One launch, a block a tile of queries.

    Args:
        tensor_cores: multiply there, with factors rounded to TensorFloat-32.
    """
    assert isinstance(op, Attention)
    q, k, v = ((input_at(i), inputs[i]) for i in range(3))
    o, mask = (output_at(0), outputs[0]), _mask(inputs, 3)
    e = op.sizes([x.type for x in inputs])
    none = o[0]
    tensors, vectors = [q, k, v, o, o, o, o, o], (output_at(1), none, none)
    only = _launch(op, FORWARD, e, tensors, mask, vectors, device, tensor_cores)
    return LaunchKernel((only,), overwrites=((0, 0),) if lie_alike(inputs[0], outputs[0]) else ())


def gradient(op: Op, inputs: Windows, outputs: Windows, device: Device, tensor_cores: bool = False) -> LaunchKernel:
    """Queries first, then keys and values, which may take their own bytes by then; any may take the output's.

    Args:
        tensor_cores: multiply there, with factors rounded to TensorFloat-32.
    """
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
    for kernel in (QUERIES, KEYS):
        found.append(_launch(op, kernel, e, tensors, mask, vectors, device, tensor_cores))
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
    kernel: str,
    e: Extents,
    tensors: Sequence[Tensor],
    mask: Tensor | None,
    vectors: tuple[Address, Address, Address],
    device: Device,
    tensor_cores: bool,
) -> Launch:
    """A block for every tile of queries or keys, in each of their heads."""
    of_mask: DType = mask[1].type.dtype if mask else FLOAT32
    tile, resident = tile_for(kernel, e, device, tensor_cores)
    shared = tile.nbytes(kernel, e)
    defines: Defines = (
        ("ELEMENT", e.dtype),
        ("MASK_ELEMENT", of_mask),
        ("DEPTH", e.depth),
        ("VALUE_DEPTH", e.value_depth),
        ("ROWS", tile.rows),
        ("COLUMNS", tile.columns),
        ("THREADS", tile.threads),
        ("THREADS_ACROSS", tile.across),
        ("RESIDENT", resident),
        ("QUERY_TILES", tile.query_tiles),
        ("SHARED_FLOATS", shared // FLOAT32.itemsize),
        ("TENSOR_CORES", int(tensor_cores)),
        ("CAUSAL", int(op.causal)),
        ("MASKED", int(mask is not None)),
        ("SCORE_GRADIENTS", int(isinstance(op, AttentionGrad) and op.mask_gradient)),
    )
    heads, rows = (e.kv_heads, e.keys) if kernel == KEYS else (e.heads, e.queries)
    tiles = ceil_div(rows, tile.rows)
    words, blocks = _words(op, e, tiles, tensors, mask, vectors), tiles * heads * e.batch
    return launch(f"{kernel}.cu", kernel, blocks, words, defines, threads=tile.threads, shared=shared)


def on_tensor_cores(
    make: Callable[..., LaunchKernel], op: Op, inputs: Windows, outputs: Windows, device: Device
) -> LaunchKernel:
    """The kernel that rounds factors of products to TensorFloat-32.

    Raises:
        Refused: the card or the tensors have no such products, or rows are too long.
    """
    if device.compute < TENSOR_CORES or inputs[0].type.dtype != FLOAT32:
        raise Refused(f"TensorFloat-32 of {inputs[0].type.dtype} on {device.capability}")
    return make(op, inputs, outputs, device, tensor_cores=True)


def reads(op: Op, index: int, window: Window) -> Window:
    """As it lies; the logarithms of sums in C order."""
    return Window.dense(window.type) if isinstance(op, AttentionGrad) and index == 4 else window
