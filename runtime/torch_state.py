"""What a session has trained, written into a PyTorch module. `torch` is imported when this is used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from foreplan.base.arguments import shown
from foreplan.base.errors import SessionError, UsageError

if TYPE_CHECKING:
    import torch


def write_state(
    state: Mapping[str, np.ndarray], module: torch.nn.Module, unlisted: Mapping[str, np.ndarray] | None = None
) -> None:
    """Copy weights and statistics by name into a module's parameters and buffers, whatever device they are on.

    Args:
        unlisted: what is not in the module's `state_dict`; it is written where a buffer or attribute has its name.

    Raises:
        UsageError: `torch` is not installed, or this is no module.
        SessionError: the module has no tensor of a name, or one of another shape; it is as it was.
    """
    try:
        import torch
    except ImportError:
        raise UsageError("to_torch needs PyTorch: pip install torch") from None
    if not isinstance(module, torch.nn.Module):
        raise UsageError(f"to_torch takes a torch.nn.Module, and was given {shown(module)}")
    held: dict[str, Any] = module.state_dict(keep_vars=True)
    others = {name: _tensor_at(module, name) for name in unlisted or {}}
    held |= {name: tensor for name, tensor in others.items() if isinstance(tensor, torch.Tensor)}
    state = {**state, **{name: array for name, array in (unlisted or {}).items() if name in held}}
    for name, array in state.items():
        if name not in held:
            raise SessionError(f"{type(module).__name__} has no tensor {name!r}, which the session has trained or kept")
        if tuple(held[name].shape) != array.shape:
            raise SessionError(
                f"{type(module).__name__}: its {name!r} has the shape {list(held[name].shape)}, and the session's "
                f"{list(array.shape)}"
            )
    with torch.no_grad():
        for name, array in state.items():
            wide = array.astype(np.float32) if array.dtype.name == "bfloat16" else array
            held[name].copy_(torch.from_numpy(np.ascontiguousarray(wide).reshape(array.shape)))


def _tensor_at(module: Any, path: str) -> Any:
    """What a dotted path of attributes leads to; None: nothing."""
    for part in path.split("."):
        module = getattr(module, part, None)
    return module
