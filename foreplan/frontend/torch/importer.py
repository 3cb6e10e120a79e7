"""A PyTorch module → Graph, by the graph that `torch.export` gives of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from foreplan.arguments import names_in, shown
from foreplan.errors import UsageError
from foreplan.frontend.torch.exporting import programs, torch_here
from foreplan.frontend.torch.reader import Reader
from foreplan.graph import Graph
from foreplan.patterns import Selection

if TYPE_CHECKING:
    import torch


def imported(
    module: torch.nn.Module,
    example: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    train: Iterable[str],
    freeze: Iterable[str],
) -> Graph:
    """The inference graph of a module: see `foreplan.from_torch`."""
    torch = torch_here()
    if not isinstance(module, torch.nn.Module):
        raise UsageError(f"from_torch takes a torch.nn.Module, and was given {shown(module)}")
    selection = Selection(tuple(names_in("train", train)), tuple(names_in("freeze", freeze)))
    return Reader(module, selection).graph(programs(module, example, kwargs))
