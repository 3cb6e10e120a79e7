"""One forward and one backward pass of PyTorch itself, to hold an imported graph against."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from foreplan.base.errors import ModelError
from foreplan.frontend.torch.attributes import kept, of_tensors
from foreplan.frontend.torch.exporting import cause, uncompiled
from foreplan.frontend.torch.known_tensors import array_of
from foreplan.frontend.torch.modes import in_mode
from foreplan.frontend.torch.reader import named_leaves

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Pass:
    """What one pass of a module gives.

    Attributes:
        outputs: tensors of floats by name, in float64.
        gradients: of the outputs' sum, each times its factors, by the name of the parameter.
    """

    outputs: Mapping[str, np.ndarray]
    gradients: Mapping[str, np.ndarray]


def one_pass(
    module: torch.nn.Module,
    example: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    weights: Sequence[str],
    factors: Mapping[str, np.ndarray],
    training: bool,
    noise: float = 0.0,
) -> Pass:
    """Run a module on an example, and then forward and backward once more, when what one call leaves for the next one
    counts; it stays as it is.

    Args:
        weights: names of the parameters whose gradients are wanted.
        factors: for an output of floats, what its elements are multiplied with before all are added up.
        training: in which mode.
        noise: parameters are multiplied with 1 + noise · n with normal n, to see what rounding does.

    Raises:
        ModelError: PyTorch itself fails.
    """
    import torch
    from torch.utils import _pytree as pytree

    name = type(module).__name__
    known = dict(module.named_parameters())
    held = [known[key] for key in weights]
    try:
        with (
            _as_it_was(module),
            in_mode(module, training),
            warnings.catch_warnings(),
            torch.enable_grad(),
            uncompiled(module),
        ):
            warnings.simplefilter("ignore")
            if noise:
                _add_noise(held, noise)
            for weight in held:
                weight.requires_grad_()
            for _ in range(2):
                args, named = pytree.tree_map_only(torch.Tensor, lambda x: x.detach().clone(), (example, dict(kwargs)))
                made = module(*args, **named)
            leaves = dict(named_leaves(of_tensors(made)[0]))
            outputs = {key: y for key, y in leaves.items() if isinstance(y, torch.Tensor) and y.is_floating_point()}
            parts = [
                y.float() * torch.from_numpy(factors[key]).to(y.device) for key, y in outputs.items() if key in factors
            ]
            total: Any = sum(part.sum() for part in parts)
            found: Any = [None] * len(held)
            if held and parts and total.requires_grad:
                found = torch.autograd.grad(total, held, allow_unused=True)
    except Exception as error:  # another project's code may raise anything
        raise ModelError(f"PyTorch cannot run {name}: {cause(error)}") from error
    gradients = {key: g.to_dense() if g.is_sparse else g for key, g in zip(weights, found) if g is not None}
    return Pass({key: _wide(y) for key, y in outputs.items()}, {key: _wide(g) for key, g in gradients.items()})


def _add_noise(weights: Iterable[torch.Tensor], noise: float) -> None:
    import torch

    with torch.no_grad():
        for weight in weights:
            weight.mul_(1 + noise * torch.randn_like(weight))


def _wide(tensor: torch.Tensor) -> np.ndarray:
    return array_of(tensor).astype(np.float64)


@contextlib.contextmanager
def _as_it_was(module: torch.nn.Module) -> Iterator[None]:
    """Whatever the body does to parameters, buffers, attributes and PyTorch's random state is undone."""
    import torch

    held = [*module.parameters(), *module.buffers()]
    before = [(tensor.detach().clone(), tensor.requires_grad) for tensor in held]
    with torch.random.fork_rng(sorted({t.device.index or 0 for t in held if t.device.type == "cuda"})):
        try:
            with kept(module):
                yield
        finally:
            with torch.no_grad():
                for tensor, (content, learns) in zip(held, before):
                    tensor.requires_grad_(learns)
                    if tensor.device.type != "meta" and not torch.equal(tensor, content):
                        tensor.copy_(content)
