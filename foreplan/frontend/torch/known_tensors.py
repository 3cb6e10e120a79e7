"""Tensors whose content is known while a program is read: tables, masks, constants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from foreplan.base.errors import UnsupportedError
from foreplan.graph import as_dtype

MOST_KNOWN = 1 << 26  # elements of what is computed while importing: a mask of 8,192 positions squared


def array_of(tensor: Any) -> np.ndarray:
    """The content of a PyTorch tensor.

    Raises:
        UnsupportedError: it is sparse.
    """
    import torch

    if tensor.layout is not torch.strided:
        raise UnsupportedError(f"a tensor of the layout {tensor.layout}; make it dense before: x.to_dense()")
    own = tensor.detach().cpu().resolve_conj().contiguous()
    if own.dtype == torch.bfloat16:
        return np.asarray(own.view(torch.uint16).numpy().view(as_dtype("bfloat16").numpy))
    return np.asarray(own.numpy())


class Sizes:
    """Extents that PyTorch does not know when it exports, of masks and counts that are known here."""

    def __init__(self) -> None:
        self._extents: dict[Any, int] = {}

    def learn(self, shape: Sequence[int], like: Any) -> None:
        """The shape of a result, which PyTorch says with symbols."""
        for found, said in zip(shape, getattr(like, "shape", ())):
            if not isinstance(said, int) and said.node.expr.is_Symbol:
                self._extents[said.node.expr] = found

    def of(self, like: Any) -> Any:
        """What PyTorch says of a result, with the sizes that are known by now."""
        import torch
        from torch.utils import _pytree as pytree

        def sized(x: Any) -> Any:
            if all(isinstance(n, int) for n in x.shape):
                return x
            shape = [n if isinstance(n, int) else n.node.expr.subs(self._extents) for n in x.shape]
            is_known = all(isinstance(n, int) or n.is_Integer for n in shape)
            return torch.empty([int(n) for n in shape], dtype=x.dtype, device="meta") if is_known else x

        return pytree.tree_map_only(torch.Tensor, sized, like)
