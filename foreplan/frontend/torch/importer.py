"""A PyTorch module, or what `torch.export` made of one, → Graph."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foreplan.base.arguments import names_in, path_of, shown
from foreplan.base.errors import ForeplanError, ModelError, UsageError
from foreplan.base.patterns import Selection
from foreplan.frontend.torch.archive import read_program
from foreplan.frontend.torch.exporting import cause, programs, torch_here
from foreplan.frontend.torch.module_tensors import of_module, of_program
from foreplan.frontend.torch.program import check_program, notes_on
from foreplan.frontend.torch.reader import Reader
from foreplan.graph import Graph

if TYPE_CHECKING:
    import torch


def opened(given: Any, example: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """A module as it is; the program of a file, or as it is, which takes no example.

    Raises:
        UsageError: it is neither, or a program with an example.
        ModelError: see `read_program`.
    """
    torch = torch_here()
    if isinstance(given, torch.jit.ScriptModule):
        raise UsageError(
            "a TorchScript module has lost its Python code, which is what is exported; give the module itself"
        )
    if isinstance(given, torch.nn.Module):
        return given
    is_file = isinstance(given, str | os.PathLike)
    if not is_file and not isinstance(given, torch.export.ExportedProgram):
        raise UsageError(
            "from_torch takes a torch.nn.Module, a torch.export.ExportedProgram or the path of a .pt2 file, and was "
            f"given {shown(given)}"
        )
    if example or kwargs:
        raise UsageError("an exported program has the shapes of its own example: leave the example out")
    return read_program(Path(path_of("from_torch", given))) if is_file else given


def imported(
    given: torch.nn.Module | torch.export.ExportedProgram,
    example: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    train: Iterable[str],
    freeze: Iterable[str],
) -> Graph:
    """The inference graph of a module or program: see `foreplan.from_torch`."""
    torch = torch_here()
    selection = Selection(tuple(names_in("train", train)), tuple(names_in("freeze", freeze)))
    if isinstance(given, torch.nn.Module):
        forms, notes = programs(given, example, kwargs)
        graph = Reader(of_module(given), selection).graph(forms)
        return dataclasses.replace(graph, notes=(*graph.notes, *notes))
    try:
        check_program(given)
        graph = Reader(of_program(given), selection).graph({True: given})
        return dataclasses.replace(graph, notes=(*graph.notes, *notes_on(given)))
    except (ForeplanError, MemoryError):
        raise
    except Exception as error:  # the parts of a program may contradict each other, which PyTorch does not look for
        raise ModelError(
            f"this program contradicts itself ({cause(error)}): it is damaged, or was edited; export the module again"
        ) from error
