"""`scan`: a loop of a known number of steps, which carries something from each step to the next."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from foreplan.base.arguments import flag, shown, whole
from foreplan.base.errors import UsageError
from foreplan.frontend.tracing.tensor import Tensor, as_tensor
from foreplan.frontend.tracing.tracer import current, fail
from foreplan.graph import Value
from foreplan.ops.cell import Cell, looped, placeholders
from foreplan.ops.norm.batch import BatchNorm
from foreplan.ops.unstack import MOST_STEPS


def scan(
    function: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any = None,
    length: int | None = None,
    reverse: bool = False,
) -> tuple[Any, Any]:
    """Run `carry, y = function(carry, x)` for x = xs[0], xs[1], …, as `jax.lax.scan` does.

        def cell(h, x):
            h = np.tanh(nn.linear(h, 64, name="state") + x)
            return h, h

        last, outputs = fp.scan(cell, np.zeros((8, 64)), nn.linear(steps, 64))  # steps [T, 8, 32]

    The function is traced once. Parameters that it makes are those of all steps, and what depends on neither the carry
    nor x is computed once, before the loop. Dropout draws anew in each step.

    The loop is one node, whose body is planned once, so the time to compile does not grow with the number of steps.
    Backward keeps the carries of all steps and the results of their products, and computes everything else again. Where
    a target has no loops (`cuda`), where a model computes in narrow types, and around dropout, the loop is written out:
    the graph then has the function's nodes once for each step, and backward keeps what each step computed. Compute
    outside what needs no carry, such as products with all of xs: one large product takes less time than small ones.

    Args:
        function: from a carry and a slice to the next carry and an output. Either may be a tensor, None, or tuples,
            lists and dicts of them.
        init: the first carry: tensors or arrays. The next carries have the same structure, shapes and element types.
        xs: tensors or arrays [length, …], or a structure of them; None: every x is None.
        length: the number of steps; needed where `xs` has no tensor.
        reverse: whether the last x comes first. Outputs stay in the order of `xs`.

    Returns:
        The last carry, and the outputs of all steps, stacked along a new first axis.

    Raises:
        TraceError: the function does not return a pair; the carry changes its structure or type; `xs` have different
            lengths; or nothing is being traced.
        UsageError: `function` is no function, or a length is not a whole number, or too large.
    """
    if not callable(function):
        raise UsageError(f"scan takes a function of a carry and a slice, and was given {shown(function)}")
    tracer = current()
    carried = [as_tensor(x).value for x in _leaves(init)]
    scanned = [as_tensor(x).value for x in _leaves(xs)]
    steps = _length(scanned, length)
    places, slices = placeholders(carried, scanned)
    with tracer.at().recorded() as nodes:
        result = function(
            _filled(init, iter(Tensor(tracer, value) for value in places)),
            _filled(xs, iter(Tensor(tracer, value) for value in slices)),
        )
        carry, y = _checked(result, init, places)
        after = [as_tensor(x, place.dtype).value for x, place in zip(_leaves(carry), places)]
        outputs = [as_tensor(x).value for x in _leaves(y)]
    if any(isinstance(node.op, BatchNorm) for node in nodes):
        raise fail("batch_norm within a scan would update its statistics once a step; use layer_norm or group_norm")
    b = tracer.at()
    cell = Cell(nodes, places, slices, after, outputs)
    last, stacked = looped(b, cell, carried, scanned, flag("reverse", reverse), steps)
    return (
        _filled(carry, iter(Tensor(tracer, value) for value in last)),
        _filled(y, iter(Tensor(tracer, value) for value in stacked)),
    )


def _leaves(tree: Any) -> list[Any]:
    """The tensors of a structure, in order."""
    if tree is None:
        return []
    if isinstance(tree, Mapping):
        return [leaf for part in tree.values() for leaf in _leaves(part)]
    if isinstance(tree, tuple | list):
        return [leaf for part in tree for leaf in _leaves(part)]
    return [tree]


def _filled(tree: Any, leaves: Iterator[Any]) -> Any:
    """The structure with other tensors."""
    if tree is None:
        return None
    if isinstance(tree, Mapping):
        return {key: _filled(part, leaves) for key, part in tree.items()}
    if isinstance(tree, tuple | list):
        parts = [_filled(part, leaves) for part in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    return next(leaves)


def _shape_of(tree: Any) -> Any:
    """The structure without its tensors, to compare."""
    return _filled(tree, iter(lambda: 0, 1))


def _length(scanned: Sequence[Value], length: int | None) -> int:
    if length is not None:
        length = whole("scan's length", length, 0, MOST_STEPS)
    found = {x.shape[0] if x.shape else None for x in scanned} | ({length} if length is not None else set())
    if not found:
        raise fail("scan needs xs or a length: how often shall the function run?")
    (steps, *others) = found
    if others or steps is None:
        given = ", ".join(map(repr, scanned))
        raise fail(f"scan over {given} with length={length}: their first axes must all have the number of steps")
    return whole("scan's number of steps", steps, 0, MOST_STEPS)


def _checked(result: Any, init: Any, places: Sequence[Value]) -> tuple[Any, Any]:
    """What the function returned, if its carry has the structure and the types of the one before."""
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise fail(f"the function of a scan returns a pair (carry, output), and returned {shown(result)}")
    carry, y = result
    if _shape_of(carry) != _shape_of(init):
        raise fail(f"the carry of a scan changes its structure from {_shape_of(init)} to {_shape_of(carry)}")
    for i, (before, after) in enumerate(zip(places, _leaves(carry))):
        type = as_tensor(after, before.dtype).value.type
        if type != before.type:
            raise fail(
                f"part {i} of a scan's carry changes from {before.type} to {type}; it must stay the same: begin with "
                "that shape and element type, or convert it at the end of the function with astype"
            )
    return carry, y
