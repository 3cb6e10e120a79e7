"""What kernels give where PyTorch's description of them, which makes tensors without bytes, says something else."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

_LAYER_NORM = torch.ops.aten.native_layer_norm.default
_OTHER_NORMS = (torch.ops.aten.native_batch_norm.default, torch.ops.aten.native_group_norm.default)
_NORMS_BACKWARD = (
    torch.ops.aten.native_batch_norm_backward.default,
    torch.ops.aten.native_group_norm_backward.default,
    torch.ops.aten.native_layer_norm_backward.default,
)
_RECURRENT = torch.ops.aten.mkldnn_rnn_layer.default


@cache
def ops_of_cards() -> torch.library.Library:
    """RMS norm, and derivatives of SiLU and mish, as the one op that cards have for each, for the device in PyTorch's
    place for further ones; once in a process, as long as it lasts. Without a kernel there, PyTorch runs them in parts.
    And cells of a GRU, of which PyTorch does not say what they give.
    """
    library = torch.library.Library("aten", "IMPL")
    library.impl("_fused_rms_norm", _rms_norm, "PrivateUse1")
    for name in ("silu_backward", "mish_backward"):
        library.impl(name, lambda grad, x: torch.empty_like(grad), "PrivateUse1")
    library.impl("_thnn_fused_gru_cell", _gru_cell, "Meta")
    library.impl("_thnn_fused_gru_cell_backward", _gru_cell_backward, "Meta")
    return library


def _gru_cell(gates: torch.Tensor, hidden_gates: torch.Tensor, hidden: torch.Tensor, *bias: Any) -> Any:
    """The next state, and five tensors of its size that backward reads: PyTorch's kernel is described nowhere else
    (aten/src/ATen/native/cuda/RNN.cu, `GRU_WORKSPACE_MULTIPLIER`).
    """
    return torch.empty_like(hidden), hidden.new_empty((hidden.shape[0], 5 * hidden.shape[1]))


def _gru_cell_backward(grad: torch.Tensor, workspace: torch.Tensor, has_bias: bool) -> Any:
    """Gradients of both kinds of gates, of the state, and of both biases."""
    gates = (grad.shape[0], 3 * grad.shape[1])
    bias = [grad.new_empty(gates[1:]) if has_bias else None for _ in range(2)]
    return grad.new_empty(gates), grad.new_empty(gates), torch.empty_like(grad), *bias


def _rms_norm(x: torch.Tensor, shape: Any, weight: Any, epsilon: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The result, and a scale of each row."""
    rows = (*x.shape[: x.dim() - len(shape)], *(1 for _ in shape))
    return torch.empty_like(x), x.new_empty(rows, dtype=torch.float32)


def as_kernels_give(func: Any, args: Any, result: Any) -> Any:
    """The results of an op on tensors without bytes, as its kernel has them."""
    if func is _LAYER_NORM or func in _OTHER_NORMS:
        return _statistics(func, args, result)
    if func in _NORMS_BACKWARD:  # the description has the gradients that nobody asks for too
        return tuple(each if asked else None for each, asked in zip(result, args[-1]))
    if func is _RECURRENT and not result[3].numel():
        tensors = tuple((tuple(each.shape), each.dtype) for each in args[:7])
        nbytes = _recurrent_workspace(tensors, tuple(args[7:8]), tuple(args[8]), tuple(args[9:]))
        return (*result[:3], result[3].new_empty((nbytes,)))
    return result


def _statistics(func: Any, args: Any, result: Any) -> Any:
    """Mean and deviation of a norm are float32 where weights are wider than the input; and on a card, but for those of
    groups. The description has the input's type.
    """
    x, weight = args[0], args[2 if func is _LAYER_NORM else 1]
    wide = weight is not None and weight.dtype != x.dtype
    if not wide and (x.device.type == "cpu" or func is torch.ops.aten.native_group_norm.default):
        return result
    return (result[0], *(torch.empty_like(each, dtype=torch.float32) for each in result[1:]))


@cache
def _recurrent_workspace(tensors: Any, reverse: Any, sizes: Any, rest: Any) -> int:
    """Bytes that oneDNN keeps of a recurrent layer for its backward pass. The description has none: oneDNN itself is
    asked, by a run on zeros.
    """
    with unset_fake_temporarily(), torch.enable_grad():  # else it keeps nothing
        given = [torch.zeros(shape, dtype=dtype) for shape, dtype in tensors]
        return int(_RECURRENT(*given, *reverse, list(sizes), *rest)[3].numel())
