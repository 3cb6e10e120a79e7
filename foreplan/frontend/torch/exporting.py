"""PyTorch's own export of a module: its graph before any decomposition, in training mode and in evaluation mode."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from foreplan.base.errors import ModelError, UnsupportedError, UsageError
from foreplan.frontend.torch.attributes import kept, watched
from foreplan.frontend.torch.checkpoints import checkpoints_marked
from foreplan.frontend.torch.export_gaps import export_gaps_closed
from foreplan.frontend.torch.frames import functions_kept, line_of_error
from foreplan.frontend.torch.functions import functions_traced
from foreplan.frontend.torch.modes import (
    alike,
    askers,
    constants_alike,
    has_one_form,
    in_mode,
    is_of_weights,
    same_but_mode,
)
from foreplan.frontend.torch.skipped_checks import without_number_checks
from foreplan.frontend.torch.transforms import transforms_traced

if TYPE_CHECKING:
    import torch

_LEAST, _NEWEST = (2, 9), (2, 13)  # of PyTorch: with these its export, and how it marks what it gives, was tested
_ON_DATA = "What depends on numbers is written with torch.where or torch.cond; what does not, with Python's own numbers"


def torch_here() -> Any:
    """The module `torch`.

    Raises:
        UsageError: it is not installed, or an older one than 2.9.
    """
    try:
        import torch
    except ImportError:
        raise UsageError("from_torch needs PyTorch, which is not installed: pip install torch") from None
    if _version(torch) < _LEAST:
        raise UsageError(f"from_torch needs PyTorch 2.9 or later, and this is {torch.__version__}")
    return torch


def _version(torch: Any) -> tuple[int, ...]:
    return tuple(int(part) for part in torch.__version__.split(".")[:2])


def untested() -> str:
    """What to say of a PyTorch that is newer than those that were tested; empty: it is none."""
    torch = torch_here()
    if _version(torch) <= _NEWEST:
        return ""
    least, newest = (".".join(map(str, each)) for each in (_LEAST, _NEWEST))
    return f"PyTorch {torch.__version__} is newer than those that were tested, {least} to {newest}"


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
        notes += (*_numbers_given(training), *filter(None, [untested()]))
        if has_one_form(module, asked, training):
            return {True: training}, notes
        with in_mode(module, False):
            inference, more = _of_every_call(module, example, kwargs)
        notes += [note for note in more if note not in notes]
    return ({True: training} if same_but_mode(training, inference) else {True: training, False: inference}), notes


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
        if alike(program, again) and constants_alike(program, again):
            if more.counted:
                notes.append(
                    f"forward changes {more}, which is Python's and not of the graph: whatever depends on it is as in "
                    "the first call"
                )
            return program, notes
    with kept(module), watched(module, giving_kept=True):
        is_cache = not (more.after or changes.counted) and is_of_weights(_exported(module, example, kwargs), module)
    if not is_cache:
        raise UnsupportedError(
            f"forward of {type(module).__name__} computes with what it changed itself in the call before: "
            f"{changes}. A graph has no such attributes: keep it as a tensor, self.register_buffer(name, tensor), "
            "or set it outside of forward"
        )
    notes.append(f"{changes}: forward keeps what it computes of weights; here each step computes it anew")
    return program, notes


def _exported(module: torch.nn.Module, example: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    import torch

    name = type(module).__name__
    try:
        with (
            _quiet(),
            uncompiled(module),
            checkpoints_marked() as checkpointed,
            functions_traced(checkpointed),
            transforms_traced(),
            functions_kept(),
            export_gaps_closed(module),
            without_number_checks(),
            _means_of_all_batches(module),
        ):
            return torch.export.export(module, example, dict(kwargs), strict=False)
    except UnsupportedError as error:
        raise UnsupportedError(f"{error}{line_of_error(error)}") from error
    except Exception as error:  # another project's code may raise anything
        if "_C.Generator" in str(error):
            raise UnsupportedError(f"{name} draws by a torch.Generator; leave it out: a step draws by itself") from None
        more = f". {new}" if (new := untested()) else ""
        raise ModelError(f"PyTorch cannot export {name}: {cause(error)}{more}") from error


def uncompiled(module: torch.nn.Module) -> contextlib.AbstractContextManager[None]:
    """While the body runs, parts that `torch.compile` made are what they were made of. Elsewhere `torch.cond` asks it
    what branches read.
    """
    import torch
    from torch._dynamo import OptimizedModule

    compiled = any(isinstance(part, OptimizedModule) for part in module.modules())
    return torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext()


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


def cause(error: BaseException) -> str:
    """The line that says most, of the exception that began it, with the user's own line where it has one."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = f"{type(error).__name__}: {lines[0] if lines else 'no reason given'}"
    way = f". {_ON_DATA}" if "data-dependent" in said else ""
    return f"{said}{line_of_error(error)}{way}"
