"""Training mode and evaluation mode of a module: whether one program serves both."""

from __future__ import annotations

import contextlib
import itertools
import operator
import sys
from collections.abc import Iterator
from functools import cache
from types import CodeType
from typing import TYPE_CHECKING, Any

from foreplan.frontend.torch.run import path_of
from foreplan.frontend.torch.writes import writes

if TYPE_CHECKING:
    import torch

_OF_MODE = frozenset(("train", "training", "dropout", "dropout_p", "cudnn_enabled", "momentum"))
_MAKERS = ("torch.nn.modules.module", "torch.fx.", "torch.export.", "torch._export.")  # of modules, whose mode they set


@contextlib.contextmanager
def in_mode(module: torch.nn.Module, training: bool) -> Iterator[None]:
    """The module in evaluation mode as a whole; or in training mode, if it is not already: its parts may differ."""
    modes = {part: part.training for part in module.modules()}
    try:
        if not training or not module.training:
            module.train(training)
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode


@contextlib.contextmanager
def askers(module: torch.nn.Module) -> Iterator[set[CodeType | None]]:
    """While the body runs, notes the code that asks for the mode of a module's part, or changes it; None: that of
    another module, which may be a copy.
    """
    import torch

    found: set[CodeType | None] = set()
    own = {id(part) for part in module.modules()}

    def note(part: Any) -> None:
        frame = sys._getframe(2)
        if id(part) in own:
            found.add(frame.f_code)
        elif not frame.f_globals.get("__name__", "").startswith(_MAKERS):
            found.add(None)

    def ask(part: Any) -> Any:
        note(part)
        try:
            return part.__dict__["training"]
        except KeyError:
            raise AttributeError(f"{type(part).__name__!r} object has no attribute 'training'") from None

    def tell(part: Any, mode: bool) -> None:
        note(part)
        part.__dict__["training"] = mode

    kind: Any = torch.nn.Module
    kind.training = property(ask, tell)  # comes before what instances have
    try:
        yield found
    finally:
        del kind.training


def has_one_form(module: torch.nn.Module, asked: set[CodeType | None], program: Any) -> bool:
    """Whether a module does the same in both modes but for what PyTorch's own layers tell their ops.

    Args:
        asked: the code that asked for the mode while the module ran in training mode.
        program: what it did.
    """
    graphs = [each.graph for each in program.graph_module.modules() if hasattr(each, "graph")]
    told = [node for graph in graphs for node in graph.nodes if _in_any_mode(node)]
    parts = dict(module.named_modules(remove_duplicate=False))
    return (
        asked <= _layers()
        and all(_is_seen(part) and _keeps_statistics_or_not(part) for part in module.modules())
        and all(_hands_on(parts.get(path_of(node), module)) for node in told)
        and _counts_alone(program.graph)
    )


@cache
def _layers() -> set[CodeType | None]:
    """The code of PyTorch's layers that only hand the mode on to an op, or as `_keeps_statistics_or_not` says."""
    from torch import nn
    from torch.nn.modules.batchnorm import _BatchNorm

    dropouts = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
    kinds: Any = (*dropouts, nn.RReLU, nn.RNN, nn.LSTM, nn.GRU, _BatchNorm)
    return {kind.forward.__code__ for kind in kinds}


def _is_seen(part: torch.nn.Module) -> bool:
    """Whether nothing of a module but `training` says its mode, and `askers` sees who reads that."""
    import torch

    kinds = type(part).__mro__
    base = kinds.index(torch.nn.Module)
    hidden = ("training", "train", "eval", "__getattribute__")
    own = part.__dict__.keys() & {"train", "eval"}
    return (
        not own
        and torch.jit.ScriptModule not in kinds
        and not any(name in vars(kind) for kind in kinds[:base] for name in hidden)
    )


def _hands_on(part: torch.nn.Module) -> bool:
    """Whether a module is such a layer, and does nothing else."""
    changed = "forward" in part.__dict__ or part._forward_hooks or part._forward_pre_hooks
    return not changed and type(part).forward.__code__ in _layers()


def _keeps_statistics_or_not(part: torch.nn.Module) -> bool:
    """Whether a batch normalisation does in one mode what it does in the other."""
    from torch.nn.modules.batchnorm import _BatchNorm

    if not isinstance(part, _BatchNorm):
        return True
    return part.track_running_stats == (part.running_mean is not None) == (part.running_var is not None)


def same_but_mode(training: Any, inference: Any) -> bool:
    """Whether two programs differ in nothing but what ops are told of the mode, in counters of batches, and in whether
    a tensor is contiguous.
    """
    theirs = (node for node in inference.graph.nodes if node.op == "call_function")
    return not any(_in_any_mode(node) for node in theirs) and alike(training, inference)


def constants_alike(one: Any, other: Any) -> bool:
    """Whether two programs have the same numbers beside a module's own, as far as they read them."""
    import torch

    def read(program: Any) -> list[Any]:
        holders = [node for node in program.graph.nodes if node.op == "placeholder"]
        pairs = zip(holders, program.graph_signature.input_specs)
        found = [program.constants.get(spec.target) if node.users else None for node, spec in pairs]
        return [each for each in found if isinstance(each, torch.Tensor)]

    pairs = list(itertools.zip_longest(read(one), read(other)))
    return all(a is not None and b is not None and torch.equal(a, b) for a, b in pairs)


def alike(training: Any, inference: Any) -> bool:
    """Whether two programs are the same but for what ops are told of the mode, and for what changes no result."""
    import torch

    place: dict[torch.fx.Node, int] = {}

    def nodes(program: Any) -> list[torch.fx.Node]:
        counting, written = _counting(program.graph), writes(program.graph)
        found: list[torch.fx.Node] = []
        for node in program.graph.nodes:
            if str(node.target) == "aten.contiguous.default" and node not in written:
                place[node] = place[node.args[0]]
            elif node not in counting:
                place[node] = len(found)
                found.append(node)
        return found

    def shown(node: torch.fx.Node) -> Any:
        if node.op == "get_attr":
            return node.op, _text_of(node)
        given: dict[str, Any] = {"args": node.args, **node.kwargs}
        if isinstance(node.target, torch._ops.OpOverload):
            known = {each.name: each for each in node.target._schema.arguments}
            given = dict(zip(known, node.args)) | dict(node.kwargs)
            unsaid = _OF_MODE | {"p"} if "train" in known else _OF_MODE  # of what is not dropped, how much is nothing
            given = {key: x for key, x in given.items() if key not in unsaid and not _is_default(known[key], x)}
        return node.op, str(node.target), repr(torch.fx.map_arg(given, lambda other: f"%{place.get(other)}"))

    ours, theirs = nodes(training), nodes(inference)
    return len(ours) == len(theirs) and all(shown(a) == shown(b) for a, b in zip(ours, theirs))


def is_of_weights(program: Any, module: torch.nn.Module) -> bool:
    """Whether a program computes of a module's own tensors alone, and of none that a step changes. In evaluation mode
    no step changes parameters.
    """
    import torch
    from torch.export.graph_signature import InputKind

    least = InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR
    kinds = {spec.arg.name: spec.kind for spec in program.graph_signature.input_specs}
    written, pending, seen = writes(program.graph), [program.graph.output_node()], set[torch.fx.Node]()
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        pending += node.all_input_nodes
        kind = kinds.get(node.name) if node.op == "placeholder" else None
        if node.op == "placeholder" and (kind not in least or (kind is InputKind.PARAMETER and module.training)):
            return False
        if node in written or torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            return False
    return True


def _is_default(argument: Any, given: Any) -> bool:
    """Whether an op is told no more of an argument than if it were left out."""
    plain = isinstance(given, bool | int | float | str | type(None))
    return bool(plain and argument.has_default_value() and argument.default_value == given)


def _in_any_mode(node: torch.fx.Node) -> bool:
    """Whether a node of the program of inference drops, or takes the statistics of its batch, all the same."""
    if not hasattr(node.target, "_schema"):
        return False
    given = dict(zip((each.name for each in node.target._schema.arguments), node.args)) | dict(node.kwargs)
    if given.get("running_mean", node) is None:  # there are no others
        return False
    told = any(given.get(name) for name in ("train", "training"))
    return bool(given.get("dropout_p")) or (told and bool(given.get("p", 1)))


def _text_of(node: torch.fx.Node) -> str:
    found: Any = operator.attrgetter(node.target)(node.graph.owning_module)
    return str(found.graph) if hasattr(found, "graph") else str(node.target)


def _counting(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """The nodes that count the batches that a normalisation has seen, where nothing reads the count."""
    found = _counters(graph)
    return {node for node in found if all(user.op == "output" or user in found for user in node.users)}


def _counts_alone(graph: torch.fx.Graph) -> bool:
    """Whether nothing but what counts batches reads their number."""
    found = _counters(graph)
    return all(user in found for node in graph.nodes if node in found or _is_count(node) for user in node.users)


def _counters(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """The nodes that add to a number of batches."""
    found: set[torch.fx.Node] = set()
    for node in graph.nodes:
        if node.op == "call_function" and str(node.target).startswith("aten.add_"):
            counted: Any = node.args[0]
            if counted in found or _is_count(counted):
                found.add(node)
    return found


def _is_count(node: torch.fx.Node) -> bool:
    return node.op == "placeholder" and "num_batches_tracked" in node.name
