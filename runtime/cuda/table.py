"""Which kernel runs an op on a card, how its outputs lie, and what it reads as it lies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

from foreplan.graph import Op, Window
from foreplan.graph.layouts import images, in_c_order, like_most_inputs, like_whole_input
from foreplan.graph.op import Windows
from foreplan.ops.attention.blocks import AttentionOp
from foreplan.ops.attention.packed import PackedAttentionGrad
from foreplan.ops.conv.common import ConvOp
from foreplan.ops.linear_cross_entropy import LinearCrossEntropy
from foreplan.ops.matmul import MatMul
from foreplan.ops.matmul_map import MatMulMap
from foreplan.runtime.cuda.device import Device
from foreplan.runtime.cuda.kernels import (
    attention,
    biased,
    conv,
    index,
    join,
    linear_cross_entropy,
    lines,
    lt,
    map,
    matmul,
    multi_map,
    norm,
    packed_attention,
    pool,
    random,
    reduce,
    resize,
    row_norm,
    rows,
)
from foreplan.runtime.cuda.kernels.cudnn_attention import attention_kernel, attention_kernels
from foreplan.runtime.cuda.kernels.cudnn_conv import CUDNN, cudnn_kernel, cudnn_kernels, own_nanoseconds
from foreplan.runtime.cuda.launch import LaunchKernel, Make
from foreplan.runtime.kernel import Family, Layout, Reads, Refused, as_it_lies

OWN = "launches"  # the name of our own kernels in plans
PRICED = (
    MatMul,
    MatMulMap,
    ConvOp,
    AttentionOp,
    PackedAttentionGrad,
    LinearCrossEntropy,
)  # ops that libraries may run, by tensor cores: our own kernels have none


def _own(make: Make, layout: Layout = in_c_order, reads: Reads = as_it_lies) -> Family[Make]:
    """Kernels of ours; what libraries have beside them depends on the card."""
    return Family({OWN: make}, layout, reads)


FAMILIES: Mapping[str, Family[Make]] = {
    "map": _own(map.elementwise, like_whole_input),
    "masked_map": _own(map.masked, like_whole_input),
    "multi_map": _own(multi_map.multi_map, reads=multi_map.reads),
    "pack_bits": _own(map.pack),
    "random": _own(random.random),
    "reduce": _own(reduce.reduce),
    "matmul": _own(matmul.matmul),
    "matmul_map": _own(biased.biased),
    "softmax": _own(rows.softmax, rows.like_first),
    "softmax_grad": _own(rows.softmax, rows.like_first),
    "log_softmax": _own(rows.softmax, rows.like_first),
    "log_softmax_grad": _own(rows.softmax, rows.like_first),
    "cross_entropy": _own(rows.cross_entropy),
    "cross_entropy_grad": _own(rows.cross_entropy_grad, rows.like_first),
    "channel_moments": _own(norm.moments, norm.layout, norm.reads),
    "batch_norm_grad": _own(norm.gradient, norm.layout, norm.reads),
    "masked_batch_norm_grad": _own(norm.masked_gradient, norm.layout, norm.reads),
    "max_pool": _own(pool.pool, images),
    "max_pool_grad": _own(pool.pool, images),
    "avg_pool": _own(pool.pool, images),
    "avg_pool_grad": _own(pool.pool, images),
    "resize": _own(resize.resize, like_most_inputs),
    "resize_grad": _own(resize.resize, like_most_inputs),
    "concat": _own(join.concat, like_most_inputs),
    "pad": _own(join.pad, like_most_inputs),
    "unslice": _own(join.unslice, like_most_inputs),
    "gather": _own(index.gather, reads=index.gather_reads),
    "scatter_add": _own(index.scatter_add, reads=index.scatter_reads),
    "layer_norm": _own(row_norm.normal, reads=row_norm.reads),
    "layer_norm_grad": _own(row_norm.gradient, reads=row_norm.reads),
    "rms_norm": _own(row_norm.normal, reads=row_norm.reads),
    "rms_norm_grad": _own(row_norm.gradient, reads=row_norm.reads),
    "attention": _own(attention.attention, reads=attention.reads),
    "attention_grad": _own(attention.gradient, reads=attention.reads),
    "packed_attention_grad": _own(packed_attention.gradient, reads=packed_attention.reads),
    "linear_cross_entropy": _own(linear_cross_entropy.linear_cross_entropy, reads=linear_cross_entropy.reads),
    "cumsum": _own(lines.cumsum),
    "arg_reduce": _own(lines.arg_reduce),
    "top_k": _own(lines.top_k),
    "gather_elements": _own(lines.gather_elements),
    "scatter_elements_add": _own(lines.scatter_elements_add),
    "unstack": _own(lines.unstack),
    "conv": _own(conv.conv, images),
    "conv_data_grad": _own(conv.data_gradient, images),
    "conv_weight_grad": _own(conv.weight_gradient),
}


@lru_cache(maxsize=8192)
def _make(op: Op, inputs: tuple[Window, ...], outputs: tuple[Window, ...], device: Device) -> LaunchKernel | None:
    try:
        return FAMILIES[op.name].ways[OWN](op, inputs, outputs, device)
    except Refused:
        return None


def kernel_for(op: Op, inputs: Windows, outputs: Windows, device: Device) -> LaunchKernel | None:
    """The kernel for an op on tensors that lie so; None where there is none."""
    return _make(op, tuple(inputs), tuple(outputs), device) if op.name in FAMILIES else None


@lru_cache(maxsize=8192)
def _ways(
    op: Op, inputs: tuple[Window, ...], outputs: tuple[Window, ...], device: Device, tf32: bool, deterministic: bool
) -> Mapping[str, LaunchKernel]:
    own = kernel_for(op, inputs, outputs, device)
    theirs = {
        **cudnn_kernels(op, inputs, outputs, device, tf32=tf32, deterministic=deterministic),
        **attention_kernels(op, inputs, outputs, device, deterministic=deterministic),
        **packed_attention.packed_kernels(op, inputs, outputs, device, deterministic=deterministic),
    }
    products = lt.lt_kernels(op, inputs, outputs, device, tf32=tf32)
    of_products = linear_cross_entropy.lt_kernels(op, inputs, outputs, device, tf32=tf32)
    if own is not None and isinstance(op, PRICED):
        price = lt.own_nanoseconds if products else own_nanoseconds
        own = replace(own, nanoseconds=price(op, inputs, outputs, device))
    return {**theirs, **products, **of_products, **({} if own is None else {OWN: own})}


def kernels_for(
    op: Op, inputs: Windows, outputs: Windows, device: Device, *, tf32: bool = False, deterministic: bool = True
) -> Mapping[str, LaunchKernel]:
    """The kernels for an op on tensors that lie so, by name: launches of ours, calls of cuBLASLt, and cuDNN's plans
    where it is installed.

    Args:
        tf32: whether cuDNN and cuBLASLt may round float32 to TensorFloat-32 on its way into products.
        deterministic: whether cuDNN's results must be the same bits each time.
    """
    return _ways(op, tuple(inputs), tuple(outputs), device, tf32, deterministic)


def takes_place(op: Op, inputs: Windows, outputs: Windows, device: Device, *, tf32: bool, deterministic: bool) -> bool:
    """Whether an op that does what several do is better off than they are: of a product, by cuBLASLt alone."""
    if isinstance(op, MatMulMap):
        return lt.adds_bias(op, inputs, outputs, device)
    return bool(kernels_for(op, inputs, outputs, device, tf32=tf32, deterministic=deterministic))


def kernel_named(
    op: Op, name: str, payload: bytes, inputs: Windows, outputs: Windows, device: Device
) -> LaunchKernel | None:
    """The kernel that a plan names, of cuDNN's from what the plan has of it; None where there is none such."""
    if name == OWN and not payload:
        return kernel_for(op, inputs, outputs, device)
    library = name.split(" ")[0]
    try:
        if library == lt.CUBLASLT and not payload:
            several = linear_cross_entropy.lt_kernels if isinstance(op, LinearCrossEntropy) else lt.lt_kernels
            return several(op, inputs, outputs, device, tf32="tf32" in name.split(" ")).get(name)
        if library != CUDNN:
            return None
        if isinstance(op, PackedAttentionGrad):
            return packed_attention.packed_kernel(op, payload, inputs, outputs)
        make = attention_kernel if isinstance(op, AttentionOp) else cudnn_kernel
        return make(op, payload, inputs, outputs)
    except Refused:
        return None


def family_of(op: Op) -> Family[Make] | None:
    """The family of an op, if it has one."""
    return FAMILIES.get(op.name)
