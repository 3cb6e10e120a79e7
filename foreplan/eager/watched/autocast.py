"""Autocast on the imagined card: PyTorch's kernels of it are for devices that it knows, and these are for that one.

Which ops there are is asked of PyTorch: those that autocast has a kernel for on cards. What it does to each is written
here. Reference: `aten/src/ATen/autocast_mode.h` of PyTorch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_iter, tree_unflatten

_KEY = "AutocastPrivateUse1"
_LOWER = """
_convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d convolution prelu addmm
addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot
_thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
_scaled_dot_product_flash_attention scaled_dot_product_attention
"""
_WIDE_RESULT = "prod softmax log_softmax cumprod cumsum linalg_vector_norm linalg_matrix_norm sum"
_WIDEST = "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add stack cat"
_HOW = {
    name: how
    for how, names in (("lower", _LOWER), ("wide result", _WIDE_RESULT), ("widest", _WIDEST))
    for name in names.split()
}  # all others: float32
_weights: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # casts of weights, as long as the outermost region runs


@cache
def autocast_on(device: str) -> tuple[torch.library.Library, ...]:
    """Kernels of autocast for a device in PyTorch's place for further ones; once in a process, as long as it lasts."""
    library, others = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")
    others.fallback(torch.library.fallthrough_kernel, _KEY)
    for name in torch._C._dispatch_get_all_op_names():
        if not name.startswith("aten::"):
            continue
        if torch._C._dispatch_has_kernel_for_dispatch_key(name, "AutocastCUDA"):
            base, _, overload = name.removeprefix("aten::").partition(".")
            op = getattr(getattr(torch.ops.aten, base), overload or "default")
            library.impl(op, _kernel(op, base, device), _KEY)
    return library, others


def _kernel(op: Any, name: str, device: str) -> Callable[..., Any]:
    """What autocast does to the operands of an op."""
    excluded = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _KEY))

    def eligible(value: torch.Tensor) -> bool:
        return value.is_floating_point() and value.device.type == device and value.dtype != torch.float64

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            dtypes = [each.dtype for each in tree_iter((args, kwargs)) if isinstance(each, torch.Tensor)]
            if _HOW.get(name) == "wide result":
                given = dict(zip((each.name for each in op._schema.arguments), args)) | kwargs
                narrow = dtypes[0] in (torch.float16, torch.bfloat16)
                if narrow and given.get("dtype") is None and "dtype" in {each.name for each in op._schema.arguments}:
                    given["dtype"] = torch.float32
                return op(**given)
            dtype = torch.float32
            if _HOW.get(name) == "lower":
                dtype = torch.get_autocast_dtype(device)
            elif _HOW.get(name) == "widest" and torch.float32 not in dtypes:
                return op(*args, **kwargs)
            leaves, form = tree_flatten((args, kwargs))
            for i in reversed(range(len(leaves))):  # the last first, as compiled by GCC
                if isinstance(leaves[i], torch.Tensor) and eligible(leaves[i]):
                    leaves[i] = _cast(leaves[i], dtype)
            args, kwargs = tree_unflatten(leaves, form)
            return op(*args, **kwargs)

    return run


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor in another type; that of a weight is kept."""
    if tensor.dtype == dtype:
        return tensor
    if not (tensor.is_leaf and tensor.requires_grad and tensor.dtype == torch.float32 and dtype != torch.float32):
        return tensor.to(dtype)
    if not torch.is_autocast_cache_enabled():
        return tensor.to(dtype)
    if id(tensor) not in _weights:
        _weights[id(tensor)] = (tensor, tensor.to(dtype))
    return _weights[id(tensor)][1]


@contextmanager
def casts_of_weights() -> Iterator[None]:
    """While they are kept: PyTorch drops its own where the outermost region of autocast ends, and these with them."""
    theirs = torch.clear_autocast_cache

    def clear() -> None:
        _weights.clear()
        theirs()

    torch.clear_autocast_cache = clear
    try:
        yield
    finally:
        torch.clear_autocast_cache = theirs
        _weights.clear()
