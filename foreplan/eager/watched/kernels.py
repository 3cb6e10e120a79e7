"""What kernels give where PyTorch's description of them, which makes tensors without bytes, says something else."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

_LAYER_NORM = torch.ops.aten.native_layer_norm.default
_RECURRENT = torch.ops.aten.mkldnn_rnn_layer.default


def as_kernels_give(func: Any, args: Any, result: Any) -> Any:
    """The results of an op on tensors without bytes, as its kernel has them."""
    if func is _LAYER_NORM:
        return _statistics(args, result)
    if func is _RECURRENT and not result[3].numel():
        tensors = tuple((tuple(each.shape), each.dtype) for each in args[:7])
        nbytes = _recurrent_workspace(tensors, tuple(args[7:8]), tuple(args[8]), tuple(args[9:]))
        return (*result[:3], result[3].new_empty((nbytes,)))
    return result


def _statistics(args: Any, result: Any) -> Any:
    """Mean and deviation of a layer norm are float32 on a card, and where weights are wider than the input. The
    description has the input's type.
    """
    x, _, weight = args[:3]
    if x.device.type == "cpu" and (weight is None or weight.dtype == x.dtype):
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
