"""PyTorch's own export of a module: its graph before any decomposition, in training mode and in evaluation mode."""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import operator
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from foreplan.errors import ModelError, UnsupportedError, UsageError
from foreplan.frontend.torch.attributes import kept, watched
from foreplan.frontend.torch.checkpoints import checkpoints_marked
from foreplan.frontend.torch.frames import functions_kept, line_of_error
from foreplan.frontend.torch.functions import functions_traced
from foreplan.frontend.torch.modes import askers, has_one_form, in_mode
from foreplan.frontend.torch.transforms import transforms_traced
from foreplan.frontend.torch.unseen import seen
from foreplan.frontend.torch.writes import writes

if TYPE_CHECKING:
    import torch

_LEAST = (2, 9)  # of PyTorch: what its export gives, and how what it gives is marked
_ON_DATA = "What depends on numbers is written with torch.where or torch.cond; what does not, with Python's own numbers"
_OF_MODE = frozenset(("train", "training", "dropout", "dropout_p", "cudnn_enabled", "momentum"))


def torch_here() -> Any:
    """The module `torch`.

    Raises:
        UsageError: it is not installed, or an older one than 2.9.
    """
    try:
        import torch
    except ImportError:
        raise UsageError("from_torch needs PyTorch, which is not installed: pip install torch") from None
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < _LEAST:
        raise UsageError(f"from_torch needs PyTorch 2.9 or later, and this is {torch.__version__}")
    return torch


def programs(
    module: torch.nn.Module, example: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[dict[bool, Any], list[str]]:
    """The module's programs, by whether they are those of training mode; that one alone if it says all. And notes.

    Raises:
        ModelError: PyTorch cannot export the module; has the reason that PyTorch gives.
        UnsupportedError: it has a part that is lost when it is exported, or computes something else at each call.
    """
    with _with_memory(module, (example, kwargs)) as (example, kwargs):
        with in_mode(module, True), askers(module) as asked:
            training, notes = _of_every_call(module, example, kwargs)
        notes += _numbers_given(training)
        if has_one_form(module, asked) and _counts_alone(training.graph):
            return {True: training}, notes
        with in_mode(module, False):
            inference, _ = _of_every_call(module, example, kwargs)
    return ({True: training} if _same(training, inference) else {True: training, False: inference}), notes


def _numbers_given(program: Any) -> Iterator[str]:
    from torch.export.graph_signature import ConstantArgument, InputKind

    for spec in program.graph_signature.input_specs:
        given = spec.arg if spec.kind is InputKind.USER_INPUT else None
        if isinstance(given, ConstantArgument) and type(given.value) in (int, float):
            yield (
                f"the argument {given.name!r} is {given.value} in every step, as in the example; a tensor is an "
                "input of a step"
            )


@contextlib.contextmanager
def _with_memory(module: torch.nn.Module, given: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """The arguments, and the module while the body runs, with tensors of the CPU in the place of those on `meta`:
    nothing reads or writes these, so that they take no memory.
    """
    import torch
    from torch.utils import _pytree as pytree

    made: dict[int, torch.Tensor] = {}

    def real(tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor) or not tensor.is_meta:
            return tensor
        if id(tensor) not in made:
            other = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            made[id(tensor)] = torch.nn.Parameter(other, tensor.requires_grad) if is_parameter else other
        return made[id(tensor)]

    holders: list[dict[str, Any]] = [each for part in module.modules() for each in (part._parameters, part._buffers)]
    before = [dict(each) for each in holders]
    try:
        for each in holders:
            each.update({name: real(tensor) for name, tensor in each.items()})
        yield pytree.tree_map(real, given)
    finally:
        for each, tensors in zip(holders, before):
            each.update(tensors)


def _of_every_call(
    module: torch.nn.Module, example: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, list[str]]:
    """The program of a module, which is that of its next call too, whatever attributes the first one changes."""
    with kept(module):
        with watched(module) as changes:
            program = _exported(module, example, kwargs)
        notes = [f"the result {name!r}, a {kind}, is left out" for name, kind in changes.left_out.items()]
        if not changes.after:
            return program, notes
        changes.apply()
        with watched(module) as more:
            again = _exported(module, example, kwargs)
        if not _alike(program, again) or not _constants_alike(program, again):
            raise UnsupportedError(
                f"forward of {type(module).__name__} computes with what it changed itself in the call before: "
                f"{changes}. A graph has no such attributes: keep it as a tensor, self.register_buffer(name, tensor), "
                "or set it outside of forward"
            )
        if more.counted:
            notes.append(
                f"forward changes {more}, which is Python's and not of the graph: whatever depends on it is as in the "
                "first call"
            )
        return program, notes


def _exported(module: torch.nn.Module, example: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    import torch

    name = type(module).__name__
    try:
        with (
            _quiet(),
            checkpoints_marked() as checkpointed,
            functions_traced(checkpointed),
            transforms_traced(),
            functions_kept(),
            seen(module),
            _means_of_all_batches(module),
        ):
            return torch.export.export(module, example, dict(kwargs), strict=False)
    except UnsupportedError:
        raise
    except Exception as error:  # another project's code may raise anything
        raise ModelError(f"PyTorch cannot export {name}: {cause(error)}") from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@contextlib.contextmanager
def _means_of_all_batches(module: torch.nn.Module) -> Iterator[None]:
    """While the body runs, batch normalisation with momentum=None, which asks for its count of batches as a number that
    no export has, computes with the count as a tensor.
    """
    from torch.nn.modules.batchnorm import _BatchNorm

    def patched(norm: Any) -> Any:
        def forward(x: torch.Tensor) -> torch.Tensor:
            if not norm.training:
                return type(norm).forward(norm, x)
            norm._check_input_dim(x)
            axes = [axis for axis in range(x.ndim) if axis != 1]
            with torch.no_grad():
                norm.num_batches_tracked.add_(1)
                moments = (norm.running_mean, x.mean(axes)), (norm.running_var, x.var(axes))
                for kept, new in moments:
                    kept.add_((new - kept) / norm.num_batches_tracked)
            return torch.nn.functional.batch_norm(x, None, None, norm.weight, norm.bias, True, 0.0, norm.eps)

        return forward

    import torch

    norms = [each for each in module.modules() if isinstance(each, _BatchNorm)]
    found = [each for each in norms if each.momentum is None and each.track_running_stats]
    try:
        for norm in found:
            norm.forward = patched(norm)
        yield
    finally:
        for norm in found:
            del norm.forward


def _same(training: Any, inference: Any) -> bool:
    """Whether two programs differ in nothing but what ops are told of the mode, in counters of batches, and in whether
    a tensor is contiguous.
    """
    theirs = (node for node in inference.graph.nodes if node.op == "call_function")
    return not any(_in_any_mode(node) for node in theirs) and _alike(training, inference)


def _constants_alike(one: Any, other: Any) -> bool:
    """Whether two programs have the same numbers beside a module's own, as far as they read them."""
    import torch

    def read(program: Any) -> list[Any]:
        holders = [node for node in program.graph.nodes if node.op == "placeholder"]
        pairs = zip(holders, program.graph_signature.input_specs)
        found = [program.constants.get(spec.target) if node.users else None for node, spec in pairs]
        return [each for each in found if isinstance(each, torch.Tensor)]

    pairs = list(itertools.zip_longest(read(one), read(other)))
    return all(a is not None and b is not None and torch.equal(a, b) for a, b in pairs)


def _alike(training: Any, inference: Any) -> bool:
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
    """Whether nothing reads what counts batches."""
    return _counting(graph) == _counters(graph)


def _counters(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    found: set[torch.fx.Node] = set()
    for node in graph.nodes:
        if node.op == "call_function" and str(node.target).startswith("aten.add_"):
            counted: Any = node.args[0]
            if counted in found or (counted.op == "placeholder" and "num_batches_tracked" in counted.name):
                found.add(node)
    return found


def cause(error: BaseException) -> str:
    """The line that says most, of the exception that began it, with the user's own line where it has one."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = f"{type(error).__name__}: {lines[0] if lines else 'no reason given'}"
    way = f". {_ON_DATA}" if "data-dependent" in said else ""
    return f"{said}{line_of_error(error)}{way}"
