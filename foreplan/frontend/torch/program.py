"""What an exported program cannot be read for, and what people should know of one that can."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from foreplan.base.errors import ModelError, UnsupportedError

if TYPE_CHECKING:
    import torch

_BY_MODE = {"training": "batch_norm instance_norm lstm gru rnn_tanh rnn_relu", "train": "dropout alpha_dropout"}
_OF_MODE = {f"aten::{op}": flag for flag, ops in _BY_MODE.items() for op in ops.split()}


def check_program(program: torch.export.ExportedProgram) -> None:
    """Refuse a program that does not say what a step needs.

    Raises:
        ModelError: its ops are decomposed, or it has its backward pass in it.
        UnsupportedError: it has axes without a fixed extent.
    """
    import torch
    from torch.export.graph_signature import OutputKind

    if program.dialect != "TRAINING":
        raise ModelError(
            f"this program is in PyTorch's dialect {program.dialect!r}, which says neither where gradients stop nor "
            "what dropout does in training: give the one that torch.export.export returned, before run_decompositions"
        )
    if any(spec.kind is not OutputKind.USER_OUTPUT for spec in program.graph_signature.output_specs):
        raise ModelError("this program has more outputs than its module: give the one of torch.export.export")
    for node in program.graph.nodes:
        content = node.meta.get("val")
        if isinstance(content, torch.Tensor) and not all(isinstance(extent, int) for extent in content.shape):
            raise UnsupportedError(
                f"{node.name!r} of this program is {list(content.shape)}, and a plan is for one shape: export the "
                "module without dynamic_shapes, on an example of the shapes of a step"
            )


def notes_on(program: torch.export.ExportedProgram) -> Iterator[str]:
    """What a program means for training that its module would not."""
    modes = [bool(flag) for node in _nodes(program) if (flag := _mode(node)) is not None]
    if modes and not any(modes):
        yield (
            "exported in evaluation mode: batch normalisation uses its running statistics in training too, and dropout "
            "drops nothing; export it after module.train() for a step that trains as the module does"
        )
    lines = sorted({line for node in _nodes(program) if (line := _applied(node))})
    if lines:
        yield (
            f"{lines[0]} calls apply(): if that is a torch.autograd.Function, the program lacks its backward, and "
            "gradients are those of its forward; give the module itself"
        )


def _nodes(program: torch.export.ExportedProgram) -> Iterator[torch.fx.Node]:
    for module in program.graph_module.modules():
        if hasattr(module, "graph"):
            yield from (node for node in module.graph.nodes if node.op == "call_function")


def _mode(node: torch.fx.Node) -> Any:
    """Whether an op is told that it is in training; None: it is not one that asks."""
    schema = getattr(node.target, "_schema", None)
    flag = _OF_MODE.get(schema.name.rstrip("_")) if schema is not None else None
    if schema is None or flag is None:
        return None
    at = next((i for i, each in enumerate(schema.arguments) if each.name == flag), None)
    if at is None:
        return None
    return node.args[at] if at < len(node.args) else node.kwargs.get(flag, False)


def _applied(node: torch.fx.Node) -> str:
    """`file.py:12`, where a node's line calls `apply` of a class."""
    trace = node.meta.get("stack_trace") or ""
    found = re.findall(r'File "([^"]+)", line (\d+), in .*\n.*\b[A-Z]\w*\.apply\(', trace)
    return f"{found[-1][0].rpartition('/')[2]}:{found[-1][1]}" if found else ""
