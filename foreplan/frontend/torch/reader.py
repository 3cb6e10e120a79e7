"""A module's programs → one Graph: its stored tensors under their own names, its forms, its buffers' updates."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from foreplan.base.errors import UnsupportedError
from foreplan.base.patterns import Selection
from foreplan.frontend.torch.call import dtype_of
from foreplan.frontend.torch.checkpoints import segments_of
from foreplan.frontend.torch.known_tensors import array_of
from foreplan.frontend.torch.lines import Lines
from foreplan.frontend.torch.module_tensors import ModuleTensors
from foreplan.frontend.torch.run import Run
from foreplan.frontend.torch.writes import writes
from foreplan.frontend.tracing.tensor import Tensor, as_tensor
from foreplan.graph import Array, Graph, Kind, Missing, RandomSeed, TensorType, Value, as_dtype
from foreplan.graph.origin import ModuleOrigin
from foreplan.ops.map import elementwise

if TYPE_CHECKING:
    import torch


class Reader:
    """A module, and the graph that it becomes.

    Args:
        held: its parameters and buffers, which are stored.
        selection: the weights that the user wants trained, or frozen, whatever the module says.

    Raises:
        UsageError: a pattern of the selection means nothing, or nothing that can be trained.
    """

    def __init__(self, held: ModuleTensors, selection: Selection) -> None:
        self.tracer = Lines(held.name)
        self._named: dict[int, tuple[str, torch.Tensor]] = {}
        parameters, buffers, lasting = held.parameters, held.buffers, held.lasting
        self._parameters = {id(tensor) for tensor in parameters.values()}
        for name, tensor in (*parameters.items(), *buffers.items()):
            if id(tensor) in self._parameters or name in lasting:
                self._named.setdefault(id(tensor), (name, tensor))
        self.names = {**parameters, **buffers}
        self._lasting = {name: each for name, each in lasting.items() if hasattr(each, "is_floating_point")}
        self._folded: set[int] = set()
        self._attributes = held.attributes
        self._outside: dict[int, torch.Tensor] = {}  # what forward writes that is neither parameter nor buffer
        self._segments: tuple[str, ...] = ()
        own = dict(self._named.values())
        self._check_memory(own)
        weights = [name for name, tensor in own.items() if id(tensor) in self._parameters]
        trainable = {name: name in weights and tensor.is_floating_point() for name, tensor in own.items()}
        self._chosen = selection.chosen(trainable, weights) if selection else {}
        self._stored: dict[int, Tensor] = {}
        self._random_state: Value | None = None
        self._streams = 0

    # Stored tensors.

    def _check_memory(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Refuse weights that are trained and lie in the bytes of other tensors: a step would change both; and sparse
        tensors.

        Raises:
            UnsupportedError: there is one.
        """
        if sparse := [name for name, tensor in tensors.items() if str(tensor.layout) != "torch.strided"]:
            raise UnsupportedError(f"{sparse[0]!r} is sparse, and a graph holds dense tensors: keep its to_dense()")
        ends: list[tuple[int, int, str, bool]] = []
        for name, tensor in tensors.items():
            if tensor.numel() and tensor.device.type != "meta":
                span = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride())) + 1
                start = tensor.data_ptr()
                ends.append((start, start + span * tensor.element_size(), name, tensor.requires_grad))
        end, last, trained = 0, "", False
        for start, stop, name, learns in sorted(ends):
            if start < end and (learns or trained):
                raise UnsupportedError(
                    f"{name!r} has bytes of {last!r}, and a step of PyTorch changes both: tie them as one parameter "
                    f"(module.{name} = module.{last}), or give one a clone()"
                )
            if stop > end:
                end, last, trained = stop, name, learns

    def is_stored(self, tensor: Any) -> bool:
        """Whether a known tensor is kept under a name of its own: a parameter, or a buffer that lasts, of floats."""
        found = self._named.get(id(tensor))
        return found is not None and (id(tensor) in self._parameters or id(tensor) in self._stored)

    def fold(self, tensor: torch.Tensor) -> None:
        """A known tensor is computed with while importing: that it has another content later would change nothing."""
        self._folded.add(id(tensor))

    def stored_tensor(self, tensor: torch.Tensor) -> Tensor | None:
        """A parameter or lasting buffer of floats as a tensor of the graph; None for any other tensor."""
        if id(tensor) not in self._named or not (id(tensor) in self._parameters or tensor.is_floating_point()):
            return None
        return self.store(tensor)

    def store(self, tensor: torch.Tensor, written: bool = False) -> Tensor:
        """A parameter or buffer as a tensor of the graph, under the first of its names.

        Args:
            written: whether forward writes it, so that it is kept as a buffer is, unless it is trained.
        """
        if id(tensor) not in self._stored:
            name, kind, why = self._named[id(tensor)][0], Kind.BUFFER, ""
            if id(tensor) in self._parameters:
                trained, why = self._chosen.get(name, (tensor.requires_grad, ""))
                kind = Kind.PARAMETER if trained else Kind.BUFFER if written else Kind.FROZEN
            type = TensorType(dtype_of(tensor.dtype, name), tuple(tensor.shape))
            b = self.tracer.at()
            content = Missing() if tensor.is_meta else Array(array_of(tensor).copy())
            value = b.store(name, type, kind, content, why)
            self._stored[id(tensor)] = Tensor(self.tracer, value)
        return self._stored[id(tensor)]

    # Random numbers.

    def random_stream(self) -> tuple[Value, int]:
        """The state that all draws read, made for the first of them, and the number of this one."""
        if self._random_state is None:
            type = TensorType(as_dtype("uint64"), (2,))
            self._random_state = self.tracer.at().store("random_state", type, Kind.STATE, RandomSeed())
        self._streams += 1
        return self._random_state, self._streams - 1

    # Forms.

    def form(self, program: Any, training: bool) -> tuple[dict[str, Tensor], dict[Value, Tensor]]:
        """The outputs of a program by name, and what its buffers become."""
        from torch.export.graph_signature import InputKind, TensorArgument

        run = Run(self, training)
        holders = [node for node in program.graph.nodes if node.op == "placeholder"]
        written = writes(program.graph)
        kept: list[tuple[torch.fx.Node, Tensor]] = []
        for node, spec in zip(holders, program.graph_signature.input_specs, strict=True):
            if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
                tensor = self.names[spec.target]
                if id(tensor) not in self._named and (node in written or tensor.is_meta):  # it is kept all the same
                    self._named[id(tensor)] = (spec.target, tensor)
                if spec.kind is InputKind.PARAMETER or node in written or tensor.is_meta:
                    content: Any = self.store(tensor, node in written)
                    if node in written:
                        kept.append((node, content))
                else:
                    content = tensor
            elif spec.kind is InputKind.CONSTANT_TENSOR:
                content = self._constant(program.constants[spec.target].detach(), spec.target, node in written)
                if node in written:
                    kept.append((node, content))
            elif spec.kind is InputKind.USER_INPUT:
                content = self._input(node) if isinstance(spec.arg, TensorArgument) else spec.arg.value
            else:
                raise UnsupportedError(
                    f"forward reads {spec.target or spec.arg.name!r}, an object that is no tensor, such as a "
                    "torch.Generator; leave it out"
                )
            run.places[node] = content
        outputs = run.graph(program.graph, program.graph_module)
        if training:
            self._segments = segments_of([*run.checkpointed.values()], self.tracer.at().nodes)
        updates = {old.value: as_tensor(run.places[node]) for node, old in kept if run.places[node] is not old}
        return dict(self._outputs(program, outputs)), updates

    def _constant(self, tensor: torch.Tensor, name: str, written: bool) -> Any:
        """A tensor that is neither parameter nor buffer. One that forward writes is kept from step to step: what is
        made in forward is a copy, and not this.
        """
        from torch._subclasses import FakeTensor

        if isinstance(tensor, FakeTensor):
            raise UnsupportedError(f"PyTorch's export kept {name} without its content")
        if tensor.is_meta:
            raise UnsupportedError(
                f"{name!r} is a tensor on the device meta that is neither parameter nor buffer; make it on the CPU, or "
                "keep it as a buffer: self.register_buffer(name, tensor)"
            )
        if not written and tensor.data_ptr() not in self._outside:
            return tensor
        if tensor.data_ptr() not in self._outside:
            if self._attributes is not None and tensor.data_ptr() not in self._attributes:
                raise UnsupportedError(
                    f"forward writes a tensor of {list(tensor.shape)} that is no part of the module; keep it as a "
                    "buffer: self.register_buffer(name, tensor)"
                )
            self._outside[tensor.data_ptr()] = tensor
            self._named[id(tensor)] = (name, tensor)
        return self.store(self._outside[tensor.data_ptr()], written=True)

    def _input(self, node: torch.fx.Node) -> Tensor:
        known = {value.name: value for value in self.tracer.at().inputs}
        if node.name not in known:
            like = node.meta["val"]
            known[node.name] = self.tracer.at().input(
                node.name, TensorType(dtype_of(like.dtype, node.name), tuple(like.shape))
            )
        return Tensor(self.tracer, known[node.name])

    def _outputs(self, program: Any, results: list[Any]) -> Iterator[tuple[str, Tensor]]:
        """Tensors that a program gives, by the fields, keys and places that lead to them."""
        import torch
        from torch.utils import _pytree as pytree

        spec = program.call_spec.out_spec
        for name, leaf in named_leaves(pytree.tree_unflatten(list(range(spec.num_leaves)), spec)):
            if isinstance(result := results[leaf], Tensor | torch.Tensor | np.ndarray):
                yield name, result if isinstance(result, Tensor) else self.of_known(result)

    def of_known(self, tensor: Any) -> Tensor:
        """A known tensor as one of the graph."""
        stored = self.stored_tensor(tensor) if not isinstance(tensor, np.ndarray) else None
        if stored is not None:
            return stored
        array = tensor if isinstance(tensor, np.ndarray) else array_of(tensor)
        return as_tensor(array, as_dtype(array.dtype))

    def graph(self, programs: Mapping[bool, Any]) -> Graph:
        """The graph of a module, from its programs by whether they are of training mode; one may stand for both."""
        with self.tracer.active() as b:
            b.scope = ""
            forms = {training: self.form(program, training) for training, program in programs.items()}
            self.tracer.place("", "")
            outputs, updates = forms[True] if True in forms else forms[False]
            if True in forms and False in forms:
                others = forms[False][0]
                outputs = {name: self.tracer.by_mode(others.get(name, y), y) for name, y in outputs.items()}
            if True in forms:
                for old, new in updates.items():
                    self.tracer.place(old.name.rpartition(".")[0], "")
                    updates[old] = self.tracer.by_mode(Tensor(self.tracer, old), new)
                self.tracer.place("", "")
            following = {old: new.value for old, new in updates.items()}
            if self._random_state is not None:
                one = self.tracer.constant(np.array([0, 1], np.uint64))
                following[self._random_state] = elementwise(
                    b, lambda s, d: s + d, self._random_state, one, name="next_random_state"
                )
            origin = self._origin()
            graph = b.finish({name: y.value for name, y in outputs.items()}, following)
        return dataclasses.replace(graph, origin=origin)

    def _origin(self) -> ModuleOrigin:
        """What checkpoints of the module hold beside what is stored. What no op reads is stored too."""
        aliases, constants = dict[str, str](), dict[str, np.ndarray]()
        for name, tensor in self._lasting.items():
            is_float = id(tensor) in self._parameters or tensor.is_floating_point()
            if id(tensor) in self._folded or not (is_float or id(tensor) in self._stored):
                constants[name] = array_of(tensor).copy()
                if id(tensor) not in self._stored:
                    continue
            own = self.store(tensor).value.name
            if name != own:
                aliases[name] = own
        unlisted = {stored.value.name for stored in self._stored.values()} - self._lasting.keys()
        return ModuleOrigin(aliases, constants, self._segments, frozenset(unlisted - set(aliases.values())))


def named_leaves(tree: Any) -> Iterator[tuple[str, Any]]:
    """What a module gives, by the fields, keys and places that lead to it: `logits`, `output.0`, `aux.1`."""
    from torch.utils import _pytree as pytree

    taken: set[str] = set()
    for path, leaf in pytree.tree_flatten_with_path(tree)[0]:
        name = ".".join(re.sub(r"[\[\]'.\"]", "", str(key)) for key in path) or "output"
        name = f"output.{name}" if name.isdigit() else name
        free = next(each for i in itertools.count() if (each := name if not i else f"{name}_{i}") not in taken)
        taken.add(free)
        yield free, leaf
