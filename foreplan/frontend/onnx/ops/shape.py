"""ONNX ops that only move elements: reshape, transpose, slice, join, pad, repeat."""

from __future__ import annotations

import math
from collections.abc import Sequence

from foreplan.frontend.onnx.node import OnnxNode, Operand, Result, translates
from foreplan.frontend.onnx.tensors import dtype_of, from_array
from foreplan.graph import Value, as_dtype
from foreplan.graph.types import INT32, Shape, broadcast_shapes
from foreplan.ops.expr import call, cast, where
from foreplan.ops.index import positions
from foreplan.ops.join import concat, pad, split
from foreplan.ops.map import elementwise
from foreplan.ops.shape import Slice, broadcast_to, reshape, slice_axis, transpose


@translates("Reshape")
def _reshape(n: OnnxNode) -> Operand:
    wanted = n.integers("shape") if n.opset < 5 else n.known_ints(1)
    keep_zero = n.integer("allowzero", 0) if n.opset >= 14 else 0
    if wanted is None:
        raise n.fail("it has no target shape")
    shape = _target(n, wanted, n.shape(0), keep_zero)
    if n.batch is not None and n.batch.carries_any(n, 0):
        exported = _target(n, wanted, n.batch.before(n, 0), keep_zero)
        changed = n.batch.reshaped(n, exported)
        if changed != shape:
            n.batch.note_rewritten(n, wanted, changed)
        shape = changed
    if math.prod(shape) != n.type(0).size:
        raise n.misshapen(f"{n.type(0)} does not fit the shape {list(shape)} (written as {list(wanted)})")
    return reshape(n.b, n.value(0), shape)


def _target(n: OnnxNode, wanted: Sequence[int], shape: Shape, keep_zero: int) -> Shape:
    """The target of a Reshape with each 0 (copy the extent) and -1 (the rest of the elements) replaced."""
    full = []
    for i, extent in enumerate(wanted):
        if extent == 0 and not keep_zero:
            if i >= len(shape):
                raise n.misshapen(
                    f"the 0 at place {i} of its target {list(wanted)} copies an axis, but {list(shape)} has none there"
                )
            extent = shape[i]
        full.append(extent)
    if full.count(-1) > 1 or any(extent < -1 for extent in full):
        raise n.misshapen(f"its target {list(wanted)} is not a shape: it may hold one -1 and no other negative extent")
    if -1 in full:
        known = -math.prod(full)
        size = math.prod(shape)
        if known == 0 or size % known:
            # With a new batch the target is rewritten from the exported shapes, so this is not an error yet.
            if n.batch is not None and shape == n.shape(0):
                return tuple(full)
            raise n.misshapen(f"a tensor of {size} elements does not fit the shape {list(wanted)}")
        full[full.index(-1)] = size // known
    return tuple(full)


@translates("Flatten")
def _flatten(n: OnnxNode) -> Operand:
    shape = n.shape(0)
    axis = n.border(n.integer("axis", 1), len(shape))
    return reshape(n.b, n.value(0), (math.prod(shape[:axis]), math.prod(shape[axis:])))


@translates("Squeeze")
def _squeeze(n: OnnxNode) -> Operand:
    shape = n.shape(0)
    given = n.integers("axes") if n.opset < 13 else n.known_ints(1) if n.has(1) else None
    if given is None:
        before = shape if n.batch is None else n.batch.before(n, 0)
        axes = tuple(i for i, extent in enumerate(before) if extent == 1)
    else:
        axes = n.axes(given, len(shape))
    for axis in axes:
        if shape[axis] != 1:
            raise n.misshapen(f"axis {axis} of {n.type(0)} has more than one element and cannot be squeezed")
    return reshape(n.b, n.value(0), [extent for i, extent in enumerate(shape) if i not in axes])


@translates("Unsqueeze")
def _unsqueeze(n: OnnxNode) -> Operand:
    shape = list(n.shape(0))
    given = n.integers("axes", []) if n.opset < 13 else n.known_ints(1)
    for axis in sorted(n.axes(given, len(shape) + len(given))):
        shape.insert(axis, 1)
    return reshape(n.b, n.value(0), shape)


@translates("Transpose")
def _transpose(n: OnnxNode) -> Operand:
    rank = len(n.shape(0))
    perm = n.integers("perm", list(reversed(range(rank))))
    return transpose(n.b, n.value(0), n.axes(perm, rank))


@translates("Expand")
def _expand(n: OnnxNode) -> Operand:
    wanted = tuple(n.known_ints(1))
    if n.batch is not None:
        wanted = _expand_batch(n, wanted)
    return broadcast_to(n.b, n.value(0), broadcast_shapes(n.shape(0), wanted))


def _expand_batch(n: OnnxNode, wanted: Shape) -> Shape:
    """The written shape with the new batch, where the input carries it, or else in a first axis of the old batch."""
    assert n.batch is not None
    shape, changed = n.shape(0), list(wanted)
    lead = len(wanted) - len(shape)
    for i, extent in enumerate(wanted):
        at = i - lead
        if at >= 0 and n.batch.carries(n, 0, at) and extent != 1:
            changed[i] = shape[at]
    if changed == list(wanted) and not n.batch.carries_any(n, 0) and wanted[:1] == (n.batch.old,) and n.batch.old != 1:
        first = shape[0] if lead == 0 else 1
        changed[0] = n.batch.new if first == 1 else wanted[0]
    if tuple(changed) != wanted:
        n.batch.note_rewritten(n, wanted, changed)
    return tuple(changed)


@translates("Tile")
def _tile(n: OnnxNode) -> Operand:
    x, shape = n.value(0), n.shape(0)
    if n.opset < 6:
        axis = n.axis(int(n.known_scalar(2)), len(shape))
        repeats = [int(n.known_scalar(1)) if i == axis else 1 for i in range(len(shape))]
    else:
        repeats = n.known_ints(1)
    if len(repeats) != len(shape) or min(repeats, default=0) < 0:
        raise n.misshapen(
            f"its repeats must be one number of at least 0 for each axis of {n.type(0)}, and are {repeats}"
        )
    apart = [extent for i, r in enumerate(shape) for extent in (1, r)]
    spread = tuple(extent for s, r in zip(shape, repeats) for extent in (r, s))
    return reshape(n.b, broadcast_to(n.b, reshape(n.b, x, apart), spread), [s * r for s, r in zip(shape, repeats)])


@translates("Concat")
def _concat(n: OnnxNode) -> Operand:
    parts = n.values()
    if not parts:
        raise n.fail("it has no inputs")
    rank = len(parts[0].shape)
    axis = n.axis(n.integer("axis", 1 if n.opset < 4 else ...), rank)
    if n.batch is not None:
        parts = _join_batch(n, parts, axis)
    return concat(n.b, parts, axis)


def _join_batch(n: OnnxNode, parts: list[Value], axis: int) -> list[Value]:
    """Parts of extent 1 where others carry the batch (a class token) are repeated to it."""
    assert n.batch is not None
    batch = n.batch
    for i in range(len(parts[0].shape)):
        carrying = [
            p.shape[i] for k, p in enumerate(parts) if i != axis and len(p.shape) > i and batch.carries(n, k, i)
        ]
        for k, part in enumerate(parts):
            if carrying and part.shape[i] == 1 and not batch.carries(n, k, i):
                shape = (*part.shape[:i], carrying[0], *part.shape[i + 1 :])
                batch.note_rewritten(n, part.shape, shape)
                parts[k] = broadcast_to(n.b, part, shape)
    return parts


@translates("Split")
def _split(n: OnnxNode) -> Result:
    shape = n.shape(0)
    axis = n.axis(n.integer("axis", 0), len(shape))
    sizes = n.integers("split") if n.opset < 13 else n.known_ints(1) if n.has(1) else None
    if n.opset < 2 and n.has(1):
        sizes = n.known_ints(1)
    if sizes is None:
        count = n.integer("num_outputs", n.output_count) if n.opset >= 18 else n.output_count
        if count != n.output_count:
            raise n.fail(f"its num_outputs is {count}, but it has {n.output_count} outputs")
        each = -(-shape[axis] // count)
        sizes = [min(each, max(shape[axis] - each * i, 0)) for i in range(count)]
    if sum(sizes) != shape[axis] or min(sizes) < 0 or len(sizes) < n.output_count:
        if n.batch is not None and n.batch.carries(n, 0, axis):
            raise n.batch.fixed(n, f"it splits the batch into {sizes}")
        raise n.misshapen(f"{sizes} do not add up to axis {axis} of {n.type(0)} in {n.output_count} parts")
    return split(n.b, n.value(0), sizes, axis)


@translates("Slice")
def _slice(n: OnnxNode) -> Operand:
    shape = n.shape(0)
    rank = len(shape)
    if n.opset < 10:
        starts, ends, steps = n.integers("starts"), n.integers("ends"), None
        axes = n.integers("axes")
        if starts is None or ends is None:
            raise n.fail("the attributes starts and ends must both be given")
    else:
        starts, ends = n.known_ints(1), n.known_ints(2)
        axes = n.known_ints(3) if n.has(3) else None
        steps = n.known_ints(4) if n.has(4) else None
    axes = n.axes(axes if axes is not None else range(len(starts)), rank)
    steps = steps if steps is not None else [1] * len(starts)
    if not len(starts) == len(ends) == len(axes) == len(steps) or 0 in steps:
        raise n.fail(f"starts {starts}, ends {ends}, axes {list(axes)} and steps {steps} do not fit each other")
    first, count, stride = [0] * rank, list(shape), [1] * rank
    for axis, start, end, step in zip(axes, starts, ends, steps):
        picked = _picked(start, end, step, shape[axis])
        if n.batch is not None and n.batch.carries(n, 0, axis):
            before = n.batch.before(n, 0)[axis]
            if len(_picked(start, end, step, before)) != before:
                raise n.batch.fixed(n, f"it takes a part of the batch, [{start}:{end}:{step}]")
            picked = range(shape[axis])[:: 1 if step > 0 else -1]
        first[axis], count[axis], stride[axis] = (picked.start, len(picked), step) if picked else (0, 0, 1)
    if tuple(count) == shape and all(step == 1 for step in stride):
        return n.operand(0)
    return n.b.apply(Slice(tuple(first), tuple(count), tuple(stride)), n.value(0))


def _picked(start: int, end: int, step: int, extent: int) -> range:
    """The places of a slice. Walking backward, ONNX moves a start before the first element to it; Python does not."""
    start, end = (at + extent if at < 0 else at for at in (start, end))
    low, high = (0, extent) if step > 0 else (-1, extent - 1)
    return range(min(max(start, 0), high), min(max(end, low), high), step)


@translates("Pad")
def _pad(n: OnnxNode) -> Operand:
    rank = len(n.shape(0))
    mode = n.text("mode", "constant")
    if n.opset < 11:
        amounts = n.integers("pads", n.integers("paddings"))
        fill: float = n.number("value", 0.0)
    else:
        amounts = n.known_ints(1)
        fill = n.known_scalar(2) if n.has(2) and n.type(2).size else 0.0
    axes = n.axes(n.known_ints(3), rank) if n.has(3) else tuple(range(rank))
    if amounts is None or len(amounts) != 2 * len(axes) or mode not in ("constant", "reflect", "edge", "wrap"):
        raise n.fail(
            f"pads {amounts} must be two numbers for each of {len(axes)} axes, and the mode constant, reflect, edge or "
            f"wrap, not {mode!r}"
        )
    margins = [(0, 0)] * rank
    for i, axis in enumerate(axes):
        margins[axis] = (amounts[i], amounts[len(axes) + i])
    return pad(n.b, n.value(0), margins, float(fill), mode)


def _block(n: OnnxNode) -> int:
    size: int = n.integer("blocksize")
    if size < 1:
        raise n.fail(f"blocksize must be at least 1, and is {size}")
    return size


@translates("DepthToSpace")
def _depth_to_space(n: OnnxNode) -> Operand:
    batch, channels, height, width = n.shape(0)
    size = _block(n)
    depth = channels // (size * size)
    if n.text("mode", "DCR") == "DCR":
        parts, perm = (batch, size, size, depth, height, width), (0, 3, 4, 1, 5, 2)
    else:
        parts, perm = (batch, depth, size, size, height, width), (0, 1, 4, 2, 5, 3)
    moved = transpose(n.b, reshape(n.b, n.value(0), parts), perm)
    return reshape(n.b, moved, (batch, depth, height * size, width * size))


@translates("SpaceToDepth")
def _space_to_depth(n: OnnxNode) -> Operand:
    batch, channels, height, width = n.shape(0)
    size = _block(n)
    parts = (batch, channels, height // size, size, width // size, size)
    if n.text("mode", "DCR") == "DCR":
        perm = (0, 3, 5, 1, 2, 4)
    else:
        perm = (0, 1, 3, 5, 2, 4)
    moved = transpose(n.b, reshape(n.b, n.value(0), parts), perm)
    return reshape(n.b, moved, (batch, channels * size * size, height // size, width // size))


def _rows_and_columns(n: OnnxNode, rows: int, columns: int) -> tuple[Value, Value]:
    """Row numbers [rows, 1] and column numbers [columns], which broadcast against each other."""
    name = n.output_names[0]
    row = n.as_value(from_array(f"{name}.row", positions(rows, INT32).reshape(rows, 1)))
    return row, n.as_value(from_array(f"{name}.column", positions(columns, INT32)))


@translates("Trilu")
def _trilu(n: OnnxNode) -> Operand:
    if len(n.shape(0)) < 2:
        raise n.misshapen(f"it needs at least two axes, and got {n.type(0)}")
    rows, columns = n.shape(0)[-2:]
    diagonal = max(-rows, min(int(n.known_scalar(1)) if n.has(1) else 0, columns))
    row, column = _rows_and_columns(n, rows, columns)
    compare = "ge" if n.integer("upper", 1) else "le"
    dtype = n.type(0).dtype
    zero = {"float": 0.0, "bool": False}.get(dtype.category, 0)
    return elementwise(
        n.b, lambda x, i, j: where(call(compare, j - i, diagonal), x, zero), n.value(0), row, column, dtype=dtype
    )


@translates("EyeLike")
def _eye_like(n: OnnxNode) -> Operand:
    if len(n.shape(0)) != 2:
        raise n.misshapen(f"it needs a matrix, and got {n.type(0)}")
    rows, columns = n.shape(0)
    dtype = as_dtype(dtype_of(n.integer("dtype"), n.where)) if n.has_attribute("dtype") else n.type(0).dtype
    diagonal = max(-rows, min(n.integer("k", 0), columns))
    row, column = _rows_and_columns(n, rows, columns)
    return elementwise(n.b, lambda i, j: cast(call("eq", j - i, diagonal), dtype), row, column)


@translates("CenterCropPad")
def _center_crop_pad(n: OnnxNode) -> Operand:
    x, rank = n.value(0), len(n.shape(0))
    wanted = n.known_ints(1)
    axes = n.axes(n.integers("axes", list(range(rank))), rank)
    pads = [(0, 0)] * rank
    for axis, extent in zip(axes, wanted, strict=True):
        missing = extent - x.shape[axis]
        if missing < 0:
            x = slice_axis(n.b, x, axis, -missing // 2, extent)
        else:
            pads[axis] = (missing // 2, missing - missing // 2)
    return pad(n.b, x, pads)
