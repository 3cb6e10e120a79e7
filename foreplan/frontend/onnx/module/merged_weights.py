"""Weights that the exporter has merged since they are equal in a fresh module: each is one of its own again.

PyTorch's exporters keep one initializer of several that are equal, such as scales of normalisations and the weights of
copied layers. TorchScript's exporter leaves an Identity with each lost name. That of `dynamo=True` writes into each
node which weights of the module it reads. Where a file tells neither, zeros or ones of one axis, read in several places
that a module fills so, count as merged. The initializer is copied under the name of each lost weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from foreplan.base.units import listed
from foreplan.frontend.onnx.module.contents import is_zeros_or_ones
from foreplan.frontend.onnx.module.copied_layers import identities_of_copies
from foreplan.frontend.onnx.module.draft import Draft
from foreplan.frontend.onnx.module.exporter import Exporter
from foreplan.frontend.onnx.module.signature import Read

if TYPE_CHECKING:
    import onnx

# Op → the inputs that a module fills with zeros or ones when it is made: scales, shifts, statistics and biases.
_FRESH: dict[str, tuple[int, ...]] = {
    "LayerNormalization": (1, 2),
    "GroupNormalization": (1, 2),
    "InstanceNormalization": (1, 2),
    "RMSNormalization": (1,),
    "BatchNormalization": (1, 2, 3, 4),
    "Conv": (2,),
    "ConvTranspose": (2,),
    "Gemm": (2,),
}
_STATISTICS = {3: "running_mean", 4: "running_var"}


@dataclass(frozen=True)
class _Copy:
    """What some inputs of nodes read instead of a merged tensor.

    Attributes:
        source: the merged tensor.
        name: of the copy; others may want it too.
        places: the inputs, as pairs of a node's index and a slot.
        kind: of the copy, as torch.export knows it; empty: this is not told.
        target: the module's tensor that the copy was computed from; empty: it is the module's, or a number of a call.
    """

    source: str
    name: str
    places: Sequence[tuple[int, int]]
    kind: str = ""
    target: str = ""


def split_merged_weights(draft: Draft) -> None:
    """Give the readers of each lost weight a copy of the initializer that was kept. What the module ties stays tied."""
    held, exporter = draft.floats(), draft.exporter
    named = _identities_of_merged(draft.graph, held, exporter)
    told, known = _recorded_copies(draft.graph, held, exporter)
    module = exporter.signature.kinds or held
    untold = {name: held[name] for name in held if name in module and name not in known}
    copies = [*told, *_guessed_copies(draft.graph, untold, exporter)]
    if not named and not copies:
        return
    made, fresh = draft.change(), []
    for index in named:
        (source,), (name,) = made.node[index].input, made.node[index].output
        _copy(made, held[source], name)
        fresh.append(name)
    for copy in copies:
        name = draft.claim(copy.name)
        _copy(made, held[copy.source], name)
        for index, slot in copy.places:
            made.node[index].input[slot] = name
        draft.record({name: copy.kind} if copy.kind else {}, {name: [copy.target]} if copy.target else {})
        fresh.append(name)
    for index in reversed(named):
        del made.node[index]
    shown = listed(map(repr, fresh), 3)
    draft.notes.append(f"the exporter has merged tensors that were equal; {shown} have their own content again")


def _identities_of_merged(
    graph: onnx.GraphProto, held: Mapping[str, onnx.TensorProto], exporter: Exporter
) -> list[int]:
    """The nodes that give a tensor of the file under the name of another one: of the module, or of a copied part."""
    lost = {
        index: (node.input[0], node.output[0])
        for index, node in enumerate(graph.node)
        if node.op_type == "Identity" and len(node.input) == len(node.output) == 1 and node.input[0] in held
    }
    named = {index for index, names in lost.items() if all(map(exporter.names_module, names))}
    told = {index: names for index, names in lost.items() if index in named or exporter.made(names[1])}
    return sorted(named | identities_of_copies(graph.node, told, held, exporter))


def _recorded_copies(
    graph: onnx.GraphProto, held: Mapping[str, onnx.TensorProto], exporter: Exporter
) -> tuple[list[_Copy], set[str]]:
    """The copies that the file tells of, and the tensors of which it tells at least one reader."""
    origins = {name: name if name in exporter.kinds else exporter.learned_source(name) for name in held}
    reads = [
        Read(index, slot, name, origins[name])
        for index, node in enumerate(graph.node)
        for slot, name in enumerate(node.input)
        if origins.get(name)
    ]
    found = exporter.signature.tensors_of(reads, graph.node)
    readers: dict[str, dict[str, list[Read]]] = {}
    for read in reads:
        if read in found:
            readers.setdefault(read.name, {}).setdefault(found[read], []).append(read)
    stays = {read.name for read in reads if read not in found}
    copies = []
    for name, by_target in readers.items():
        own = origins[name] if name in stays or origins[name] in by_target else next(iter(by_target))
        for target, group in by_target.items():
            if target != own and target not in held:
                copies.append(_recorded_copy(name, target, group, graph, exporter))
    return copies, set(readers)


def _recorded_copy(name: str, target: str, reads: Sequence[Read], graph: onnx.GraphProto, exporter: Exporter) -> _Copy:
    """The copy for the readers of one tensor of the module, or of a number in their calls."""
    places = [(read.node, read.slot) for read in reads]
    if not target:
        return _Copy(name, _name(graph.node[places[0][0]], places[0][1]), places)
    if reads[0].source == name:
        return _Copy(name, target, places, exporter.kinds[target])
    return _Copy(name, f"{target}.{name}", places, "", target)


def _guessed_copies(
    graph: onnx.GraphProto, held: Mapping[str, onnx.TensorProto], exporter: Exporter
) -> Iterator[_Copy]:
    """A copy for each reader but the first of tensors that look as if they were merged."""
    readers: dict[str, list[tuple[int, int]]] = {}
    for index, node in enumerate(graph.node):
        for slot, name in enumerate(node.input):
            if name in held:
                readers.setdefault(name, []).append((index, slot))
    for name, places in readers.items():
        if len(places) < 2 or len(held[name].dims) != 1:
            continue
        usual = all(slot in _FRESH.get(graph.node[index].op_type, ()) for index, slot in places)
        if usual and is_zeros_or_ones(held[name], exporter.path):
            for index, slot in places[1:]:
                yield _Copy(name, _name(graph.node[index], slot), [(index, slot)], exporter.kinds.get(name, ""))


def _name(node: onnx.NodeProto, slot: int) -> str:
    """A name for what a node reads: by that of its scale for statistics, else by its result."""
    last = node.input[slot].rpartition(".")[2]
    if node.op_type == "BatchNormalization" and slot in _STATISTICS:
        return f"{node.input[1].rpartition('.')[0]}.{_STATISTICS[slot]}".lstrip(".")
    return f"{node.output[0]}.{last}"


def _copy(graph: onnx.GraphProto, tensor: onnx.TensorProto, name: str) -> None:
    new = graph.initializer.add()
    new.CopyFrom(tensor)
    new.name = name
