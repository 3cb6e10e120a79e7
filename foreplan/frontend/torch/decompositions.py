"""What PyTorch itself makes of an op that has no entry in the table: a graph of other ops."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# Whose definition gives another result than the op itself, as of torch 2.13: targets behind a -1 count as classes.
_OTHERS = ("aten::multilabel_margin_loss_forward",)


def decomposed(target: Any, leaves: list[Any], spec: Any) -> torch.fx.GraphModule | None:
    """An op as ops that it consists of, by PyTorch's own definitions; None where it has none.

    Args:
        target: the overload.
        leaves: its arguments, flat: tensors without content, numbers and the like. Tensors are inputs of the graph.
        spec: how they are nested, as (args, kwargs).
    """
    import torch
    from torch._decomp import decomposition_table
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.utils import _pytree as pytree

    composite = target.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
    if not composite and (target not in decomposition_table or target._schema.name in _OTHERS):
        return None

    def call(*tensors: Any) -> Any:
        given = iter(tensors)
        args, kwargs = pytree.tree_unflatten([next(given) if isinstance(x, torch.Tensor) else x for x in leaves], spec)
        return target.decompose(*args, **kwargs) if composite else decomposition_table[target](*args, **kwargs)

    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
    for before_autograd in (True, False):  # the first keeps layers whole, the second opens whatever can be
        try:
            body = make_fx(call, pre_dispatch=before_autograd)(*tensors)
        except Exception:  # another project's code may raise anything; the op is then refused for its own reason
            return None
        calls = {node.target for node in body.graph.nodes if node.op == "call_function"} - {operator.getitem}
        if target not in calls:
            return body
    return None
