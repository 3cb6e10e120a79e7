"""PyTorch modules → Graph, through PyTorch's own exporter. Importing this file does not import `torch`."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

from foreplan.arguments import names_in, shown
from foreplan.errors import ModelError, UsageError
from foreplan.frontend.onnx import from_onnx
from foreplan.frontend.torch.exporting import cause, in_mode
from foreplan.frontend.torch.onnx_repairs import draws, with_dropouts, without_false_biases
from foreplan.graph import Graph, Kind
from foreplan.ops.norm.batch import BatchNorm, with_frozen_statistics
from foreplan.patterns import Selection
from foreplan.units import listed

if TYPE_CHECKING:
    import onnx
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
    `state_dict`. Dropout and batch normalisation take their training form in training steps. Where the module is in
    training mode, a part of it that is in evaluation mode stays so: its dropout is left out, its batch normalisation
    uses the running statistics. A module that is in evaluation mode as a whole counts as if it were in training mode.

    Args:
        module: a `torch.nn.Module`, whose weights are copied; it stays as it is.
        example: what the module is called with: tensors of the shapes and types of a step.
        kwargs: likewise, by name.
        train, freeze: weights that are trained, or are not, whatever the module says: see `foreplan.compile`.

    Raises:
        UsageError: `torch` or `onnxscript` is not installed, or the first argument is no module.
        ModelError: PyTorch cannot export the module; has the reason that PyTorch gives.
        ForeplanError: the exported model cannot be imported: see `from_onnx`.
    """
    torch = _torch()
    if not isinstance(module, torch.nn.Module):
        raise UsageError(f"from_torch takes a torch.nn.Module, and was given {shown(module)}")
    selection = Selection(tuple(names_in("train", train)), tuple(names_in("freeze", freeze)))
    proto = _exported(torch, module, example, dict(kwargs or {}))
    held = {tensor.name for tensor in proto.graph.initializer}
    fixed = [name for name, weight in module.named_parameters(remove_duplicate=False) if not weight.requires_grad]
    more = [name for name in fixed if name in held and selection.of(name) is None]
    graph = from_onnx(proto, train=selection.train, freeze=[*selection.freeze, *more])
    kept = {name for name, part in module.named_modules() if module.training and not part.training}
    graph = with_frozen_statistics(graph, lambda node: node.inputs[3].name.rpartition(".")[0] in kept)
    return dataclasses.replace(graph, name=type(module).__name__, notes=(*graph.notes, *_notes(graph)))


def _notes(graph: Graph) -> Iterator[str]:
    """What foreplan does in another way than PyTorch, for people."""
    norms = [node for node in graph.nodes if isinstance(node.op, BatchNorm) and not node.op.frozen]
    fixed = [node.inputs[1].name for node in norms if all(value.kind is Kind.FROZEN for value in node.inputs[1:3])]
    if fixed:
        yield (
            f"batch normalisation with frozen scale and bias uses its running statistics ({listed(fixed, 1)}); in "
            "PyTorch's training mode it uses the batch's until eval() is called on it"
        )


def _torch() -> Any:
    try:
        import onnxscript  # noqa: F401  the exporter needs it
        import torch
    except ImportError as error:
        raise UsageError(
            f"from_torch needs PyTorch and its exporter, and there is no {error.name!r}: pip install torch onnxscript"
        ) from None
    return torch


def _exported(torch: Any, module: Any, example: tuple[Any, ...], kwargs: dict[str, Any]) -> onnx.ModelProto:
    """The module in ONNX, nothing of it folded, its dropout as that of a model for inference."""
    proto = _as_onnx(torch, module, example, kwargs, training=True)
    without_false_biases(proto)
    if draws(proto) and not draws(_as_onnx(torch, module, example, kwargs, training=False)):
        with_dropouts(proto)  # what it draws in training alone
    for node in proto.graph.node:
        if node.op_type == "Dropout" and len(node.input) > 2:
            del node.input[2:]
    return proto


def _as_onnx(
    torch: Any, module: Any, example: tuple[Any, ...], kwargs: dict[str, Any], training: bool
) -> onnx.ModelProto:
    try:
        with in_mode(module, training), warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            program = torch.onnx.export(module, example, kwargs=kwargs, dynamo=True, optimize=False, verbose=False)
            _name_apart(program.model.graph)
            return cast("onnx.ModelProto", program.model_proto)
    except Exception as error:  # another project's code may raise anything
        raise ModelError(f"PyTorch cannot export {type(module).__name__}: {cause(error)}") from error


def _name_apart(graph: Any) -> None:
    """Rename results of nodes that have the name of a parameter or buffer: in a file they would be one tensor."""
    taken = {*graph.initializers, *(value.name for node in graph for value in node.outputs)}
    for node in graph:
        for value in node.outputs:
            if value.name in graph.initializers:
                value.name = next(name for i in itertools.count(1) if (name := f"{value.name}_{i}") not in taken)
                taken.add(value.name)
