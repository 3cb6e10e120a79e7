"""Gradients within a module, functions mapped over items and the CTC loss, while it is exported: an export keeps none
of them. A gradient becomes an op, and so does the loss; a map becomes one call for each item.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

from foreplan.base.errors import UnsupportedError
from foreplan.frontend.torch.patches import patched

GRADIENT, ARGUMENT, CTC_LOSS = "foreplan::gradient", "foreplan::argument", "foreplan::ctc_loss"
MOST_ITEMS = 64  # of a mapped function, which is traced once for each


@contextlib.contextmanager
def transforms_traced() -> Iterator[None]:
    """While the body runs, `torch.autograd.grad`, `torch.vmap`, `torch.ctc_loss` and the derivatives of `torch.func`
    leave what an export keeps.
    """
    import torch
    from torch._functorch import apis, eager_transforms
    from torch.nn.utils import rnn

    _define()
    patches: list[tuple[Any, str, Any]] = [
        (torch.autograd, "_engine_run_backward", _run_backward),
        (eager_transforms, "grad_and_value_impl", _grad_and_value),
        (eager_transforms, "_vjp_with_argnums", _vjp),
        (eager_transforms, "_jvp_with_argnums", _jvp),
        (apis, "vmap_impl", _mapped),
        (torch, "ctc_loss", _ctc_loss),
        (rnn, "_VF", _Packing()),
    ]
    with contextlib.ExitStack() as stack:
        for module, name, new in patches:
            stack.enter_context(patched(module, name, new))
        yield


def _run_backward(
    outputs: Sequence[Any],
    grad_outputs: Sequence[Any],
    keep_graph: bool,
    create_graph: bool,
    inputs: Sequence[Any] = (),
    allow_unused: bool = False,
    accumulate_grad: bool = False,
    **_: Any,
) -> Any:
    """The gradients of some outputs, each times its cotangent, as one op; zeros where nothing depends on an input."""
    if accumulate_grad:
        raise UnsupportedError(
            "backward() within a module; take torch.autograd.grad(y, x, create_graph=True), which gives the gradient"
        )
    parts = [y if g is None else y * g for y, g in zip(outputs, grad_outputs)]
    total = sum(part.sum() for part in parts)
    found = _ops().gradient(total, list(inputs))
    return tuple(found if create_graph else [g.detach() for g in found])


def _called(func: Callable[..., Any], args: Sequence[Any], chosen: Sequence[int], has_aux: bool, **kwargs: Any) -> Any:
    """(tensors that a function is differentiated by, as all arguments or some; what it gives; more that it gives)."""
    import torch
    from torch.utils import _pytree as pytree

    given = list(args)
    with torch.enable_grad():
        for i in chosen:  # what else the function reads of the same tensors is not differentiated
            given[i] = pytree.tree_map_only(torch.Tensor, _ops().argument, given[i])
        made = func(*given, **kwargs)
    output, aux = made if has_aux else (made, None)
    return tuple(given[i] for i in chosen), output, aux


def _gradients(output: Any, cotangents: Any, xs: Any) -> Any:
    """Of the outputs, each times its cotangent, in the structure of `xs`."""
    import torch
    from torch.utils import _pytree as pytree

    leaves, spec = pytree.tree_flatten(xs)
    pairs = zip(pytree.tree_leaves(output), pytree.tree_leaves(cotangents), strict=True)
    with torch.enable_grad():
        total = sum((y * g).sum() for y, g in pairs)
        return pytree.tree_unflatten(list(_ops().gradient(total, leaves)), spec)


def _grad_and_value(
    func: Callable[..., Any], argnums: int | tuple[int, ...], has_aux: bool, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Any, Any]:
    """What `torch.func.grad_and_value(func)` gives."""
    import torch

    chosen = [argnums] if isinstance(argnums, int) else list(argnums)
    xs, output, aux = _called(func, args, chosen, has_aux, **kwargs)
    found = _gradients(output, torch.ones_like(output), xs[0] if isinstance(argnums, int) else xs)
    return found, ((output, aux) if has_aux else output)


def _vjp(func: Callable[..., Any], *primals: Any, argnums: Any = None, has_aux: bool = False) -> Any:
    """What `torch.func.vjp(func, *primals)` gives, by some of the arguments."""
    chosen = range(len(primals)) if argnums is None else [argnums] if isinstance(argnums, int) else argnums
    xs, output, aux = _called(func, primals, chosen, has_aux)

    def pulled(cotangents: Any, *_: Any, **__: Any) -> Any:
        return _gradients(output, cotangents, xs[0] if isinstance(argnums, int) else xs)

    return (output, pulled, aux) if has_aux else (output, pulled)


def _jvp(
    func: Callable[..., Any],
    primals: Sequence[Any],
    tangents: Sequence[Any],
    argnums: Any = None,
    *,
    strict: bool = False,
    has_aux: bool = False,
) -> Any:
    """What `torch.func.jvp` gives: the gradient of a vector-Jacobian product, by its vector."""
    import torch
    from torch.utils import _pytree as pytree

    chosen = range(len(primals)) if argnums is None else [argnums] if isinstance(argnums, int) else argnums
    xs, output, aux = _called(func, primals, chosen, has_aux)
    vectors = pytree.tree_map_only(torch.Tensor, lambda y: _ops().argument(torch.zeros_like(y)), output)
    pushed = _gradients(_gradients(output, vectors, xs), tangents, vectors)
    return (output, pushed, aux) if has_aux else (output, pushed)


def _mapped(
    func: Callable[..., Any], in_dims: Any, out_dims: Any, randomness: str, chunk_size: Any, *args: Any, **kwargs: Any
) -> Any:
    """What `torch.vmap(func, in_dims, out_dims)` gives."""
    import torch
    from torch._functorch.vmap import _process_batched_inputs
    from torch.utils import _pytree as pytree

    count, axes, leaves, spec = _process_batched_inputs(in_dims, args, func)
    if count > MOST_ITEMS:
        raise UnsupportedError(
            f"vmap over {count} items: each is traced by itself, {MOST_ITEMS} at most; write the axis of items out"
        )
    if randomness == "same":
        raise UnsupportedError('vmap with randomness="same"; draw outside of the mapped function')
    results, made = [], None
    for i in range(count):
        items = [x if axis is None else x.select(axis, i) for x, axis in zip(leaves, axes)]
        found, made = pytree.tree_flatten(func(*pytree.tree_unflatten(items, spec), **kwargs))
        results.append(found)
    places = pytree._broadcast_to_and_flatten(out_dims, made)
    stacked = [
        each[0] if place is None else torch.stack(list(each), place) for each, place in zip(zip(*results), places)
    ]
    return pytree.tree_unflatten(stacked, made)


class _Packing:
    """In the place of what packs sequences, whose results have shapes that depend on their lengths."""

    def __getattr__(self, name: str) -> Any:
        raise UnsupportedError(
            "packed sequences have shapes that depend on their lengths; give the padded tensor to the layer, and take "
            "what stands at lengths - 1, or torch.where(mask, y, 0)"
        )


def _ctc_loss(
    log_probs: Any,
    targets: Any,
    times: Any,
    lengths: Any,
    blank: int = 0,
    reduction: int = 1,
    zero_infinity: bool = False,
) -> Any:
    """What `torch.ctc_loss` gives, whose inner results have shapes that depend on the lengths."""
    import torch

    counts = [x if isinstance(x, torch.Tensor) else torch.tensor(x) for x in (times, lengths)]
    return _ops().ctc_loss(log_probs, targets, *counts, blank, reduction, zero_infinity)


def _ops() -> Any:
    import torch

    return torch.ops.foreplan


@cache
def _define() -> Any:
    """The ops, for as long as the process lives."""
    import torch

    library = torch.library.Library("foreplan", "FRAGMENT")
    library.define(
        "ctc_loss(Tensor log_probs, Tensor targets, Tensor times, Tensor lengths, int blank, int reduction, "
        "bool zero_infinity) -> Tensor"
    )
    library.define("argument(Tensor x) -> Tensor")
    library.define("gradient(Tensor y, Tensor[] xs) -> Tensor[]")
    for key in ("CompositeExplicitAutograd", "Meta"):
        library.impl("ctc_loss", lambda x, *rest: x.new_empty([] if rest[-2] or x.ndim < 3 else [x.shape[1]]), key)
        library.impl("argument", lambda x: x.clone(), key)
        library.impl("gradient", lambda y, xs: [torch.empty_like(x) for x in xs], key)
    return library
