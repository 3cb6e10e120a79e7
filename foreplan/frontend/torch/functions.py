"""`torch.autograd.Function`s while a module is exported: an export keeps what their forward gives, and not that their
backward is Python code. That is traced here too, from a stand-in of the cotangent, and both are tied by an op.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

from foreplan.base.errors import UnsupportedError
from foreplan.frontend.torch.patches import patched

COTANGENT, TIED = "foreplan::cotangent", "foreplan::with_gradient"


@contextlib.contextmanager
def functions_traced(checkpointed: Callable[..., Any]) -> Iterator[None]:
    """While the body runs, calls of autograd functions become ops that an export keeps.

    Args:
        checkpointed: what takes the arguments of `CheckpointFunction`.
    """
    import torch
    from torch.utils.checkpoint import CheckpointFunction

    define()
    function: Any = torch.autograd.Function
    before = function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls.__name__.startswith("GeneratedBackwardFor_"):  # of an op of a library, which stays whole in the graph
            return before.__get__(None, cls)(*args, **kwargs)
        if cls is CheckpointFunction:
            return checkpointed(*args)
        return _traced(cls, args, kwargs)

    with patched(function, "apply", classmethod(apply)):
        yield


class _Context:
    """What a function's forward leaves for its backward."""

    def __init__(self, name: str, args: Sequence[Any]) -> None:
        self._name = name
        self.needs_input_grad = tuple(getattr(x, "is_floating_point", bool)() for x in args)
        self.saved_tensors: tuple[Any, ...] = ()
        self.without_gradient: tuple[Any, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def save_for_forward(self, *tensors: Any) -> None:
        """Of forward mode, which is not used."""

    def set_materialize_grads(self, value: bool) -> None:
        """Cotangents are always tensors here: what backward does with None, it need not do."""

    def mark_non_differentiable(self, *tensors: Any) -> None:
        self.without_gradient = tensors

    def mark_dirty(self, *tensors: Any) -> None:
        raise UnsupportedError(
            f"{self._name}, a torch.autograd.Function, writes its arguments; let it return new tensors"
        )


def _traced(cls: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What a function gives, with its gradient beside it in the graph that is being traced."""
    import torch

    name = cls.__qualname__
    context = _Context(name, args)
    if cls.setup_context is torch.autograd.Function.setup_context:
        made = cls.forward(context, *args, **kwargs)
    else:
        made = cls.forward(*args, **kwargs)
        cls.setup_context(context, args, made)
    results = list(made) if isinstance(made, tuple) else [made]
    skipped = {id(each) for each in context.without_gradient}
    flows = [isinstance(y, torch.Tensor) and y.is_floating_point() and id(y) not in skipped for y in results]
    tensors = [x for x in args if isinstance(x, torch.Tensor)]
    if not any(flows) or not tensors:
        return made
    ops: Any = torch.ops.foreplan
    ys = [y for y, flows_back in zip(results, flows) if flows_back]
    stand_ins = [ops.cotangent(y) for y in ys]
    each = iter(stand_ins)
    backward = getattr(cls, "backward" if cls.vjp is torch.autograd.Function.vjp else "vjp")
    # `once_differentiable` wraps it to refuse second derivatives, which is not asked here.
    backward = getattr(backward, "__wrapped__", backward)
    found = backward(context, *(next(each) if flows_back else None for flows_back in flows))
    gradients = list(found) if isinstance(found, tuple | list) else [found]
    of_tensors = [g for x, g in zip(args, gradients) if isinstance(x, torch.Tensor)]
    if len(gradients) < len(args):
        raise UnsupportedError(f"{name}.backward gives {len(gradients)} gradients for {len(args)} arguments")
    tied = iter(ops.with_gradient(ys, tensors, stand_ins, of_tensors))
    whole = [next(tied) if flows_back else y for y, flows_back in zip(results, flows)]
    return tuple(whole) if isinstance(made, tuple) else whole[0]


@cache
def define() -> Any:
    """The library of foreplan's own ops, with the two, for as long as the process lives."""
    import torch

    library = torch.library.Library("foreplan", "FRAGMENT")
    library.define("cotangent(Tensor y) -> Tensor")
    library.define("with_gradient(Tensor[] ys, Tensor[] xs, Tensor[] cotangents, Tensor?[] gradients) -> Tensor[]")
    for key in ("CompositeExplicitAutograd", "Meta"):
        library.impl("cotangent", lambda y: torch.ones_like(y), key)
        library.impl("with_gradient", lambda ys, xs, cotangents, gradients: [y.clone() for y in ys], key)
    return library
