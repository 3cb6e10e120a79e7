"""Another number of samples for a model: each sample is computed as before.

Shapes are static, and ops hold some of them. Which axis of a value has the samples, and how many entries each of them
takes, follows from the results back to the inputs, by the boxes that ops read for a box of their results
(`narrowing`): what the first sample of a result needs, and what the last one needs, must be the first and the last
sample of what is read. So a model is resized only where no sample depends on another one. A batch of one sample shows
nothing of this.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from foreplan.base.errors import ForeplanError, UnsupportedError
from foreplan.graph import Array, Fill, Graph, GraphBuilder, Kind, Node, Op, Value
from foreplan.graph.init import generator_for
from foreplan.graph.ir import live_nodes
from foreplan.graph.types import Shape, TensorType
from foreplan.ops.expr import Expr, used_args
from foreplan.ops.expr.nodes import Call, is_literal
from foreplan.ops.loop import Loop
from foreplan.ops.map import Map
from foreplan.ops.reduce import Reduce
from foreplan.ops.shape import Reshape, Slice
from foreplan.passes.narrowing import box_of, narrowed, whole


@dataclass(frozen=True)
class Samples:
    """Where the samples lie in a tensor.

    Attributes:
        axis: the axis that has them, one behind the other.
        each: how many entries of it a sample has, side by side.
        repeats: how often the axis goes through all samples, as one of tokens × samples does.
    """

    axis: int
    each: int
    repeats: int = 1

    def place(self, index: int, count: int) -> tuple[int, int, int]:
        """First index, number and step of the entries that one of `count` samples has along the axis.

        Raises:
            _Mixed: they are not at equal distances.
        """
        if self.repeats > 1 and self.each > 1:
            raise _Mixed("samples lie in several stretches of an axis")
        return (index, self.repeats, count) if self.repeats > 1 else (self.each * index, self.each, 1)

    def box(self, shape: Shape, index: int, count: int) -> Slice:
        """The part of a tensor that one of `count` samples has."""
        places = ((0, extent, 1) for extent in shape)
        return box_of(self.place(index, count) if i == self.axis else place for i, place in enumerate(places))

    def of(self, type: TensorType, count: int) -> TensorType:
        """A type with another number of samples."""
        extent = self.repeats * self.each * count
        return type.with_shape(tuple(extent if i == self.axis else n for i, n in enumerate(type.shape)))


class _Mixed(Exception):
    """Why samples cannot be told from one another, for people: what goes before `so …`."""


def resized(graph: Graph, shapes: Mapping[str, Shape]) -> Graph:
    """The model for another number of samples, which each give what they gave before.

    Args:
        graph: a model in inference form. Updates that depend on samples are left out: they may need all of them.
        shapes: of its inputs in the new model, by name. Inputs that are left out stay as they are, and so do shapes
            that are as before. The others differ along one axis each, and all by the same factor.

    Raises:
        UnsupportedError: the shapes are no other number of samples; or a sample depends on others; or an op does not
            say what of its inputs a part of its results needs. Names the node.
    """
    given = {value: shapes[value.name] for value in graph.inputs if value.name in shapes}
    axes = {value: _changed_axis(value, shape) for value, shape in given.items() if shape != value.shape}
    if not axes:
        return graph
    old = math.gcd(*(value.shape[axis] for value, axis in axes.items()))
    news = {given[value][axis] * old / value.shape[axis] for value, axis in axes.items()}
    new = int(next(iter(news)))
    try:
        if len(news) > 1 or new not in news or not new:
            raise _Mixed("its inputs do not have the same number of samples")
        if old == 1:
            raise _Mixed("a batch of one sample does not show which axes are the batch's")
        inputs = {value: Samples(axis, value.shape[axis] // old) for value, axis in axes.items()}
        dependent = _dependent(graph, inputs)
        graph = replace(graph, updates={x: y for x, y in graph.updates.items() if y not in dependent})
        places = _Places(old)
        places.find(graph, inputs, dependent)
        _check_numbers(graph, places)
        return _rebuilt(graph, places, new)
    except (_Mixed, ForeplanError) as error:
        raise UnsupportedError(
            f"{graph.name!r}, which was made for {old} samples, cannot take {new} instead: {error}"
        ) from None


def _check_numbers(graph: Graph, places: _Places) -> None:
    """Refuse a node that scales samples by their number, which code may have taken from a shape: `x / x.shape[0]`.

    Two samples are let pass: a half and a double stand in too many formulas.
    """
    suspects = (places.count, 1 / places.count)
    for node in graph.nodes_of(Map) if places.count > 2 else ():
        if not places.found.keys().isdisjoint(node.outputs):
            for whole_expr in node.op.parsed:
                expr: Expr = whole_expr
                while isinstance(expr, Call) and len(expr.args) == 1:  # a conversion of what was computed
                    (expr,) = expr.args
                parts = expr.args if isinstance(expr, Call) and expr.function in ("mul", "div") else ()
                if len(used_args(expr)) == 1 and any(is_literal(part, n) for part in parts for n in suspects):
                    raise _Mixed(
                        f"{_told(node)} scales by {places.count}, which may be the number of samples. Compile for that "
                        "many, or for another number that no formula has"
                    )


def _changed_axis(value: Value, shape: Shape) -> int:
    """The axis along which an input has another extent."""
    changed = [i for i, (a, b) in enumerate(zip(value.shape, shape)) if a != b]
    if len(shape) != len(value.shape) or len(changed) != 1:
        raise UnsupportedError(
            f"the input {value.name!r} ({value.type}) differs from {list(shape)} in more than the number of samples"
        )
    return changed[0]


_Lies = list[Samples | None]


@dataclass
class _Places:
    """Where the samples lie in all values that the results need.

    Attributes:
        count: the number of samples.
        found: of each value that has them.
    """

    count: int
    found: dict[Value, Samples] = field(default_factory=dict)

    def find(self, graph: Graph, inputs: Mapping[Value, Samples], dependent: Collection[Value]) -> None:
        """Find the places, from the results of a model to its inputs.

        Raises:
            _Mixed: that cannot be told.
        """
        for result in graph.results:
            if result in dependent:
                node = graph.made_by(result, Reduce)
                is_mean = node and not result.shape and node.op.how == "mean"  # of any number of samples
                self._from_result(graph, node.inputs[0] if node and is_mean else result, dependent, inputs)

    def _from_result(
        self, graph: Graph, result: Value, dependent: Collection[Value], inputs: Mapping[Value, Samples]
    ) -> None:
        """What one more result needs, along the first of its axes that shows the samples."""
        refused: _Mixed | None = None
        for lies in self._possible(result):
            try:
                found = self.followed(graph, {**self.found, result: lies}, dependent)
                _check_ends(graph, found, inputs)
            except _Mixed as error:
                refused = refused or error
            else:
                self.found = found
                return
        if not result.shape:
            raise _Mixed(
                f"the result {result.name!r} is one number of all samples, and no mean over them; a loss is given to "
                "compile instead"
            )
        raise refused or _Mixed(f"no axis of the result {result.name!r} ({result.type}) has the samples")

    def _possible(self, value: Value) -> list[Samples]:
        extents = enumerate(value.shape)
        return [Samples(axis, extent // self.count) for axis, extent in extents if extent and not extent % self.count]

    def followed(
        self, graph: Graph, ends: Mapping[Value, Samples], dependent: Collection[Value]
    ) -> dict[Value, Samples]:
        """Where the samples lie in what some values are made of, and in them.

        Raises:
            _Mixed: a node needs more of what depends on the samples than the sample that it computes.
        """
        found, entire = dict(ends), set[Value]()
        for node in reversed(graph.nodes):
            if found.keys().isdisjoint(node.outputs):
                if not entire.isdisjoint(node.outputs):
                    entire.update(node.inputs)
                continue
            reads, writes = self._of_node(node, found, dependent)
            for value, lies in (*zip(node.outputs, writes), *zip(node.inputs, reads)):
                if lies is not None:
                    if found.setdefault(value, lies) != lies:
                        raise _Mixed(f"{_told(node)} finds the samples elsewhere in {value.name!r} than others do")
                elif value in dependent:
                    raise _Mixed(f"{_told(node)} reads all of {value.name!r} ({value.type}) for one sample")
                else:
                    entire.add(value)
        for value in entire:
            if value in found:
                raise _Mixed(f"{value.name!r} ({value.type}) is read whole, and sample by sample")
        return found

    def _of_node(self, node: Node, found: Mapping[Value, Samples], dependent: Collection[Value]) -> tuple[_Lies, _Lies]:
        """Where the samples lie in what a node reads, and in what it makes."""
        first = node.outputs[0]
        if loop := node.of(Loop):
            reads, writes, _ = self.of_loop(loop, found, dependent)
            return reads, writes
        if node.of(Reshape):
            return [self._before(node, found[first])], [found[first]]
        for lies in [found[first]] if first in found else self._possible(first):
            ways = [narrowed(node, lies.box(first.shape, index, self.count)) for index in (0, self.count - 1)]
            if ways[0] is None or ways[1] is None:
                continue
            reads = [self._where(v, ways[0].inputs[i], ways[1].inputs[i]) for i, v in enumerate(node.inputs)]
            writes = [self._where(v, ways[0].outputs[i], ways[1].outputs[i]) for i, v in enumerate(node.outputs)]
            if all(value not in found or found[value] == own for value, own in zip(node.outputs, writes)):
                return reads, writes
        raise _Mixed(f"{_told(node)} does not compute one sample by itself")

    def _before(self, node: Node, lies: Samples) -> Samples:
        """Where the samples lie before a reshape, which leaves all elements in their order."""
        before, after = node.inputs[0].shape, node.outputs[0].shape
        stride = lies.each * math.prod(after[lies.axis + 1 :])  # elements from one sample to the next
        for axis, extent in enumerate(before):
            own = math.prod(before[axis + 1 :])
            if own and stride % own == 0 and extent * own % (stride * self.count) == 0:
                return Samples(axis, stride // own, extent * own // (stride * self.count))
        raise _Mixed(f"{_told(node)} joins the samples with something else")

    def _where(self, value: Value, first: Slice | None, last: Slice | None) -> Samples | None:
        """Where the samples lie in a tensor, by the boxes of the first and of the last one; None: nowhere."""
        boxes = [whole(value.shape) if box is None else box for box in (first, last)]
        places = [list(zip(box.starts, box.shape, box.steps)) for box in boxes]
        axes = [axis for axis, pair in enumerate(zip(*places)) if pair[0] != pair[1]]
        if not axes:
            return None
        (axis, *others), (_, each, step) = axes, places[0][axes[0]]
        found = Samples(axis, each) if step == 1 else Samples(axis, 1, each)
        ends = [found.place(index, self.count) for index in (0, self.count - 1)]
        if not others and found.of(value.type, self.count) == value.type and [own[axis] for own in places] == ends:
            return found
        raise _Mixed(f"the samples of {value.name!r} ({value.type}) do not lie one behind the other along one axis")

    def of_loop(
        self, node: Node[Loop], found: Mapping[Value, Samples], dependent: Collection[Value]
    ) -> tuple[_Lies, _Lies, dict[Value, Samples]]:
        """The same of a loop, by what its body reads for a sample of its results; and the places in the body."""
        op, body, carries = node.op, node.op.graph, node.op.carries
        results = [*op.results, *(op.results[i] for i in op.histories)]
        ends: dict[Value, Samples] = {}
        for i, (value, inner) in enumerate(zip(node.outputs, results)):
            lies = found.get(value)
            if lies is not None and i >= carries:
                if not lies.axis:
                    raise _Mixed(f"{_told(node)} has its steps along the axis of the samples")
                lies = replace(lies, axis=lies.axis - 1)
            if lies is not None and ends.setdefault(inner, lies) != lies:
                raise _Mixed(f"{_told(node)} finds the samples in two places of {value.name!r}")
        varying = _dependent(body, [x for x, outer in zip(body.inputs, node.inputs) if outer in dependent])
        while not varying.issuperset(more := [x for x, y in zip(body.inputs, op.results[:carries]) if y in varying]):
            varying = _dependent(body, [*(x for x in body.inputs if x in varying), *more])
        while True:  # until what a step hands on has its samples where the next one reads them
            places = self.followed(body, ends, varying)
            carried = {y: places[x] for x, y in zip(body.inputs, op.results[:carries]) if x in places}
            if all(places.get(y) == lies for y, lies in carried.items()):
                break
            if any(places.get(y, lies) != lies for y, lies in carried.items()):
                raise _Mixed(f"{_told(node)} moves the samples of what it carries")
            ends |= carried

        def outside(value: Value, is_stack: bool) -> Samples | None:
            lies = places.get(value)
            return replace(lies, axis=lies.axis + 1) if lies is not None and is_stack else lies

        reads = [outside(value, op.is_slice(i)) for i, value in enumerate(body.inputs)]
        for i in range(carries):
            if reads[i] is None and op.results[i] in places:
                raise _Mixed(f"{_told(node)} carries samples that it does not begin with")
        return reads, [outside(value, i >= carries) for i, value in enumerate(results)], places


def _check_ends(graph: Graph, found: Mapping[Value, Samples], inputs: Mapping[Value, Samples]) -> None:
    """Check what is found of inputs and stored values."""
    for value in graph.inputs:
        if value in found and value not in inputs:
            raise _Mixed(f"the input {value.name!r} ({value.type}) has something for each sample, and stays as it was")
        if value in found and found[value] != inputs[value]:
            raise _Mixed(f"axis {inputs[value].axis} of the input {value.name!r} is not that of the samples")
    for value in graph.stored:
        if value in found and value.kind is not Kind.CONSTANT:
            raise _Mixed(f"the {value.kind} {value.name!r} ({value.type}) has something for each sample")


def _dependent(graph: Graph, inputs: Iterable[Value]) -> set[Value]:
    """What depends on inputs, with them."""
    found = set(inputs)
    for node in graph.nodes:
        if not found.isdisjoint(node.inputs):
            found.update(node.outputs)
    return found


def _rebuilt(graph: Graph, places: _Places, new: int) -> Graph:
    """The graph with another number of samples in the values that have them."""
    found = places.found

    def with_type(value: Value) -> Value:
        return replace(value, type=found[value].of(value.type, new)) if value in found else value

    now = {value: with_type(value) for value in (*graph.inputs, *graph.stored)}
    for value in graph.stored:
        if value in found and not isinstance(value.init, Fill):
            now[value] = replace(now[value], init=_contents(value, found[value], places.count, new))
    b = GraphBuilder(graph.name)
    b.inputs, b.stored = [now[value] for value in graph.inputs], [now[value] for value in graph.stored]
    b.notes = [*graph.notes]
    b.reserve((*b.inputs, *b.stored), graph.nodes)
    for node in live_nodes(graph, graph.results):
        inputs = tuple(now[value] for value in node.inputs)
        op = node.op if found.keys().isdisjoint(node.outputs) else _of_samples(node, places, new)
        made = tuple(map(with_type, node.outputs))
        if list(op.result_types([value.type for value in inputs])) != [value.type for value in made]:
            raise _Mixed(f"{_told(node)} gives something else for other numbers of samples")
        b.append(Node(op, inputs, made, node.name, node.source), inferred=True, reserved=True)
        now.update(zip(node.outputs, made))
    outputs = {name: now[value] for name, value in graph.outputs.items()}
    updates = {now[old]: now[value] for old, value in graph.updates.items()}
    return b.finish(outputs, updates, None if graph.loss is None else now[graph.loss])


def _of_samples(node: Node, places: _Places, new: int) -> Op:
    """The op of a node for another number of samples."""
    op, first = node.op, node.outputs[0]
    if loop := node.of(Loop):
        _, _, inside = places.of_loop(loop, places.found, set(places.found))
        return replace(loop.op, body=_rebuilt(loop.op.graph, _Places(places.count, inside), new).as_text())
    shape = getattr(op, "shape", None)  # which some ops hold of their result
    if shape is None:
        return op
    if shape != first.shape:
        raise _Mixed(f"{_told(node)} holds the shape {list(shape)}")
    return replace(op, shape=places.found[first].of(first.type, new).shape)  # type: ignore[call-arg]


def _contents(value: Value, lies: Samples, old: int, new: int) -> Array:
    """A constant that is the same for each sample, for another number of them.

    Raises:
        _Mixed: it is not.
    """
    array = np.empty(value.shape, value.dtype.numpy)
    assert value.init is not None
    value.init.fill(array, generator_for(0, value.name))
    apart = (*value.shape[: lies.axis], lies.repeats, old, lies.each, *value.shape[lies.axis + 1 :])
    samples = np.split(array.reshape(apart), old, lies.axis + 1)
    if any(each.tobytes() != samples[0].tobytes() for each in samples[1:]):
        raise _Mixed(f"the constant {value.name!r} ({value.type}) has other numbers for each sample")
    return Array(np.concatenate([samples[0]] * new, lies.axis + 1).reshape(lies.of(value.type, new).shape))


def _told(node: Node) -> str:
    return f"{node.name!r} ({node.op.name}{f', {node.source}' if node.source else ''})"
