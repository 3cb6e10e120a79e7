"""Graphs from their text, which `Graph.as_text` prints: the two are inverses (random weights stay descriptions)."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable

import numpy as np

from foreplan.base.errors import ModelError
from foreplan.base.syntax import expression
from foreplan.graph.adapter import AdapterMagnitude, AdapterZero
from foreplan.graph.flat import Flat, Member
from foreplan.graph.init import Array, Fill, Initializer, Missing, Normal, RandomSeed, TruncatedNormal, Uniform
from foreplan.graph.ir import Graph
from foreplan.graph.literal import check_arguments, literal_call
from foreplan.graph.op import Node
from foreplan.graph.registry import parse_op
from foreplan.graph.shard import Shard, Sharded
from foreplan.graph.types import TensorType, tensor_type
from foreplan.graph.value import Kind, Value
from foreplan.graph.verify import verify_graph

_NAME = r'%(?:[A-Za-z0-9_./:\-]+|"(?:[^"\\]|\\.)*")'
_TYPE = r"[a-z0-9]+\[[0-9,]*\]"
_OUTPUTS, _INPUTS = rf"{_NAME}: {_TYPE}(?:, {_NAME}: {_TYPE})*", rf"(?:{_NAME}(?:, {_NAME})*)?"
_KINDS = "|".join(kind for kind in Kind if kind is Kind.INPUT or kind.is_stored)
_INITS: dict[str, Callable[..., Initializer]] = {
    "fill": Fill,
    "missing": Missing,
    "normal": Normal,
    "truncated_normal": TruncatedNormal,
    "uniform": Uniform,
    "random_seed": RandomSeed,
    "adapter_zero": AdapterZero,
    "adapter_magnitude": AdapterMagnitude,
}


def _unquote(text: str) -> str:
    if not text.startswith('%"'):
        return text[1:]
    return re.sub(
        r"\\(?:u([0-9a-f]{4})|(.))", lambda found: chr(int(found[1], 16)) if found[1] else found[2], text[2:-1]
    )


def parse_init(text: str, type: TensorType, where: str) -> Initializer:
    """The initializer written as its `str`; one whose content text does not carry raises ModelError."""
    try:
        call = literal_call(text)
        if call.name == "flat" and not call.keywords:
            return _flat(where, *call.arguments)
        if call.name == "sharded" and not call.keywords:
            return _sharded(where, *call.arguments)
        if call.name == "array" and not call.keywords:
            return Array(np.array(call.arguments[0], dtype=type.dtype.numpy).reshape(type.shape))
        init = _INITS[call.name](*call.arguments, **call.keywords)
        check_arguments(init.__class__, vars(init))
        numbers = [float(number) for number in vars(init).values()]
        if not type.dtype.holds(init.value) if isinstance(init, Fill) else not all(map(math.isfinite, numbers)):
            raise ValueError
        return init
    except (KeyError, ValueError, TypeError, IndexError, OverflowError):
        raise ModelError(f"{where}: {text!r} does not describe content that text can carry") from None


def _sharded(where: str, ranks: int, axis: int, blocks: int, type: str, init: str) -> Sharded:
    """A part of a tensor."""
    check_arguments(Shard, {"ranks": ranks, "axis": axis, "blocks": blocks})
    return Sharded(Shard(ranks, axis, blocks), tensor_type(type), parse_init(init, tensor_type(type), where))


def _flat(where: str, ranks: int, stride: int, members: list[tuple[str, int, str, str]]) -> Flat:
    """A row of tensors."""
    found = []
    for name, start, text, init in members:
        type = tensor_type(text)
        found.append(Member(name, start, type, parse_init(init, type, where)))
        check_arguments(Member, {"name": name, "start": start})
    flat = Flat(tuple(found), ranks, stride)
    check_arguments(Flat, {"ranks": ranks, "stride": stride})
    return flat


class _Parser:
    """Reads the lines of one graph; every value is looked up by name."""

    def __init__(self) -> None:
        self.values: dict[str, Value] = {}
        self.name = "graph"
        self.inputs: list[Value] = []
        self.stored: list[Value] = []
        self.nodes: list[Node] = []
        self.outputs: dict[str, Value] = {}
        self.gradients: dict[str, Value] = {}
        self.updates: dict[Value, Value] = {}
        self.notes: list[str] = []
        self.loss: Value | None = None

    def line(self, line: str, where: str) -> None:
        if match := re.fullmatch(rf"graph ({_NAME})", line):
            self.name = _unquote(match[1])
        elif match := re.fullmatch(rf"({_KINDS}) ({_NAME}): (\S+\])(?: = (.*))?", line):
            kind, type = Kind(match[1]), tensor_type(match[3])
            init = parse_init(match[4], type, where) if match[4] else None
            value = Value(_unquote(match[2]), type, kind, init)
            (self.inputs if kind is Kind.INPUT else self.stored).append(value)
            self.values[value.name] = value
        elif match := re.fullmatch(rf"loss ({_NAME})", line):
            self.loss = self.look_up(match[1], where)
        elif match := re.fullmatch(rf"(output|gradient|update) ({_NAME}) = ({_NAME})", line):
            value = self.look_up(match[3], where)
            if match[1] == "update":
                self.updates[self.look_up(match[2], where)] = value
            else:
                (self.outputs if match[1] == "output" else self.gradients)[_unquote(match[2])] = value
        elif line.startswith("note "):
            self.notes.append(str(ast.literal_eval(expression(line[5:]))))
        elif match := re.fullmatch(rf"(~?)({_OUTPUTS}|) = ([a-z_0-9]+\(.*\)) \[({_INPUTS})\] as ({_NAME})", line):
            kind = Kind.GRADIENT if match[1] else Kind.ACTIVATION
            outputs = tuple(
                Value(_unquote(name), tensor_type(type), kind)
                for name, type in re.findall(rf"({_NAME}): ({_TYPE})", match[2])
            )
            inputs = tuple(self.look_up(name, where) for name in re.findall(_NAME, match[4]))
            self.nodes.append(Node(parse_op(match[3]), inputs, outputs, _unquote(match[5]), where))
            self.values.update((value.name, value) for value in outputs)
        else:
            raise ModelError(f"{where}: cannot read {line!r}")

    def look_up(self, name: str, where: str) -> Value:
        value = self.values.get(_unquote(name))
        if value is None:
            raise ModelError(f"{where}: {name} is not defined above this line")
        return value


def parse_graph(text: str, where: str = "text") -> Graph:
    """The graph that `Graph.as_text` printed; blank lines and lines that start with # are skipped.

    Raises:
        ModelError: names the line that cannot be read, or the rule that the graph breaks.
    """
    parser = _Parser()
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.startswith("#"):
            parser.line(line.strip(), f"{where}, line {number}")
    graph = Graph(
        parser.name,
        tuple(parser.inputs),
        tuple(parser.stored),
        tuple(parser.nodes),
        parser.outputs,
        parser.updates,
        parser.loss,
        parser.gradients,
        tuple(parser.notes),
    )
    verify_graph(graph)
    return graph
