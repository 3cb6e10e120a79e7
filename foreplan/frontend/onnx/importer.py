"""The walk over an ONNX graph: each node folded, translated or expanded, under the names that it has in the file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from foreplan.base.errors import ForeplanError, ModelError, ShapeError, UnsupportedError
from foreplan.base.patterns import AS_THE_MODEL, Selection
from foreplan.base.untrusted import Allowance
from foreplan.frontend.onnx.batch import Rebatch
from foreplan.frontend.onnx.branches import Guards, kept_where
from foreplan.frontend.onnx.builder import OnnxBuilder, sources_of
from foreplan.frontend.onnx.control import CONTROL_FLOW, body_of
from foreplan.frontend.onnx.fold import fold
from foreplan.frontend.onnx.functions import attributes_of_call, standard_body, unknown_op, with_attributes
from foreplan.frontend.onnx.load import Model, domain_of, opsets_of
from foreplan.frontend.onnx.module.exporter import Exporter
from foreplan.frontend.onnx.module.notes import notes_on
from foreplan.frontend.onnx.module.restore import restore_module
from foreplan.frontend.onnx.nested_tensors import NestedTensors
from foreplan.frontend.onnx.node import OnnxNode, Operand
from foreplan.frontend.onnx.ops import TRANSLATIONS
from foreplan.frontend.onnx.order import in_order, named_reads
from foreplan.frontend.onnx.outputs import compared
from foreplan.frontend.onnx.roles import NO_ROLE, Role, RolesOfBodies, chosen_roles, find_roles
from foreplan.frontend.onnx.scope import Scope
from foreplan.frontend.onnx.sequences import Given, Tensors, translate_sequence
from foreplan.frontend.onnx.tensors import Constant, from_array, from_tensor, given_array
from foreplan.graph import Builder, Graph, Node, RandomSeed, TensorType, Value, as_dtype
from foreplan.graph.names import Names
from foreplan.graph.types import Shape
from foreplan.graph.value import Kind
from foreplan.ops.map import elementwise
from foreplan.ops.marks import StopGradient
from foreplan.ops.storage import unpacked

if TYPE_CHECKING:
    import onnx

Translated = TypeVar("Translated")
_DEEPEST = 64  # functions and branches within each other
# Limits for a file: the nodes of its bodies when they are written out, and the nodes of the graph made from it. A file
# with many nodes may come to `_MOST_TIMES` times as many.
_MOST_WRITTEN, _MOST_MADE, _MOST_TIMES = 1 << 15, 1 << 16, 64


class Importer:
    """Builds one Graph from one model; inputs have been bound to shapes.

    Attributes:
        batch: the change of batch size in progress, if any.
        selection: the weights that the user wants trained, or frozen.
        path: the model's file, if it is one.
        shapes: the shape of every tensor by its full name, for a later import with another batch.
        told: the file's graph, with the tensors that the module has.
        floats: name of a quantised tensor → what it was before.
        guards: what branches read that are computed whether they are taken or not.
        nested: tensors in branches and loops.
        roles: of tensors in bodies.
        written: the number of nodes written out from bodies of loops, branches and functions.
        most_written: the most such nodes that a file of this size may have.
        allowance: what a file of this size may take for values that are computed at import.
    """

    def __init__(self, model: Model, batch: Rebatch | None = None, selection: Selection = AS_THE_MODEL) -> None:
        self.model = model
        self.batch = batch
        self.selection = selection
        self.exporter = Exporter.of(model.proto, model.path)
        self.path = model.path
        held = len(model.proto.graph.node) + sum(len(body.node) for body in model.proto.functions)
        self._whole = OnnxBuilder(
            model.proto.graph.name or model.label,
            lambda name: self._taken.claim(self._free(name)),
            max(_MOST_MADE, _MOST_TIMES * held),
        )
        self.b: Builder = self._whole
        self.shapes: dict[str, Shape] = {}
        self.told = model.proto.graph
        self.written, self.most_written = 0, max(_MOST_WRITTEN, _MOST_TIMES * held)
        self.allowance = Allowance("ONNX", model.proto.ByteSize())
        self.updates: dict[Value, Value] = {}
        self.floats: dict[str, Value] = {}
        self.guards = Guards()
        self.nested = NestedTensors()
        self.functions = {(f.domain, f.name): f for f in model.proto.functions}
        self.roles = RolesOfBodies(self.functions)
        self._reserved = {name for node in model.proto.graph.node for name in node.output}
        self._reserved.update(tensor.name for tensor in model.proto.graph.initializer)
        self._random_state: Value | None = None
        self._streams = 0
        self._taken, self._taken_nodes = Names(), Names()
        self._named: set[Node] = set()  # nodes that have their final names, of bodies that stand within a node

    def run(self, inputs: Mapping[str, TensorType], values: Mapping[str, np.ndarray] | None = None) -> Graph:
        """The whole model.

        Args:
            inputs: the user's inputs in order, with their shapes.
            values: of the inputs that are the same in every step.

        Raises:
            ModelError: the model is broken, or holds what foreplan cannot compile; names the node.
        """
        graph, self.exporter, notes = restore_module(self.model.proto.graph, self.exporter, self.model.label)
        self.told = graph
        roles = find_roles(graph.node, graph.initializer, self.functions, self.exporter)
        scope = Scope("", chosen_roles(roles, self.selection), self.model.opsets, path=())
        for name, type in inputs.items():
            scope.tensors[name] = value = Value(self._taken.claim(name), type, Kind.INPUT)
            self.b.inputs.append(value)
            self.shapes[name] = type.shape
        for name, array in (values or {}).items():
            scope.tensors[name] = given_array(name, array)
            self.shapes[name] = array.shape
        scope.initializers = self._initializers(graph)
        self.nodes(graph.node, scope)
        self.b.notes += [*notes, *notes_on(graph, scope.roles, self.exporter), *self.guards.notes(self.b)]
        self._advance_random_state()
        if self.batch is not None:
            self.b.notes += self.batch.notes
        outputs = {output.name: self.store(self.look_up(output.name, scope, "the graph")) for output in graph.output}
        for info in graph.output:
            found = outputs[info.name].type
            shape = found.shape if self.batch is None else self.batch.shapes.get(info.name, found.shape)
            self.b.notes += compared(info, found.dtype, shape, self.model.label)
        return self._whole.finish(outputs, updates=self.updates)

    def nodes(self, nodes: Sequence[onnx.NodeProto], scope: Scope) -> None:
        """Translate nodes in an order in which they can run."""
        for index, node in in_order(nodes, self.model.label, {*scope.tensors, *scope.initializers}):
            self._node(node, index, scope)

    def look_up(self, name: str, scope: Scope, reader: str) -> Operand:
        """The tensor of that name.

        Raises:
            ModelError: nothing makes it.
            UnsupportedError: it is a sequence.
        """
        found = self._find(name, scope, reader)
        if isinstance(found, Tensors):
            raise UnsupportedError(
                f"{self.model.label}: {reader} gives {name!r}, a sequence of tensors; foreplan gives tensors, so take "
                "them out with SequenceAt or ConcatFromSequence"
            )
        return found

    def _find(self, name: str, scope: Scope, reader: str) -> Operand | Tensors:
        at: Scope | None = scope
        while at is not None and name not in at.tensors:
            if name in at.initializers:
                tensor = self.nested.one(at.path, name, partial(self._initializer, name, at))
                at.tensors[name] = tensor
                self.shapes[at.full_name(name)] = tensor.shape
                break
            at = at.outer
        found = None if at is None else at.tensors[name]
        if at is None or found is None:
            raise ModelError(f"{self.model.label}: {reader} reads {name!r}, but no input, initializer or node gives it")
        if scope.taken is not None and at.taken is not scope.taken:
            return self.guards.read(self.b, found, scope.taken)
        return found

    def _initializer(self, name: str, scope: Scope) -> Constant:
        where, role = f"{self.model.label}: initializer {name!r}", scope.roles.get(name, NO_ROLE)
        tensor = from_tensor(scope.initializers[name], scope.full_name(name), self.model.path, where, role.kind)
        tensor.take(role.kind, role.why)
        return tensor

    def store(self, operand: Operand, taken: Value | None = None) -> Value:
        """An operand in the graph: a constant becomes a stored value when it is first read."""
        if isinstance(operand, Value):
            return operand
        value = self._stored(operand)
        return value if taken is None else self.guards.value(self.b, value, taken)

    def _stored(self, operand: Constant) -> Value:
        if operand.value is None:
            name = self._taken.claim(operand.name)
            operand.value = Value(name, operand.packed or operand.type, operand.kind, operand.init, operand.why)
            self.b.stored.append(operand.value)
        if operand.packed is not None:  # taken apart for each reader: what lives between steps is the bytes
            return unpacked(self.b, operand.value, operand.type.dtype, operand.shape)
        return operand.value

    def sources(self, value: Value) -> list[Value]:
        """The model's inputs that a value is computed from, in their order."""
        return sources_of(self.b, value)

    def random_stream(self) -> tuple[Value, int]:
        """The state of the model's random ops, made for the first of them, and the number of this one."""
        if self._random_state is None:
            type = TensorType(as_dtype("uint64"), (2,))
            self._random_state = self.b.store("random_state", type, Kind.STATE, RandomSeed())
        self._streams += 1
        return self._random_state, self._streams - 1

    def _advance_random_state(self) -> None:
        """The next step draws other numbers."""
        if self._random_state is not None:
            one = from_array("random_step", np.array([0, 1], np.uint64))
            new = elementwise(self.b, lambda s, d: s + d, self._random_state, self.store(one), name="next_random_state")
            self.updates[self._random_state] = new

    # One node.

    def _node(self, proto: onnx.NodeProto, index: int, scope: Scope) -> None:
        proto = with_attributes(proto, scope.attributes)
        own_name = proto.name or f"{proto.op_type}_{index}"
        source = f"{self.model.label}: node {scope.prefix + own_name!r} ({proto.op_type})"
        domain = domain_of(proto.domain)
        reader = f"node {own_name!r} ({proto.op_type})"
        names = [*proto.input, *named_reads(proto)]
        self.b.source, self.b.scope = source, scope.prefix + own_name + "/"
        given = [self._find(name, scope, reader) if name else None for name in names]
        inputs = [None if isinstance(each, Tensors) else each for each in given]
        n = OnnxNode(
            proto,
            inputs,
            scope.opsets.get(domain, 1),
            source,
            self,
            [self._known_name(name, scope) for name in names],
            [scope.full_name(name) for name in proto.output],
            scope.taken,
            index,
        )
        first = len(self.b.nodes)
        sequence = self._guarded(n, lambda: translate_sequence(n, given)) if domain == "" else None
        results: Sequence[Given] | None = [sequence]
        if sequence is None:
            results = self._results(n, given, scope, scope.prefix + own_name, domain)
        if results is None:
            return  # an expansion has named its own outputs
        self._finish(n, self._detached(n, results), first, scope, scope.prefix + own_name)

    def _detached(self, n: OnnxNode, results: Sequence[Given]) -> list[Given]:
        """The results, some of which the module computes without gradients."""
        detached = [self.exporter.signature.is_detached(n.proto, name) for name in n.proto.output]
        return [
            self.b.apply(StopGradient(), found) if stops and isinstance(found, Value) else found
            for found, stops in zip(results, detached)
        ]

    def _known_name(self, name: str, scope: Scope) -> str:
        at: Scope | None = scope
        while at is not None and name not in at.tensors:
            at = at.outer
        return (at or scope).full_name(name)

    def _results(self, n: OnnxNode, given: Sequence[Given], scope: Scope, name: str, domain: str) -> list[Given] | None:
        """The node's results, one an output; None if another walk has already put them into the scope."""
        if (domain, n.op_type) in self.functions:
            self._expand(n, given, self.functions[domain, n.op_type], scope, name)
            return None
        role = scope.roles.get(n.proto.output[0], NO_ROLE) if n.proto.output else NO_ROLE
        if domain == "" and n.op_type == "Constant":
            return [self.nested.one(scope.path, n.index, partial(self._constant, n, role))]
        if domain == "" and n.op_type in CONTROL_FLOW:
            outputs = CONTROL_FLOW[n.op_type](n, given, name, partial(self._walk, n, scope))
            if n.both is not None:
                self.guards.chosen_by(n.source, n.both)
            return outputs
        if any(isinstance(each, Tensors) for each in given):
            body = standard_body(n, given) if n.op_type == "SequenceMap" else None
            if body is None:
                raise n.unsupported("it reads a sequence of tensors; take them out with SequenceAt")
            self._expand(n, given, body, scope, name)
            return None
        folded = self._guarded(n, lambda: fold(n, role.kind, self.allowance))
        if folded is not None:
            if n.op_type == "ConstantOfShape" and folded[0] is not None:
                return [self._filled(n, scope, folded[0], role)]
            return list(folded)
        translation = TRANSLATIONS.get((domain, n.op_type))
        result = None if translation is None else self._guarded(n, lambda: translation(n))
        if result is None:
            body = standard_body(n, given)
            if body is None:
                raise unknown_op(n, domain, self.model.opsets)
            self._expand(n, given, body, scope, name)
            return None
        self.updates.update(kept_where(self.b, n.taken, n.updates))
        return [result] if isinstance(result, Value | Constant) else list(result)

    def _guarded(self, n: OnnxNode, translate: Callable[[], Translated]) -> Translated:
        """Run a translation; its errors are faults of the model, and say so."""
        try:
            return translate()
        except ShapeError as error:
            reason = self.batch.explain(error) if self.batch is not None else str(error)
            raise ShapeError(reason if n.source in reason else f"{n.source}: {reason}") from None
        except ForeplanError as error:
            if n.source in str(error):
                raise
            where = n.where if isinstance(error, UnsupportedError) else n.source
            raise type(error)(f"{where}: {error}") from None
        except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError, AssertionError) as error:
            raise ModelError(f"{n.source}: its inputs or attributes do not fit the op: {error}") from error

    def _filled(self, n: OnnxNode, scope: Scope, made: Constant, role: Role) -> Constant:
        made.why = role.why
        found = self.nested.one(scope.path, n.index, lambda: made)
        return found if found.type == made.type else made  # the steps of a loop may give it other shapes

    def _constant(self, n: OnnxNode, role: Role) -> Constant:
        from foreplan.frontend.onnx.constant import constant

        found = self._guarded(n, lambda: constant(n, role.kind))
        found.take(role.kind, role.why)
        return found

    def _walk(
        self,
        n: OnnxNode,
        scope: Scope,
        name: str,
        prefix: str,
        given: Sequence[Operand | Tensors],
        taken: Value | None = None,
    ) -> list[Operand | Tensors]:
        """The outputs of a body within a node; the body can also read the tensors around the node."""
        body = body_of(n, name)
        self._write_out(n, len(body.node))
        if len(given) != len(body.input):
            raise n.fail(f"its body {body.name!r} takes {len(body.input)} inputs, but the node gives it {len(given)}")
        if taken is not None:
            given = [self.guards.read(self.b, each, taken) for each in given]
        roles = {**scope.roles, **self.roles.of(body, body.initializer, self.exporter)}
        path = None if scope.path is None else (*scope.path, (n.index, name))
        inner = Scope(prefix, roles, scope.opsets, scope, scope.depth + 1, taken or scope.taken, path)
        inner.attributes = scope.attributes
        inner.initializers = {tensor.name: tensor for tensor in body.initializer}
        inner.tensors.update({info.name: operand for info, operand in zip(body.input, given)})
        self.nodes(body.node, inner)
        self.b.source, self.b.scope = n.source, scope.prefix + (n.proto.name or n.op_type) + "/"
        return [self._find(output.name, inner, f"the body of {n.where}") for output in body.output]

    def _write_out(self, n: OnnxNode, nodes: int) -> None:
        """Count the nodes of a body that is about to take the place of `n`, or of one step of `n`.

        Raises:
            UnsupportedError: the model then has more nodes than any file should.
        """
        self.written += 1 + nodes
        if self.written > self.most_written:
            raise n.unsupported(
                "each step of a loop and each call of a function makes nodes of its own, and with this one they come "
                f"to more than {self.most_written}; export the model with fewer steps or calls"
            )

    def _expand(self, n: OnnxNode, given: Sequence[Given], body: onnx.FunctionProto, scope: Scope, name: str) -> None:
        """Walk a function's body in place of the node."""
        if scope.depth >= _DEEPEST:
            raise n.unsupported(
                f"functions call each other more than {_DEEPEST} levels deep; export the model with fewer"
            )
        self._write_out(n, len(body.node))
        opsets = {**self.model.opsets, **opsets_of(body.opset_import)}
        inner = Scope(name + "/", self.roles.of(body), opsets, None, scope.depth + 1, n.taken)
        inner.attributes = attributes_of_call(n, body)
        for i, formal in enumerate(body.input):
            inner.tensors[formal] = given[i] if i < len(given) else None
        for formal, actual in zip(body.output, n.output_names):
            inner.names[formal] = actual
        self.nodes([node for node in body.node if any(node.output)], inner)
        for formal, actual in zip(body.output, n.proto.output):
            if actual:
                scope.tensors[actual] = self._find(formal, inner, n.where)

    # Names.

    def _finish(
        self,
        n: OnnxNode,
        results: Iterable[Operand | Tensors | None],
        first: int,
        scope: Scope,
        node_name: str,
    ) -> None:
        """Give the new nodes and values their names in the file, and put the outputs into the scope."""
        found = list(results)
        wanted = {
            operand: name
            for operand, name, local in zip(found, n.output_names, n.proto.output)
            if isinstance(operand, Value) and local
        }
        renamed = self._rename(first, wanted, node_name)
        for local, full, operand in zip(n.proto.output, n.output_names, found):
            if not local:
                continue
            if operand is None:
                raise n.unsupported(
                    f"its output {local!r} is used, but foreplan does not compute it; export the model without it"
                )
            if isinstance(operand, Tensors):
                scope.tensors[local] = operand.replaced(renamed)
                continue
            result = renamed.get(operand, operand) if isinstance(operand, Value) else operand
            if self.batch is not None:
                self.batch.check(n, full, result.type.shape)
            scope.tensors[local] = result
            self.shapes[full] = result.type.shape

    def _rename(self, first: int, wanted: Mapping[Value, str], node_name: str) -> dict[Value, Value]:
        """Rebuild the nodes made since `first`: those that give outputs take the tensors' names, others the node's."""
        made = self.b.nodes[first:]
        del self.b.nodes[first:]
        renamed: dict[Value, Value] = {}
        main = next((node for node in reversed(made) if any(value in wanted for value in node.outputs)), None)
        for node in made:
            inner = node in self._named
            own = node.name
            if not inner:
                own = self._taken_nodes.claim(node_name if node is main else f"{node_name}/{node.op.name}")
            outputs = []
            for i, value in enumerate(node.outputs):
                name = wanted.get(value)
                if name is None and inner:
                    outputs.append(value)
                    continue
                name = name or self._free(own if len(node.outputs) == 1 else f"{own}.{i}")
                new = Value(self._taken.claim(name), value.type, value.kind)
                renamed[value] = new
                outputs.append(new)
            inputs = tuple(renamed.get(value, value) for value in node.inputs)
            rebuilt = Node(node.op, inputs, tuple(outputs), own, node.source)
            self.b.nodes.append(rebuilt)
            self._named.add(rebuilt)
        for old, new in list(self.updates.items()):
            self.updates[old] = renamed.get(new, new)
        self.guards.rename(renamed)
        return renamed

    def _free(self, name: str) -> str:
        """A name for a value without one in the file; no tensor of the file has the same name."""
        while name in self._reserved:
            name += "'"
        return name

    def _initializers(self, graph: onnx.GraphProto) -> dict[str, onnx.TensorProto]:
        if graph.sparse_initializer:
            name = graph.sparse_initializer[0].values.name
            raise UnsupportedError(f"{self.model.label}: initializer {name!r} is sparse; export it as a dense tensor")
        return {tensor.name: tensor for tensor in graph.initializer}
