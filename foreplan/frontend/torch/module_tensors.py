"""The tensors that a module holds, or an exported program, by their names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from foreplan.frontend.torch.attributes import tensors_of

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ModuleTensors:
    """What forward reads beside its arguments. A tensor that has several names is the same object under each.

    Attributes:
        name: of the graph.
        parameters, buffers: by all of their names.
        lasting: those that a `state_dict` has, and whatever else is in it.
        attributes: where the bytes of tensors begin that are neither, and that attributes lead to; None: not known.
    """

    name: str
    parameters: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]
    lasting: Mapping[str, Any]
    attributes: frozenset[int] | None = None

    @property
    def count(self) -> int:
        """Numbers in all of the parameters and buffers."""
        distinct = {id(each): each for each in (*self.parameters.values(), *self.buffers.values())}
        return sum(each.numel() for each in distinct.values())

    @property
    def on_meta(self) -> bool:
        """Whether a tensor has no content."""
        return any(each.is_meta for each in (*self.parameters.values(), *self.buffers.values()))


def of_module(module: torch.nn.Module) -> ModuleTensors:
    """The tensors of a module."""
    return ModuleTensors(
        type(module).__name__,
        dict(module.named_parameters(remove_duplicate=False)),
        dict(module.named_buffers(remove_duplicate=False)),
        module.state_dict(keep_vars=True),
        frozenset(tensor.data_ptr() for tensor in tensors_of(module)),
    )


def of_program(program: torch.export.ExportedProgram) -> ModuleTensors:
    """The tensors of a program.

    What a module ties comes from a file as several objects of the same bytes, which are one tensor here.
    """
    signature, found = program.graph_signature, dict[Any, Any]()

    def one(name: str) -> Any:
        tensor = program.state_dict[name] if name in program.state_dict else program.constants[name]
        if not tensor.numel() or tensor.device.type == "meta":
            return tensor
        where = tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()
        return found.setdefault((*where, tensor.requires_grad), tensor)

    parameters = {name: one(name) for name in signature.parameters}
    buffers = {name: one(name) for name in signature.buffers}
    lasting = {name: one(name) for name in program.state_dict if hasattr(program.state_dict[name], "data_ptr")}
    return ModuleTensors(_class_of(program), parameters, buffers, lasting)


def _class_of(program: torch.export.ExportedProgram) -> str:
    """The class of the module that was exported, as its nodes say it: `net.Net` is called `Net`."""
    for node in program.graph.nodes:
        for path, kind in (node.meta.get("nn_module_stack") or {}).values():
            if not path:
                return str(kind if isinstance(kind, str) else kind.__name__).rpartition(".")[2]
    return "program"
