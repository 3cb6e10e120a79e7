"""What a card's convolutions take for their own duration, as the library says that is asked for them."""

from __future__ import annotations

from typing import Any

import torch

from foreplan.eager.workspace import Workspaces
from foreplan.graph.types import DTYPES, TensorType
from foreplan.ops.conv.common import ConvOp
from foreplan.ops.conv.ops import Conv, ConvDataGrad, ConvWeightGrad

_FORWARD = torch.ops.aten.convolution.default
_BACKWARD = torch.ops.aten.convolution_backward.default


def workspaces_of(workspaces: Workspaces, func: Any, args: Any, results: Any, node: str) -> dict[int, tuple[int, str]]:
    """The workspace of each result of a convolution, or of its gradients: bytes, and what takes them.

    Args:
        workspaces: who is asked.
        results: a flat list.
        node: the part of the module that runs.
    """
    asked: dict[int, tuple[str, ConvOp, Any]] = {}
    if func is _FORWARD:
        x, weight, _, *how = args
        if (geometry := _geometry(how, x)) is not None:
            spatial = tuple(results[0].shape[2:])
            op: ConvOp = ConvDataGrad(*geometry, spatial=spatial) if how[3] else Conv(*geometry)
            asked[0] = ("convolution", op, (x, weight))
    elif func is _BACKWARD:
        grad, x, weight, _, *how, needs = args
        if (geometry := _geometry(how, x)) is not None:
            data: ConvOp = Conv(*geometry) if how[3] else ConvDataGrad(*geometry, spatial=tuple(x.shape[2:]))
            images = (grad, x) if how[3] else (x, grad)
            weights = ConvWeightGrad(*geometry, kernel=tuple(weight.shape[2:]))
            parts = [("gradient of the data", data, (grad, weight)), ("gradient of the weight", weights, images)]
            asked = {i: part for i, part in enumerate(parts) if needs[i]}
    found = {}
    for i, (name, each, inputs) in asked.items():
        types = [_type(tensor) for tensor in (*inputs, results[i])]
        if nbytes := workspaces.of(each, types[:-1], types[-1], func is _BACKWARD, node):
            found[i] = (nbytes, f"workspace of {name}")
    return found


def _geometry(how: Any, x: torch.Tensor) -> tuple[Any, Any, Any, int] | None:
    """Of a convolution; None: PyTorch has a kernel of its own for it, without workspace."""
    stride, padding, dilation, transposed, _, groups = how
    if not transposed and 1 < groups == x.shape[1]:
        return None
    axes = x.dim() - 2
    strides, pads, dilations = (tuple(each) * (axes // len(each)) for each in (stride, padding, dilation))
    return strides, tuple((pad, pad) for pad in pads), dilations, groups


def _type(tensor: torch.Tensor) -> TensorType:
    return TensorType(DTYPES[str(tensor.dtype).removeprefix("torch.")], tuple(tensor.shape))
