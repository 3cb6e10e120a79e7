"""PyTorch modules: imported, and held against PyTorch itself."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from foreplan.base.arguments import flag, mapping
from foreplan.base.errors import ModelError, UsageError
from foreplan.compiler import api
from foreplan.frontend.torch.exporting import torch_here
from foreplan.frontend.torch.importer import imported, opened
from foreplan.frontend.torch.known_tensors import array_of
from foreplan.frontend.torch.module_tensors import of_module
from foreplan.frontend.torch.reference_pass import Pass, one_pass
from foreplan.frontend.tracing.tensor import Tensor
from foreplan.frontend.tracing.tracer import Tracer
from foreplan.graph import Graph, Node, Value
from foreplan.ops.random import Dropout, Random
from foreplan.options import Options
from foreplan.passes.choose_trained import in_inference

if TYPE_CHECKING:
    import torch

MOST_CHECKED = 50_000_000  # numbers of a module that is held against PyTorch where nothing is said
_ROOTS = 3  # of a type's epsilon, that rounding may make
_NOISE, _NOISE_RUNS, _NOISE_MARGIN = 4, 3, 50  # in epsilons; how often; and how many times what it does is let pass


def from_torch(
    module: torch.nn.Module | torch.export.ExportedProgram | str | os.PathLike[str],
    *example: Any,
    kwargs: Mapping[str, Any] | None = None,
    train: Iterable[str] = (),
    freeze: Iterable[str] = (),
    check: bool | None = None,
) -> Graph:
    """The inference graph of a PyTorch module, with the shapes of an example; or that of an exported program.

    The module itself says what is a parameter, a buffer, tied or frozen (`requires_grad=False`); names are those of its
    `state_dict`, and nodes are named by their modules: `layers.0.attn/matmul`. Dropout, batch normalisation and code
    that asks `self.training` take their training form in training steps. Where the module is in training mode, a part
    of it that is in evaluation mode stays so. A module that is in evaluation mode as a whole counts as if it were in
    training mode.

    A program that `torch.export.export` gave has one form: its dropout and batch normalisation do what they did in the
    mode in which it was exported, in training too, and a note says so. It has neither the backward pass of a
    `torch.autograd.Function`, which a note points at, nor what the module recomputes. A file is refused if reading it
    could run code: see docs/trust.md.

    Args:
        module: a `torch.nn.Module`, whose weights are copied; it stays as it is. Or a `torch.export.ExportedProgram`,
            or the path of a `.pt2` file that `torch.export.save` wrote.
        example: what the module is called with: tensors of the shapes and types of a step.
        kwargs: likewise, by name. A program has its own example, and takes neither.
        train, freeze: weights that are trained, or are not, whatever the module says: see `foreplan.compile`.
        check: whether outputs and gradients are held against PyTorch's own, of a forward and backward pass on the
            example, which comes after another pass: in training mode, or in evaluation mode where the module draws
            random numbers in training. By default for modules of less than 50 million numbers; of another one, a note
            says that it is not. A program is not run.

    Raises:
        UsageError: `torch` is not installed, or the first argument is no module; a program is to be checked, or comes
            with an example.
        ModelError: the file cannot be read, is another one, damaged, of another version of PyTorch, or could run code;
            or the program is not as `torch.export.export` gave it; or PyTorch cannot export the module, with the reason
            that PyTorch gives; or an output or gradient is not PyTorch's, which names the first one and how far it is
            off.
        UnsupportedError: it has an op that foreplan lacks; names it, its module and its line.
    """
    named = dict(mapping("kwargs", {} if kwargs is None else kwargs, "{'mask': mask}"))
    given = opened(module, example, named)
    graph = imported(given, example, named, train, freeze)
    wanted = flag("check", check) if check is not None else None
    if not isinstance(given, torch_here().nn.Module):
        if wanted:
            raise UsageError(
                "a program is not run, so that it cannot be checked: leave check=True out, or give the module"
            )
    elif of_module(given).on_meta:
        if wanted:
            raise UsageError("a module on the device meta has no numbers to check: leave check=True out")
    elif wanted or (wanted is None and of_module(given).count < MOST_CHECKED):
        check_beside_torch(graph, given, example, named)
    elif wanted is None:
        note = f"not held against PyTorch, since it has {of_module(given).count:,} numbers: check=True does so"
        graph = replace(graph, notes=(*graph.notes, note))
    return graph


def check_beside_torch(
    graph: Graph, module: torch.nn.Module, example: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Hold a module's graph against the module on an example.

    Differences that rounding may make are let pass: three square roots of the narrowest type's epsilon, or more where
    PyTorch's own results become others when its weights are changed by little more than that epsilon.

    Raises:
        ModelError: an output, or a weight's gradient, is another one than PyTorch's.
    """
    training = not any(_draws(node) for node in graph.nodes)
    if not training:
        graph = in_inference(graph)
        if any(_draws(node) for node in graph.nodes):  # whatever it gives is another thing each time
            return
    rng = np.random.default_rng(0)
    floats = {name: value.shape for name, value in graph.outputs.items() if value.dtype.is_float}
    factors = {
        name: np.asarray(rng.standard_normal(shape) / max(1, prod(shape)) ** 0.5, np.float32)
        for name, shape in floats.items()
    }
    weights = [value.name for value in graph.parameters]
    run = partial(one_pass, module, example, kwargs, weights, factors, training)
    theirs = run()
    ours = _pass_of(graph, example, kwargs, factors)
    epsilons = [_epsilon(value) for value in graph.values() if value.dtype.is_float]
    eps = max(epsilons, default=0.0)
    errors, allowed = _errors(ours, theirs), dict.fromkeys(_errors(ours, theirs), _ROOTS * eps**0.5)
    if any(errors[name] > allowed[name] for name in errors):
        again = _errors(run(), theirs)
        if changed := [name for name in again if again[name] > allowed[name]]:
            raise ModelError(
                f"{type(module).__name__}: {changed[0]} is another one at each call of PyTorch, though neither "
                "parameters, buffers nor attributes say so; check=False imports what the first call computes"
            )
        for _ in range(_NOISE_RUNS):
            other = _errors(run(noise=_NOISE * eps), theirs)
            allowed = {name: max(least, _NOISE_MARGIN * other[name]) for name, least in allowed.items()}
    for name, error in errors.items():
        if not error <= allowed[name]:
            raise ModelError(
                f"{type(module).__name__}: {name} is off PyTorch's by {error:.2%} of its largest number, on the "
                f"example in {'training' if training else 'evaluation'} mode. That is an error of foreplan's: please "
                "report it with the module. check=False imports the module all the same"
            )


def _draws(node: Node) -> bool:
    return isinstance(node.op, Random) or (isinstance(node.op, Dropout) and node.op.ratio > 0)


def _epsilon(value: Value) -> float:
    """The spacing of numbers at 1 in the value's type."""
    import ml_dtypes

    return float(ml_dtypes.finfo(value.dtype.numpy).eps)


def _pass_of(
    graph: Graph, example: tuple[Any, ...], kwargs: Mapping[str, Any], factors: Mapping[str, np.ndarray]
) -> Pass:
    """What foreplan computes, as `one_pass` has it."""
    from torch import Tensor as Given
    from torch.utils import _pytree as pytree

    names = list(factors)
    tensors = [array_of(x) for x in pytree.tree_leaves((example, kwargs)) if isinstance(x, Given)]
    feeds = {value.name: array for value, array in zip(graph.inputs, tensors, strict=True)}
    if not graph.parameters or not names:
        found = _second(api.compile_with(graph, Options()).bind(), feeds)
        return Pass({name: found.outputs[name].astype(np.float64) for name in names}, {})
    tracer = Tracer(graph.name, graph)
    with tracer.active() as b:
        parts = [(Tensor(tracer, graph.outputs[name]).astype("float32") * c).sum() for name, c in factors.items()]
        total: Any = sum(parts[1:], parts[0])
        measured = b.finish(graph.outputs, graph.updates, loss=total.value)
    found = _second(api.compile_with(measured, Options(None, None, outputs=names)).bind(), feeds)
    gradients = {name: g.astype(np.float64) for name, g in found.gradients.items()}
    return Pass({name: found.outputs[name].astype(np.float64) for name in names}, gradients)


def _second(session: Any, feeds: Mapping[str, np.ndarray]) -> Any:
    """What the second of two steps gives."""
    session.step(feeds)
    return session.step(feeds)


def _errors(ours: Pass, theirs: Pass) -> dict[str, float]:
    """How far each output and gradient is off, as a share of its largest number.

    A gradient that is far smaller than the others is measured by a thousandth of theirs.
    """
    outputs = {
        f"the output {name!r}": (y, theirs.outputs[name]) for name, y in ours.outputs.items() if name in theirs.outputs
    }
    found = {name: _off(*pair, 0.0) for name, pair in outputs.items()}
    largest = max((np.abs(g).max(initial=0) for g in theirs.gradients.values()), default=0.0)
    for name in {**theirs.gradients, **ours.gradients}:
        mine, wanted = ours.gradients.get(name, np.zeros(())), theirs.gradients.get(name, np.zeros(()))
        found[f"the gradient of {name!r}"] = _off(mine, wanted, largest / 1000)
    return found


def _off(found: np.ndarray, wanted: np.ndarray, least: float) -> float:
    """The largest difference; of numbers that are not finite, whether they are the same."""
    finite = np.isfinite(wanted)
    if (np.isfinite(found) != finite).any():
        return float("inf")
    error = np.abs(np.where(finite, found, 0) - np.where(finite, wanted, 0)).max(initial=0)
    return float(error / max(least, np.abs(wanted[finite]).max(initial=0), np.finfo(np.float32).tiny))
