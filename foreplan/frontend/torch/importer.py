"""A PyTorch module → Graph, by the graph that `torch.export` gives of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from foreplan.arguments import names_in, shown
from foreplan.errors import UsageError
from foreplan.graph import Graph
from foreplan.patterns import Selection

if TYPE_CHECKING:
    import torch


def from_torch(
    module: torch.nn.Module,
    *example: Any,
    kwargs: Mapping[str, Any] | None = None,
    train: Iterable[str] = (),
    freeze: Iterable[str] = (),
) -> Graph:
    """The inference graph of a PyTorch module, with the shapes of an example.

    The module itself says what is a parameter, a buffer, tied or frozen (`requires_grad=False`); names are those of its
    `state_dict`, and nodes are named by their modules: `layers.0.attn/matmul`. Dropout, batch normalisation and code
    that asks `self.training` take their training form in training steps. Where the module is in training mode, a part
    of it that is in evaluation mode stays so. A module that is in evaluation mode as a whole counts as if it were in
    training mode.

    Args:
        module: a `torch.nn.Module`, whose weights are copied; it stays as it is.
        example: what the module is called with: tensors of the shapes and types of a step.
        kwargs: likewise, by name.
        train, freeze: weights that are trained, or are not, whatever the module says: see `foreplan.compile`.

    Raises:
        UsageError: `torch` is not installed, or the first argument is no module.
        ModelError: PyTorch cannot export the module; has the reason that PyTorch gives.
        UnsupportedError: it has an op that foreplan lacks; names it, its module and its line.
    """
    from foreplan.frontend.torch.exporting import programs, torch_here
    from foreplan.frontend.torch.reader import Reader

    torch = torch_here()
    if not isinstance(module, torch.nn.Module):
        raise UsageError(f"from_torch takes a torch.nn.Module, and was given {shown(module)}")
    selection = Selection(tuple(names_in("train", train)), tuple(names_in("freeze", freeze)))
    return Reader(module, selection).graph(programs(module, example, dict(kwargs or {})))
