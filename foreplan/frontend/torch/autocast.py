"""What `torch.autocast` computes in the narrow type, and what in float32."""

from __future__ import annotations

from typing import Any

from foreplan.frontend.torch.call import dtype_of
from foreplan.frontend.tracing.elementwise import convert
from foreplan.frontend.tracing.tensor import Tensor

# PyTorch's own lists (docs, "Autocast Op Reference"), as far as these ops have entries. Everything else takes the
# types that it is given.
_CAST = (
    *("linear", "matmul", "bmm", "mm", "mv", "addmm", "baddbmm", "conv1d", "conv2d", "conv3d"),
    *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "scaled_dot_product_attention", "prelu"),
    *("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell", "lstm", "gru", "rnn_tanh", "rnn_relu"),
    *("einsum", "softmax", "log_softmax", "layer_norm", "group_norm", "norm", "cumsum", "cumprod", "sum"),
    *("prod", "exp", "expm1", "log", "log10", "log2", "log1p", "pow", "rsqrt", "reciprocal", "softplus"),
    *("cross_entropy_loss", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "cdist"),
    *("renorm", "erfinv", "binary_cross_entropy_with_logits", "kl_div"),
)


def cast(name: str, arguments: Any, result: Any) -> Any:
    """Arguments of an op within autocast, in the type that its result has.

    Args:
        name: of the op, without the `_` of one in place.
        arguments: nested; tensors of floats are converted.
        result: what PyTorch says of it.
    """
    import torch
    from torch.utils import _pytree as pytree

    wanted = next((x.dtype for x in pytree.tree_leaves(result) if isinstance(x, torch.Tensor)), None)
    if name not in _CAST or wanted is None or not wanted.is_floating_point:
        return arguments
    dtype = dtype_of(wanted)
    return pytree.tree_map_only(Tensor, lambda x: convert(x, dtype) if x.value.dtype.is_float else x, arguments)
