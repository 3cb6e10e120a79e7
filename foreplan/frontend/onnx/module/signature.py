"""What torch.export says of a module's tensors, and which of them a node of the file reads.

`torch.onnx.export(…, dynamo=True)` writes the signature of the exported program into the graph's metadata: each
parameter and buffer with its name in the program (`p_fc_weight`) and in the module (`fc.weight`). Each node has the
call that it was made of, with the tensors that this call read, and the path of the module that it stands in. A
parameter that the module ties has one name in the program, wherever it is read.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from typing import TYPE_CHECKING

from foreplan.base.syntax import expression

if TYPE_CHECKING:
    import onnx

_SIGNATURE = "pkg.torch.export.ExportedProgram.graph_signature"
_CALL, _SCOPES = "pkg.torch.onnx.fx_node", "pkg.torch.onnx.name_scopes"
_CLASSES = "pkg.torch.onnx.class_hierarchy"
# A line of PyTorch 2.7 and later, and a part of the one line of those before.
_LINE = re.compile(r"^\s*(\w+): (PARAMETER|BUFFER|CONSTANT_TENSOR) target='([^']+)'", re.MULTILINE)
_SPEC = re.compile(r"InputKind\.(PARAMETER|BUFFER|CONSTANT_TENSOR): \d+>, arg=\w+\(name='(\w+)'\), target='([^']+)'")
_CHANGE = re.compile(r"^\s*(\w+): BUFFER_MUTATION target='([^']+)'", re.MULTILINE)
_NAME = re.compile(r"%(\w+)")
_MOST = 6  # tensors of one call whose orders are compared


@dataclass(frozen=True)
class Call:
    """The call of torch.export's program that a node was made of.

    Attributes:
        value: the name of its result; all nodes of one call have it.
        op: what is called.
        args: the names in the program of the tensors that it reads, in order.
        scope: the path of the module that it stands in.
    """

    value: str
    op: str
    args: Sequence[str]
    scope: str

    @staticmethod
    def of(node: onnx.NodeProto) -> Call | None:
        """What a node's metadata say; None: nothing. Of a node that was put in, the scope alone is told."""
        told = {entry.key: entry.value for entry in node.metadata_props if entry.key in (_CALL, _SCOPES)}
        value, _, call = told.get(_CALL, "").partition("=")
        name = _NAME.match(value.strip())
        if name is None:
            return Call("", "", (), _module_of(told[_SCOPES])) if _SCOPES in told else None
        op = re.search(r"target=([\w.]+)", call)
        return Call(name[1], op[1] if op else "", _NAME.findall(call), _module_of(told.get(_SCOPES, "")))


def set_scope(node: onnx.NodeProto, scope: str) -> None:
    """Say of a node the path of the module that it stands in, and nothing else."""
    del node.metadata_props[:]
    node.metadata_props.add(key=_SCOPES, value=str([scope, ""]))


@dataclass(frozen=True)
class Read:
    """An input of a node that is a tensor of the module, or was computed from one.

    Attributes:
        node: the node's index.
        slot: the input's.
        name: of what is read, in the file.
        source: the module's tensor that the file says it is, or was computed from.
    """

    node: int
    slot: int
    name: str
    source: str


@dataclass(frozen=True)
class Signature:
    """The parameters, buffers and constants of an exported program.

    Attributes:
        targets: name in the program → name in the module.
        kinds: name in the module → PARAMETER, BUFFER or CONSTANT_TENSOR.
        changes: name of a result → the buffer that has it as its next content.
    """

    targets: Mapping[str, str] = field(default_factory=dict)
    kinds: Mapping[str, str] = field(default_factory=dict)
    changes: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def of(graph: onnx.GraphProto) -> Signature:
        """What a graph's metadata say."""
        text = next((entry.value for entry in graph.metadata_props if entry.key == _SIGNATURE), "")
        found = _LINE.findall(text) or [(name, kind, target) for kind, name, target in _SPEC.findall(text)]
        return Signature(
            {name: target for name, _, target in found},
            {target: kind for _, kind, target in found},
            dict(_CHANGE.findall(text)),
        )

    def is_detached(self, node: onnx.NodeProto, name: str) -> bool:
        """Whether no gradient comes back from a result: spectral norm iterates so, for buffers of its own."""
        classes = next((entry.value for entry in node.metadata_props if entry.key == _CLASSES), "")
        return name in self.changes and "torch.nn.utils.parametrizations._SpectralNorm" in classes

    def tensors_of(self, reads: Iterable[Read], nodes: Sequence[onnx.NodeProto]) -> dict[Read, str]:
        """The module's tensor that each read is of, as far as the calls tell it; empty: none, but a number in the call.

        Args:
            reads: of the file's tensors, in the order of their nodes.
            nodes: of the file.
        """
        calls = _calls_of(nodes)
        by_call: dict[tuple[str, int], list[Read]] = {}
        for read in reads:
            if read.node in calls:
                value = calls[read.node].value
                by_call.setdefault((value, -1 if value else read.node), []).append(read)
        named = {name for call in calls.values() for name in call.args if name in self.targets}
        alive = {self.targets[name].rpartition(".")[0] for name in named}
        found: dict[Read, str] = {}
        for group in by_call.values():
            call = calls[group[0].node]
            args = [self.targets[name] for name in dict.fromkeys(call.args) if name in self.targets]
            found |= _assigned(group, args)
            found |= self._by_scope([read for read in group if read not in found], call.scope, alive)
            if len(call.args) == 1 and not args:
                others = [read for read in group if read not in found and call.args[0] in nodes[read.node].input]
                found |= dict.fromkeys(others, "")
        return found

    def _by_scope(self, group: Sequence[Read], scope: str, alive: set[str]) -> dict[Read, str]:
        """Where a call reads what was computed from a tensor of the module that it stands in: the one of that name."""
        own = {read: f"{scope}.{_last(read.source)}".lstrip(".") for read in group}
        if not any(each == scope or each.startswith(f"{scope}.") for each in alive):
            return {read: name for read, name in own.items() if name == read.source}  # a module may have two names
        return {read: name for read, name in own.items() if name in self.kinds}


def _assigned(group: Sequence[Read], args: Sequence[str]) -> dict[Read, str]:
    """Each read's tensor, of those that the call reads: the same one, else one of the same last name, else in order."""
    if len(args) > _MOST:
        return {read: read.source for read in group if read.source in args}
    if len(group) > len(args):
        found = {}
        for name in args:
            same = [read for read in group if read.source == name] or [
                r for r in group if _last(r.source) == _last(name)
            ]
            if len(same) == 1:
                found[same[0]] = name
        return found

    def score(order: Sequence[str]) -> int:
        same = sum(read.source == name for read, name in zip(group, order))
        return 2 * same + sum(_last(read.source) == _last(name) for read, name in zip(group, order))

    best = max(permutations(args, len(group)), key=score)
    sure = len(group) == len(args)
    return {read: name for read, name in zip(group, best) if sure or _last(read.source) == _last(name)}


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _module_of(scopes: str) -> str:
    """The path of the module that a call stands in: of `['', 'a', 'a.b', 'linear']`, the last but one."""
    try:
        path = ast.literal_eval(expression(scopes)) if scopes else []
    except (SyntaxError, ValueError):
        return ""
    return str(path[-2]) if isinstance(path, list) and len(path) > 1 else ""


def _calls_of(nodes: Sequence[onnx.NodeProto]) -> dict[int, Call]:
    """The call of each node, by its index. A node of which nothing is told has the scope of those that read it."""
    calls = {index: call for index, node in enumerate(nodes) if (call := Call.of(node)) is not None}
    for index, call in list(calls.items()):
        if "batch_norm" in call.op and nodes[index].op_type != "BatchNormalization":
            del calls[index]  # folded into what stood before it, of which nothing is told
    readers: dict[str, list[int]] = {}
    for index, node in enumerate(nodes):
        for name in node.input:
            readers.setdefault(name, []).append(index)
    untold = [index for index, node in enumerate(nodes) if not node.metadata_props]
    found = True
    while found:
        found = False
        for index in untold:
            at = [reader for name in nodes[index].output for reader in readers.get(name, ())]
            scopes = {calls[reader].scope for reader in at if reader in calls}
            if index not in calls and len(scopes) == 1 and all(reader in calls for reader in at):
                calls[index], found = Call("", "", (), scopes.pop()), True
    return calls
