"""The kernels of each op on the CPU, the layout of its outputs, and the inputs that it reads as they lie."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial

from foreplan.graph import Op, Window
from foreplan.graph.blocks import Blocks
from foreplan.graph.layouts import channels_last, images, in_c_order, lie_alike, like_most_inputs, like_whole_input
from foreplan.graph.op import Types, Windows
from foreplan.lower.fallbacks import IN_FLOAT32
from foreplan.runtime.cpu.gemm.panels import Panels
from foreplan.runtime.cpu.gemm.tiles import Tiles
from foreplan.runtime.cpu.gemm.vectors import Vectors
from foreplan.runtime.cpu.instructions import Level, level
from foreplan.runtime.cpu.kernel import CpuKernel, Make
from foreplan.runtime.cpu.kernels import (
    attention,
    attention_grad,
    contraction,
    convolution,
    depthwise,
    elementwise,
    index,
    join,
    linear_cross_entropy,
    loss,
    norm,
    planes,
    pool,
    random,
    reduce,
    resize,
    row_norm,
    softmax,
    widened,
)
from foreplan.runtime.cpu.kernels.rows import channel_rows
from foreplan.runtime.cpu.threads import set_threads
from foreplan.runtime.kernel import Family, Refused


def _as_reference(op: Op, index: int, window: Window) -> Window:
    return op.reads(index, window)


def _product_reads(op: Op, index: int, window: Window) -> Window:
    """Factors as the reference kernel takes them; the map's other inputs with their rows side by side."""
    item = window.type.dtype.itemsize
    rows = index > 1 and (window.type.rank == 0 or window.shape[-1] == 1 or window.strides[-1] == item)
    return window if rows else _as_reference(op, index, window) if index < 2 else Window.dense(window.type)


def _conv_reads(op: Op, index: int, window: Window) -> Window:
    """Images with their channels last; weights and summands with any strides; vectors in C order."""
    image = index == 0 or (index == 1 and op.name == "conv_weight_grad")
    last = channels_last(window.type)
    if not image:
        vector = index > 1 and math.prod(window.shape) == max(window.shape)
        return window if not vector or lie_alike(window, last) else last
    steps = zip(window.shape, window.strides, last.strides)
    in_order = all(extent == 1 or step >= least > 0 for extent, step, least in steps)
    together = window.shape[1] == 1 or window.strides[1] == window.type.dtype.itemsize
    return window if (in_order and together) or window == last else last


def _conv_layout(op: Op, inputs: Windows, outputs: Types) -> list[Window]:
    """Images of two axes with their channels last. Others as the data lie: of some, oneDNN has kernels in C order
    alone.
    """
    x = inputs[0]
    in_order = x.type.rank != 4 and x.is_dense and not lie_alike(x, channels_last(x.type))
    return [Window.dense(type) for type in outputs] if in_order else images(op, inputs, outputs)


def _channel_reads(op: Op, index: int, window: Window) -> Window:
    """Images with their channels side by side, positions at equal distances; anything else in C order."""
    return window if channel_rows(window) is not None else channels_last(window.type)


def _means(op: Op, inputs: Windows, outputs: Types) -> Sequence[Window]:
    return planes.layout(inputs, outputs) if planes.is_plane(inputs[0].type) else images(op, inputs, outputs)


def _mean_reads(op: Op, index: int, window: Window) -> Window:
    """Images of one channel along either axis."""
    return planes.reads(window) if planes.is_plane(window.type) else _channel_reads(op, index, window)


def _depth_together(op: Op, index: int, window: Window) -> Window:
    """As the reference kernel takes it, the last axis without gaps."""
    window = _as_reference(op, index, window)
    whole = index == 6 or window.strides[-1] == window.type.dtype.itemsize  # a mask may lie in any way
    return window if whole else Window.dense(window.type)


_PRODUCT: Mapping[str, Make] = {
    "tiles": partial(contraction.matmul_in_blocks, way=Tiles),
    "panels": partial(contraction.matmul_in_blocks, way=Panels),
    "vectors": contraction.matmul_by_vectors,
    "onednn": contraction.matmul,
}
_MAPPED_PRODUCT: Mapping[str, Make] = {
    "tiles": partial(contraction.matmul_map, way=Tiles),
    "panels": partial(contraction.matmul_map, way=Panels),
    "vectors": partial(contraction.matmul_map, way=Vectors),
}
TRANSFORMED = ("winograd",)  # the ways that multiply sums of numbers, not the numbers
_CONVOLUTION: Mapping[str, Make] = {
    "winograd": convolution.conv_by_winograd,
    "products": convolution.conv_by_products,
    "tiles": partial(convolution.conv_in_blocks, way=Tiles),
    "panels": partial(convolution.conv_in_blocks, way=Panels),
    "columns": convolution.conv_by_columns,
    "depthwise": depthwise.depthwise,
    "onednn": convolution.conv,
}
_DATA_GRADIENT: Mapping[str, Make] = {
    "winograd": convolution.data_gradient_by_winograd,
    "products": convolution.data_gradient_by_products,
    "tiles": partial(convolution.data_gradient_by_products, way=Tiles),
    "panels": partial(convolution.data_gradient_by_products, way=Panels),
    "onednn": convolution.conv_data_gradient,
}
_WEIGHT_GRADIENT: Mapping[str, Make] = {
    "winograd": convolution.weight_gradient_by_winograd,
    "products": convolution.weight_gradient_by_products,
    "tiles": partial(convolution.weight_gradient_by_products, way=Tiles),
    "panels": partial(convolution.weight_gradient_by_products, way=Panels),
    "onednn": convolution.conv_weight_gradient,
}
FAMILIES: Mapping[str, Family[Make]] = {
    "map": Family({"lanes": elementwise.elementwise}, like_whole_input, elementwise.reads, True),
    "masked_map": Family({"lanes": elementwise.masked}, like_whole_input, elementwise.reads, True),
    "pack_bits": Family({"lanes": elementwise.pack}, elementwise.pack_layout, elementwise.pack_reads, True),
    "random": Family({"lanes": random.random}, in_c_order, _as_reference),
    "reduce": Family({"lanes": reduce.reduce}, in_c_order, elementwise.reads),
    "matmul": Family(_PRODUCT, in_c_order, _as_reference),
    "matmul_map": Family(_MAPPED_PRODUCT, in_c_order, _product_reads),
    "conv": Family(_CONVOLUTION, _conv_layout, _conv_reads, True),
    "conv_map": Family(_CONVOLUTION, _conv_layout, _conv_reads, True),
    "conv_data_grad": Family(_DATA_GRADIENT, _conv_layout, _conv_reads, True),
    "conv_weight_grad": Family(_WEIGHT_GRADIENT, in_c_order, _conv_reads, True),
    "layer_norm": Family({"loops": row_norm.normal}, in_c_order, row_norm.reads),
    "layer_norm_grad": Family({"loops": row_norm.gradient}, in_c_order, row_norm.reads),
    "rms_norm": Family({"loops": row_norm.normal}, in_c_order, row_norm.reads),
    "rms_norm_grad": Family({"loops": row_norm.gradient}, in_c_order, row_norm.reads),
    "softmax": Family({"loops": softmax.row_kernel}, softmax.layout, softmax.reads, True),
    "softmax_grad": Family({"loops": softmax.row_kernel}, softmax.layout, softmax.reads, True),
    "log_softmax": Family({"loops": softmax.row_kernel}, softmax.layout, softmax.reads, True),
    "log_softmax_grad": Family({"loops": softmax.row_kernel}, softmax.layout, softmax.reads, True),
    "cross_entropy": Family({"loops": loss.losses}, loss.layout, loss.reads, True),
    "cross_entropy_grad": Family({"loops": loss.gradients}, loss.layout, loss.reads, True),
    "gather": Family({"loops": index.gather}, in_c_order, _as_reference),
    "scatter_add": Family({"loops": index.scatter_add}, in_c_order, index.scatter_reads),
    "map_scatter_add": Family({"loops": index.map_scatter_add}, in_c_order, index.scatter_reads),
    "scatter_reduce": Family({"loops": index.scatter_add}, in_c_order, index.scatter_reads),
    "first_equal": Family({"loops": index.first_equal}, in_c_order, _as_reference),
    "concat": Family({"copies": join.concat}, like_most_inputs, join.reads),
    "pad": Family({"copies": join.padded}, like_most_inputs, join.reads),
    "unslice": Family({"copies": join.padded}, like_most_inputs, join.reads),
    "resize": Family({"loops": resize.resize}, in_c_order, _as_reference),
    "resize_grad": Family({"loops": resize.resize}, in_c_order, _as_reference),
    "unstack": Family({"copies": join.unstack}, in_c_order, join.reads),
    "max_pool": Family({"loops": pool.largest}, images, _channel_reads, True),
    "max_pool_grad": Family({"loops": pool.largest_gradient}, images, _channel_reads, True),
    "avg_pool": Family({"loops": pool.mean}, _means, _mean_reads, True),
    "avg_pool_grad": Family({"loops": pool.mean}, _means, _mean_reads, True),
    "channel_moments": Family({"loops": norm.moments}, images, _channel_reads, True),
    "channel_sums": Family({"loops": norm.gradient_sums}, images, _channel_reads, True),
    "batch_norm": Family({"loops": norm.normal}, images, _channel_reads, True),
    "batch_norm_grad": Family({"loops": norm.gradient}, images, _channel_reads, True),
    "attention": Family({"onednn": attention.attention}, in_c_order, _as_reference),
    "attention_grad": Family({"onednn": attention_grad.attention_grad}, in_c_order, _depth_together),
    "packed_attention_grad": Family({"onednn": attention_grad.packed_attention_grad}, in_c_order, _depth_together),
    "linear_cross_entropy": Family({"onednn": linear_cross_entropy.linear_cross_entropy}, in_c_order, _as_reference),
}


# The ways that take weights in blocks: those that they would pack them in themselves; lookups take any of a matrix.
IN_BLOCKS: Mapping[str, Sequence[str]] = {
    "gather": ("loops",),
    "matmul": ("panels",),
    "matmul_map": ("panels",),
    "conv": ("panels", "depthwise", "onednn"),
    "conv_map": ("panels", "depthwise", "onednn"),
}


@lru_cache(maxsize=8192)
def _make(op: Op, inputs: tuple[Window, ...], outputs: tuple[Window, ...], threads: int) -> Mapping[str, CpuKernel]:
    set_threads(threads)  # scratch memory depends on their number
    ways = FAMILIES[op.name].ways
    if any(x.blocks is not None for x in inputs):
        return _made({name: ways[name] for name in IN_BLOCKS.get(op.name, ())}, op, inputs, outputs)
    found = _made(ways, op, inputs, outputs)
    slow = level() < Level.AMX or not found
    if slow and "onednn" in ways and widened.has_narrow(inputs, outputs):
        wide = {name + IN_FLOAT32: partial(widened.widened, make) for name, make in ways.items()}
        found |= _made(wide, op, inputs, outputs)
    return found


def _made(ways: Mapping[str, Make], op: Op, inputs: Windows, outputs: Windows) -> dict[str, CpuKernel]:
    found: dict[str, CpuKernel] = {}
    for name, make in ways.items():
        with suppress(Refused):
            found[name] = make(op, inputs, outputs)
    return found


def kernels_for(op: Op, inputs: Windows, outputs: Windows, threads: int) -> Mapping[str, CpuKernel]:
    """The kernels for an op on tensors that lie so, by name; none where only the op's own NumPy kernel runs it."""
    return _make(op, tuple(inputs), tuple(outputs), threads) if op.name in FAMILIES else {}


def blocks_for(op: Op, inputs: Windows, outputs: Windows, threads: int) -> Sequence[Blocks]:
    """The blocks in which kernels for an op would have its weights, input 1, so as not to pack them themselves."""
    found = kernels_for(op, inputs, outputs, threads)
    wanted = (getattr(found.get(name), "wants", None) for name in IN_BLOCKS.get(op.name, ()))
    return list(dict.fromkeys(blocks for blocks in wanted if blocks is not None))


def family_of(op: Op, inputs: Types, outputs: Types, threads: int) -> Family[Make] | None:
    """The family of an op, if it has a kernel for these types in its preferred layouts."""
    return None if _liked(op, inputs, outputs, threads) is None else FAMILIES[op.name]


def reads_of(op: Op, inputs: Windows, outputs: Types, threads: int) -> Windows | None:
    """How the inputs of an op are taken: each as it lies or as a copy in another layout, or all in the family's
    preferred layouts; None without a kernel.
    """
    liked = _liked(op, [x.type for x in inputs], outputs, threads)
    if liked is None:
        return None
    family = FAMILIES[op.name]
    found = [family.reads(op, i, x) if x.blocks is None else x for i, x in enumerate(inputs)]
    return found if kernels_for(op, found, family.layout(op, found, outputs), threads) else liked


def _liked(op: Op, inputs: Types, outputs: Types, threads: int) -> Windows | None:
    """Inputs in the preferred layouts of an op's family, if it has a kernel for them."""
    family = FAMILIES.get(op.name)
    if family is None:
        return None
    dense = [Window.dense(type) for type in inputs]
    last = [family.reads(op, i, channels_last(type)) for i, type in enumerate(inputs)]
    for windows in (last, dense) if family.images else (dense,):
        if kernels_for(op, windows, family.layout(op, windows, outputs), threads):
            return windows
    return None
