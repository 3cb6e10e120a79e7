"""The kernels of each op on a card, the layout of its outputs, and the inputs that it reads as they lie."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from foreplan.graph import Op, Window
from foreplan.graph.layouts import images, in_c_order, like_most_inputs, like_whole_input
from foreplan.graph.op import Windows
from foreplan.runtime.cuda.calibration import is_of
from foreplan.runtime.cuda.device import Device
from foreplan.runtime.cuda.kernels import (
    attention,
    biased,
    collective,
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
    prices,
    random,
    reduce,
    resize,
    row_norm,
    rows,
)
from foreplan.runtime.cuda.kernels.cudnn_attention import attention_kernel, attention_kernels
from foreplan.runtime.cuda.kernels.cudnn_conv import CUDNN, cudnn_kernel, cudnn_kernels
from foreplan.runtime.cuda.launch import USUAL, Arithmetic, LaunchKernel, Make
from foreplan.runtime.cuda.libraries import nccl
from foreplan.runtime.kernel import Family, Layout, Reads, Refused, as_it_lies

OWN = "launches"  # the name of foreplan's own kernels in plans
OWN_TF32 = f"{OWN} tf32"  # of those that multiply on tensor cores
Kernels = Mapping[str, LaunchKernel]
Price = Callable[[Op, Windows, Windows, Device], int]


@dataclass(frozen=True)
class Library:
    """Further kernels for an op: those of one of NVIDIA's libraries, or foreplan's own on tensor cores.

    Attributes:
        name: its kernels' names begin with it; a space follows.
        kernels: by name, given the op, its windows, the card, and how to compute; may be empty.
        named: the kernel for a name and payload in a plan, given the op, both, its windows, and the card.
    """

    name: str
    kernels: Callable[[Op, Windows, Windows, Device, Arithmetic], Kernels]
    named: Callable[[Op, str, bytes, Windows, Windows, Device], LaunchKernel | None]


@dataclass(frozen=True)
class CudaFamily(Family[Make]):
    """Foreplan's own kernels, and those of libraries.

    Attributes:
        libraries: that have further kernels.
        own_price: the time of foreplan's plain kernel beside these; it uses no tensor cores.
        fuses: whether the op is better than the ops that it replaces; None: if there is a kernel for it.
    """

    libraries: tuple[Library, ...] = ()
    own_price: Price | None = None
    fuses: Callable[[Op, Windows, Windows, Device], bool] | None = None


def _own(make: Make, layout: Layout = in_c_order, reads: Reads = as_it_lies, **more: Any) -> CudaFamily:
    return CudaFamily({OWN: make}, layout, reads, **more)


def _cudnn(several: Callable[..., Kernels], one: Callable[[Op, bytes, Windows, Windows], LaunchKernel]) -> Library:
    """Plans of cuDNN's; foreplan's plan holds them whole."""

    def named(
        op: Op, name: str, payload: bytes, inputs: Windows, outputs: Windows, device: Device
    ) -> LaunchKernel | None:
        return one(op, payload, inputs, outputs)

    return Library(CUDNN, several, named)


def _cublaslt(several: Callable[..., Kernels]) -> Library:
    """Calls of cuBLASLt; the op and the name determine them."""

    @lru_cache(maxsize=8192)
    def found(
        op: Op, inputs: tuple[Window, ...], outputs: tuple[Window, ...], device: Device, tf32: bool
    ) -> Mapping[str, LaunchKernel]:
        return several(op, inputs, outputs, device, tf32=tf32)

    def kernels(op: Op, inputs: Windows, outputs: Windows, device: Device, how: Arithmetic) -> Kernels:
        return found(op, tuple(inputs), tuple(outputs), device, how.tf32)

    def named(
        op: Op, name: str, payload: bytes, inputs: Windows, outputs: Windows, device: Device
    ) -> LaunchKernel | None:
        either = () if payload else (kernels(op, inputs, outputs, device, Arithmetic(tf32)) for tf32 in (False, True))
        return next((found[name] for found in either if name in found), None)

    return Library(lt.CUBLASLT, kernels, named)


def _tf32(make: Callable[..., LaunchKernel]) -> Library:
    """Foreplan's own launches, on tensor cores."""

    def kernels(op: Op, inputs: Windows, outputs: Windows, device: Device, how: Arithmetic) -> Kernels:
        if not how.tf32:
            return {}
        try:
            found = attention.on_tensor_cores(make, op, inputs, outputs, device)
        except Refused:
            return {}
        price = prices.attention(op, inputs, outputs, device, tensor_cores=True)
        return {OWN_TF32: replace(found, nanoseconds=price)}

    def named(
        op: Op, name: str, payload: bytes, inputs: Windows, outputs: Windows, device: Device
    ) -> LaunchKernel | None:
        return None if payload else kernels(op, inputs, outputs, device, Arithmetic(tf32=True)).get(name)

    return Library(OWN_TF32, kernels, named)


CONVOLUTIONS = _cudnn(cudnn_kernels, cudnn_kernel)
ATTENTION = _cudnn(attention_kernels, attention_kernel)
PACKED = _cudnn(packed_attention.packed_kernels, packed_attention.packed_kernel)
PRODUCTS = _cublaslt(lt.lt_kernels)
PRODUCTS_AND_LOSS = _cublaslt(linear_cross_entropy.lt_kernels)


EXCHANGES = CudaFamily(
    {},
    in_c_order,
    collective.reads,
    libraries=(Library(nccl.NAME, collective.exchanges, collective.exchange_named),),
)


def _product(make: Make, **more: Any) -> CudaFamily:
    return _own(make, libraries=(PRODUCTS,), own_price=lt.own_nanoseconds, **more)


def _convolution(make: Make, layout: Layout = in_c_order) -> CudaFamily:
    """Those of one tap are products."""
    return _own(make, layout, libraries=(CONVOLUTIONS, PRODUCTS), own_price=prices.convolution)


def _attention(make: Callable[..., LaunchKernel], reads: Reads, library: Library = ATTENTION) -> CudaFamily:
    return _own(make, reads=reads, libraries=(library, _tf32(make)), own_price=prices.attention)


FAMILIES: Mapping[str, CudaFamily] = {
    "map": _own(map.elementwise, like_whole_input),
    "masked_map": _own(map.masked, like_whole_input),
    "multi_map": _own(multi_map.multi_map, reads=multi_map.reads),
    "pack_bits": _own(map.pack),
    "random": _own(random.random),
    "reduce": _own(reduce.reduce),
    "matmul": _product(matmul.matmul),
    "matmul_map": _product(biased.biased, fuses=lt.adds_bias),
    "softmax": _own(rows.softmax, rows.like_first),
    "softmax_grad": _own(rows.softmax, rows.like_first),
    "log_softmax": _own(rows.softmax, rows.like_first),
    "log_softmax_grad": _own(rows.softmax, rows.like_first),
    "cross_entropy": _own(rows.cross_entropy),
    "cross_entropy_grad": _own(rows.cross_entropy_grad, rows.like_first),
    "channel_moments": _own(norm.moments, norm.layout, norm.reads),
    "channel_sums": _own(norm.gradient_sums, norm.layout, norm.reads),
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
    "attention": _attention(attention.attention, attention.reads),
    "attention_grad": _attention(attention.gradient, attention.reads),
    "packed_attention_grad": _attention(packed_attention.gradient, packed_attention.reads, PACKED),
    "linear_cross_entropy": _own(
        linear_cross_entropy.linear_cross_entropy,
        reads=linear_cross_entropy.reads,
        libraries=(PRODUCTS_AND_LOSS,),
        own_price=lt.own_nanoseconds,
    ),
    "cumsum": _own(lines.cumsum),
    "arg_reduce": _own(lines.arg_reduce),
    "top_k": _own(lines.top_k),
    "gather_elements": _own(lines.gather_elements),
    "map_scatter_add": _own(index.scatter_add, reads=index.scatter_reads),
    "scatter_reduce": _own(index.scatter_add, reads=index.scatter_reads),
    "first_equal": _own(index.first_equal, reads=index.indices_reads),
    "scatter_elements_add": _own(lines.scatter_elements_add),
    "unstack": _own(lines.unstack),
    "begin_exchange": EXCHANGES,
    "finish_exchange": EXCHANGES,
    "begin_send": EXCHANGES,
    "begin_receive": EXCHANGES,
    "own_part": _own(collective.own_part, reads=collective.reads),
    "only_on": _own(collective.only_on, reads=collective.reads),
    "local_index": _own(collective.local_index),
    "conv": _convolution(conv.conv, images),
    "conv_data_grad": _convolution(conv.data_gradient, images),
    "conv_weight_grad": _convolution(conv.weight_gradient),
}


@lru_cache(maxsize=8192)
def _make(op: Op, inputs: tuple[Window, ...], outputs: tuple[Window, ...], device: Device) -> LaunchKernel | None:
    make = FAMILIES[op.name].ways.get(OWN)
    try:
        return make(op, inputs, outputs, device) if make else None
    except Refused:
        return None


def kernel_for(op: Op, inputs: Windows, outputs: Windows, device: Device) -> LaunchKernel | None:
    """The kernel for an op on tensors with these layouts; None if there is none."""
    return _make(op, tuple(inputs), tuple(outputs), device) if op.name in FAMILIES else None


@lru_cache(maxsize=8192)
def _ways(
    op: Op, inputs: tuple[Window, ...], outputs: tuple[Window, ...], device: Device, how: Arithmetic
) -> Mapping[str, LaunchKernel]:
    family, own = FAMILIES.get(op.name), kernel_for(op, inputs, outputs, device)
    found: dict[str, LaunchKernel] = {}
    for library in family.libraries if family else ():
        found |= library.kernels(op, inputs, outputs, device, how)
    if own is not None:
        price = family.own_price if family else None
        found[OWN] = replace(own, nanoseconds=price(op, inputs, outputs, device)) if price else own
    return found


def kernels_for(
    op: Op, inputs: Windows, outputs: Windows, device: Device, how: Arithmetic = USUAL
) -> Mapping[str, LaunchKernel]:
    """The kernels for an op on tensors with these layouts, by name: foreplan's launches, calls of cuBLASLt, and plans
    of cuDNN where it is installed.
    """
    return _ways(op, tuple(inputs), tuple(outputs), device, how)


def takes_place(op: Op, inputs: Windows, outputs: Windows, device: Device, how: Arithmetic) -> bool:
    """Whether an op is better than the several ops that it replaces."""
    if (family := FAMILIES.get(op.name)) and family.fuses:
        return family.fuses(op, inputs, outputs, device)
    return bool(kernels_for(op, inputs, outputs, device, how))


def kernel_named(
    op: Op, name: str, payload: bytes, inputs: Windows, outputs: Windows, device: Device
) -> LaunchKernel | None:
    """The kernel that a plan names, cuDNN's from its payload; None if there is no such kernel."""
    if name == OWN and not payload:
        return kernel_for(op, inputs, outputs, device)
    libraries = FAMILIES[op.name].libraries if op.name in FAMILIES else ()
    library = next((each for each in libraries if is_of(name, each.name)), None)
    try:
        return library.named(op, name, payload, inputs, outputs, device) if library else None
    except Refused:
        return None


def family_of(op: Op) -> CudaFamily | None:
    """The family of an op, if it has one."""
    return FAMILIES.get(op.name)
