"""What an export passes over in silence: hooks of gradients, `.data`, inference mode, seeds. It sees them here, or they
are refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from foreplan.base.errors import UnsupportedError
from foreplan.frontend.torch.functions import define
from foreplan.frontend.torch.patches import around_forward, patched

if TYPE_CHECKING:
    import torch

HOOKED = "foreplan::hooked"


@contextlib.contextmanager
def export_gaps_closed(module: torch.nn.Module) -> Iterator[None]:
    """While the body exports a module, these are ops of the export, or refused.

    Raises:
        UnsupportedError: the module has hooks that no graph has.
    """
    with _hooks_traced(module), _buffers_written(module), _inference_mode(), _data(), _seeds(), _saved():
        yield


# Hooks.


class _Handle:
    """Of a hook that stays."""

    def remove(self) -> None:
        """PyTorch would run the backward pass without it."""
        raise UnsupportedError("forward removes a hook before the backward pass; leave out both")


@contextlib.contextmanager
def _hooks_traced(module: torch.nn.Module) -> Iterator[None]:
    import torch

    _define()
    of_parameters = _hooks_of(module)
    hooked: list[torch.Tensor] = []

    def register_hook(tensor: torch.Tensor, hook: Callable[[Any], Any]) -> _Handle:
        if not tensor.requires_grad:
            raise RuntimeError("cannot register a hook on a tensor that doesn't require gradient")
        if any(tensor is each for each in hooked):
            raise UnsupportedError("forward registers two hooks of one tensor; let one hook do both")
        hooked.append(tensor)
        _trace(tensor, [hook])
        return _Handle()

    def begin(root: torch.nn.Module, _: Any) -> None:
        for name, hooks in of_parameters.items():
            parameter = root.get_parameter(name)
            hooked.append(parameter)
            _trace(parameter, hooks)

    with around_forward(module, begin), patched(torch.Tensor, "register_hook", register_hook):
        yield


def _hooks_of(module: torch.nn.Module) -> dict[str, list[Callable[[Any], Any]]]:
    """The hooks of parameters, by their names."""
    for path, part in module.named_modules():
        if part._backward_hooks or part._backward_pre_hooks:
            raise UnsupportedError(
                f"{path or 'the module itself'} has a backward hook, which an export loses; remove it "
                "(handle.remove()), or let forward register it on a tensor (y.register_hook)"
            )
    found = {}
    for name, parameter in module.named_parameters():
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise UnsupportedError(
                f"{name!r} has a hook that PyTorch runs when its gradient is there, and a step has its optimizer "
                "instead; remove it (handle.remove())"
            )
        if parameter._backward_hooks:
            found[name] = list(parameter._backward_hooks.values())
    return found


def _trace(tensor: torch.Tensor, hooks: Sequence[Callable[[Any], Any]]) -> None:
    """Put what hooks make of a tensor's gradient into the graph that is being traced."""
    import torch

    ops: Any = torch.ops.foreplan
    stand_in = gradient = ops.cotangent(tensor)
    for hook in hooks:
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    ops.hooked(tensor, stand_in, gradient)


@cache
def _define() -> None:
    import torch
    import torch.fx.node

    library = define()
    library.define("hooked(Tensor x, Tensor cotangent, Tensor gradient) -> ()")
    for key in ("CompositeExplicitAutograd", "Meta"):
        library.impl("hooked", lambda x, cotangent, gradient: None, key)
    torch.fx.node.has_side_effect(torch.ops.foreplan.hooked.default)


# Modes and memory.


@contextlib.contextmanager
def _buffers_written(module: torch.nn.Module) -> Iterator[None]:
    """A buffer that forward sets, as in `self.mean = 0.9 * self.mean + …`, is written with that at its end."""
    import torch

    before: list[tuple[torch.nn.Module, str, Any]] = []

    def begin(*_: Any) -> None:
        before[:] = [(part, name, x) for part in module.modules() for name, x in part._buffers.items()]

    def end(*_: Any) -> None:
        for part, name, buffer in before:
            new: Any = part._buffers.get(name)
            if new is buffer:
                continue
            if buffer is None or new is None or buffer.shape != new.shape:
                raise UnsupportedError(f"forward gives the buffer {name!r} another shape; give it that from the start")
            with torch.no_grad():
                buffer.copy_(new)
            part._buffers[name] = buffer

    with around_forward(module, begin, end):
        yield


@contextlib.contextmanager
def _inference_mode() -> Iterator[None]:
    """An export does not have it; it has `torch.no_grad`, of which the same gradients come."""
    import torch

    running: list[Any] = []

    def enter(mode: Any) -> None:
        running.append(torch.no_grad() if mode.mode else contextlib.nullcontext())
        running[-1].__enter__()

    def leave(_: Any, *error: Any) -> None:
        running.pop().__exit__(*error)

    kind = torch.inference_mode
    with patched(kind, "__enter__", enter), patched(kind, "__exit__", leave):
        yield


@contextlib.contextmanager
def _data() -> Iterator[None]:
    """`x.data` is a tensor that an export does not know; `x.detach()` has the same bytes and as little gradient."""
    import torch

    def assigned(tensor: torch.Tensor, new: torch.Tensor) -> None:
        tensor.detach().copy_(new)

    with patched(torch.Tensor, "data", property(lambda tensor: tensor.detach(), assigned)):
        yield


@contextlib.contextmanager
def _seeds() -> Iterator[None]:
    import torch

    def manual_seed(seed: int) -> None:
        raise UnsupportedError(
            f"forward sets the seed of random numbers (torch.manual_seed({seed})), so that each step draws the same "
            "ones, and a step of foreplan draws new ones; leave it out"
        )

    with patched(torch, "manual_seed", manual_seed), patched(torch.random, "manual_seed", manual_seed):
        yield


@contextlib.contextmanager
def _saved() -> Iterator[None]:
    """What changes the tensors that a backward pass reads; `save_on_cpu` only moves them."""
    from torch.autograd import graph

    before = graph.saved_tensors_hooks.__enter__

    def enter(hooks: Any) -> None:
        if type(hooks) is graph.saved_tensors_hooks:
            raise UnsupportedError("saved_tensors_hooks: what a plan keeps for the backward pass, nothing changes")
        before(hooks)

    with patched(graph.saved_tensors_hooks, "__enter__", enter):
        yield
