"""ATen ops that read and write at places given by integers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from foreplan.base.errors import UnsupportedError
from foreplan.frontend.torch.call import Call
from foreplan.frontend.torch.ops.elementwise import broadcast, numbers
from foreplan.frontend.torch.table import aten
from foreplan.frontend.tracing.elementwise import as_bool, convert, select
from foreplan.frontend.tracing.tensor import Tensor, as_tensor
from foreplan.graph import DType
from foreplan.graph.types import BOOL, INT32, broadcast_shapes
from foreplan.ops.index import ScatterAdd, gather
from foreplan.ops.index_elements import ScatterElementsAdd, gather_elements
from foreplan.ops.scan import cumsum
from foreplan.ops.scatter_reduce import ScatterReduce


def _whole(indices: Sequence[Any]) -> list[Any]:
    """Indices with masks that are known as the places where they hold."""
    found: list[Any] = []
    for each in indices:
        if isinstance(each, np.ndarray) and each.dtype == bool:
            found += list(np.nonzero(each))
        elif isinstance(each, Tensor) and each.value.dtype.category == "bool":
            raise UnsupportedError(
                "an index by a mask gives a shape that depends on data; write torch.where(mask, x, 0), and divide sums "
                "by mask.sum()"
            )
        else:
            found.append(each)
    return found


def _joined(c: Call, x: Tensor, indices: Sequence[Any]) -> tuple[Tensor, Tensor, list[int], tuple[int, ...]]:
    """A tensor with the axes that are indexed as its first one, the place on it of each element, those axes, and the
    shape of the indices.
    """
    at = [i for i, each in enumerate(indices) if each is not None]
    shape = broadcast_shapes(*(tuple(indices[i].shape) for i in at))
    rest = [i for i in range(x.ndim) if i not in at]
    front = x.transpose(*at, *rest) if at != list(range(len(at))) else x
    merged = front.reshape(-1, *front.shape[len(at) :])
    flat: Any = 0
    for i in at:
        extent, each = x.shape[i], indices[i]
        if isinstance(each, np.ndarray):
            places: Any = np.where(each < 0, each + extent, each).astype(np.int64)
        else:
            places = convert(each, "int64")
            places = np.where(places < 0, places + extent, places)
        flat = flat * extent + places
    return merged, broadcast(as_tensor(flat), shape), at, shape


def _order_back(at: Sequence[int], shape: tuple[int, ...], rank: int) -> list[int]:
    """Where the axes of the indices, which stand first, belong: in the place of neighbours, else at the front."""
    after = list(range(len(shape), len(shape) + rank - len(at)))
    lead = at[0] if list(at) == list(range(at[0], at[0] + len(at))) else 0
    return [*after[:lead], *range(len(shape)), *after[lead:]]


@aten("index", "_unsafe_index")
def _index(c: Call, x: Any, indices: Sequence[Any]) -> Any:
    tensor, given = c.tensor(x), _whole(indices)
    at = [i for i, each in enumerate(given) if each is not None]
    if len(at) == 1:
        return c.wrap(gather(c.b, tensor.value, c.value(given[at[0]]), at[0]))
    merged, places, at, shape = _joined(c, tensor, given)
    found = c.wrap(gather(c.b, merged.value, places.value, 0))
    order = _order_back(at, shape, tensor.ndim)
    return found.transpose(*order) if order != list(range(len(order))) else found


@aten("index_put", "_unsafe_index_put", "index_put_")
def _index_put(c: Call, x: Any, indices: Sequence[Any], values: Any, accumulate: bool = False) -> Any:
    tensor, wanted = c.tensor(x), convert(c.tensor(values), c.dtype)
    masks = [each for each in indices if each is not None]
    if len(masks) == 1 and indices[0] is not None and isinstance(masks[0], Tensor) and _is_mask(masks[0]):
        mask = c.tensor(masks[0])
        rest = tensor.shape[mask.ndim :]
        wide = mask.reshape(*mask.shape, *[1] * len(rest))
        if wanted.ndim <= len(rest) or (wanted.ndim == len(rest) + 1 and wanted.shape[0] == 1):
            own = wanted.reshape(*[1] * mask.ndim, *[1] * (len(rest) - wanted.ndim), *wanted.shape[-len(rest) or 1 :])
            own = own if rest else wanted.reshape(())
        else:
            own = _in_turn(c, mask, broadcast(wanted, (wanted.shape[0], *rest)))
        return broadcast(select(wide, tensor + own if accumulate else own, tensor), c.shape)
    given = _whole(indices)
    merged, places, at, shape = _joined(c, tensor, given)
    order = _order_back(at, shape, tensor.ndim)
    rest = merged.shape[1:]
    target = tuple([*shape, *rest][axis] for axis in order)
    lined = broadcast(wanted, target).transpose(*(int(i) for i in np.argsort(order))) if order else wanted
    rows, flat = lined.reshape(-1, *rest), places.reshape(-1)
    added = c.wrap(c.b.apply(ScatterAdd(0, merged.shape), flat.value, rows.value))
    if accumulate:
        new = merged + added
    else:
        new = _replaced(c, merged, flat, rows)
    front = [*at, *(i for i in range(tensor.ndim) if i not in at)]
    opened = new.reshape(*(tensor.shape[i] for i in front))
    return opened.transpose(*(int(i) for i in np.argsort(front)))


def _replaced(c: Call, table: Tensor, places: Tensor, rows: Tensor) -> Any:
    """A table with rows in the place of some of its own; of rows for one place the last counts."""
    order = as_tensor(np.arange(1, places.size + 1, dtype=np.int32))
    zero = as_tensor(np.zeros(table.shape[:1], np.int32))
    last = c.wrap(c.b.apply(ScatterReduce(0, zero.shape, "max"), places.value, order.value, zero.value))
    hit = last > 0
    source: Any = np.where(hit, last - 1, 0)
    taken = c.wrap(gather(c.b, rows.value, source.value, 0))
    mask = hit.reshape(-1, *[1] * (table.ndim - 1))
    return select(mask, taken, table)


def _in_turn(c: Call, mask: Tensor, rows: Tensor) -> Tensor:
    """Rows where a mask holds, the first at the first such place; what stands elsewhere means nothing."""
    before = c.wrap(cumsum(c.b, convert(mask.reshape(-1), "int64").value, 0)) - 1
    source = np.clip(before, 0, rows.shape[0] - 1)
    return c.wrap(gather(c.b, rows.value, as_tensor(source).value, 0)).reshape(*mask.shape, *rows.shape[1:])


@aten("masked_scatter")
def _masked_scatter(c: Call, x: Any, mask: Any, source: Any) -> Any:
    tensor, rows = broadcast(c.tensor(x), c.shape), convert(c.tensor(source), c.dtype).reshape(-1)
    wide = broadcast(c.tensor(mask), c.shape)
    return select(wide, _in_turn(c, wide, rows), tensor)


def _is_mask(x: Any) -> bool:
    return np.dtype(x.dtype) == bool


@aten("index_select", along=True)
def _index_select(c: Call, x: Any, dim: int, places: Any) -> Tensor:
    tensor = c.tensor(x)
    return c.wrap(gather(c.b, tensor.value, c.value(places), dim % tensor.ndim))


@aten("take")
def _take(c: Call, x: Any, places: Any) -> Tensor:
    return c.wrap(gather(c.b, c.tensor(x).reshape(-1).value, c.value(places), 0))


@aten("gather", "take_along_dim")
def _gather(c: Call, x: Any, *args: Any, sparse_grad: bool = False, **named: Any) -> Tensor:
    tensor = c.tensor(x)
    if c.name == "gather":
        dim, places = args[0], c.tensor(args[1])
    else:
        places, dim = c.tensor(args[0]), args[1] if len(args) > 1 else named.get("dim")
        if dim is None:
            tensor, places, dim = tensor.reshape(-1), places.reshape(-1), 0
        else:
            shape = [max(a, b) for a, b in zip(tensor.shape, places.shape)]
            axis = dim % tensor.ndim
            tensor = broadcast(tensor, tuple(tensor.shape[axis] if i == axis else n for i, n in enumerate(shape)))
            places = broadcast(places, tuple(places.shape[axis] if i == axis else n for i, n in enumerate(shape)))
    if not tensor.ndim:
        return tensor.reshape(places.shape)
    for axis, (n, m) in enumerate(zip(tensor.shape, places.shape)):
        if axis != dim % tensor.ndim and m < n:
            tensor = tensor[(*[slice(None)] * axis, slice(0, m))]
    return c.wrap(gather_elements(c.b, tensor.value, places.value, dim % tensor.ndim))


@aten("scatter_add", along=True)
def _scatter_add(c: Call, x: Any, dim: int, places: Any, source: Any) -> Any:
    tensor = c.tensor(x)
    return tensor + _scattered(c, tensor, dim, c.tensor(places), c.tensor(source))


def _scattered(c: Call, table: Tensor, dim: int, places: Tensor, source: Tensor) -> Tensor:
    """Sums of elements at places of an axis, in the shape of a table."""
    key = tuple(slice(0, n) for n in places.shape)
    part = convert(source[key], table.dtype)
    axis = dim % table.ndim
    small = tuple(n if i == axis else m for i, (n, m) in enumerate(zip(table.shape, places.shape)))
    found = c.wrap(c.b.apply(ScatterElementsAdd(axis, small), places.value, part.value))
    margins = [(0, n - m) for n, m in zip(table.shape, small)]
    return found if small == table.shape else as_tensor(np.pad(found, margins))


@aten("scatter", along=True)
def _scatter(c: Call, x: Any, dim: int, places: Any, source: Any = None, value: Any = None, reduce: Any = None) -> Any:
    tensor, where_ = c.tensor(x), c.tensor(places)
    given = value if source is None else source
    wanted = c.tensor(given, c.dtype) if isinstance(given, bool | int | float) else convert(c.tensor(given), c.dtype)
    wanted = broadcast(wanted, where_.shape) if not wanted.ndim else wanted
    if reduce is not None:
        how = {"add": "sum", "multiply": "prod"}[reduce]
        return _scatter_reduce(replace(c, name="scatter_reduce"), tensor, dim, where_, wanted, how)
    ones = as_tensor(np.ones(where_.shape, np.float32))
    hit = _scattered(c, as_tensor(np.zeros(tensor.shape, np.float32)), dim, where_, ones)
    if not tensor.value.dtype.is_float:
        wide = convert(_scattered(c, tensor, dim, where_, wanted), c.dtype)
    else:
        wide = _scattered(c, tensor, dim, where_, wanted)
    # Where several are written to one place, which one stays is not defined; here it is their mean.
    mean: Any = wide / np.maximum(hit, 1.0) if c.dtype.is_float else wide
    return select(hit > 0.0, convert(mean, c.dtype), tensor)


_IDENTITIES = {"prod": 1.0, "mul": 1.0, "amax": -np.inf, "amin": np.inf, "sum": 0.0, "mean": 0.0}
_WAYS = {"prod": "mul", "amax": "max", "amin": "min"}


@aten("scatter_reduce", "index_reduce", along=True)
def _scatter_reduce(c: Call, x: Any, dim: int, places: Any, source: Any, how: str, *, include_self: bool = True) -> Any:
    tensor, at = c.tensor(x), c.tensor(places)
    if tensor.value.dtype is BOOL:  # as numbers, of which the largest and the smallest are the same
        import torch

        call = replace(c, result=torch.empty(c.shape, dtype=torch.int32, device="meta"))
        sources = (convert(each, INT32) for each in (tensor, c.tensor(source)))
        numbers = _scatter_reduce(call, next(sources), dim, at, next(sources), how, include_self=include_self)
        return as_bool(numbers)
    given: Any = convert(c.tensor(source), c.dtype)
    axis = dim % tensor.ndim
    if c.name == "index_reduce":  # an index for each row: the same for all elements of the row
        at = broadcast(at.reshape(*(-1 if i == axis else 1 for i in range(tensor.ndim))), given.shape)
    else:
        given = given[tuple(slice(0, n) for n in at.shape)]
    # Each element's place in the tensor as one vector.
    flat: Any = 0
    for i, n in enumerate(tensor.shape):
        along = np.arange(at.shape[i]).reshape(*(-1 if j == i else 1 for j in range(tensor.ndim)))
        flat = flat * n + (convert(at, "int64") if i == axis else along)
    flat = broadcast(as_tensor(flat), at.shape).reshape(-1)
    old, new, size = tensor.reshape(-1), given.reshape(-1), (tensor.size,)

    def added(rows: Any) -> Tensor:
        return c.wrap(c.b.apply(ScatterAdd(0, size), flat.value, as_tensor(rows).value))

    count = added(np.ones(flat.shape, np.float32))
    base: Any = old
    if not include_self:
        identity = _IDENTITIES[how]
        identity = identity if c.dtype.is_float or np.isfinite(identity) else _extreme(c.dtype, identity < 0)
        base = select(count > 0.0, as_tensor(np.full(size, identity, c.dtype.numpy), c.dtype), old)
    if how in _WAYS:
        found: Any = c.wrap(c.b.apply(ScatterReduce(0, size, _WAYS[how]), flat.value, new.value, as_tensor(base).value))
    else:
        found = base + added(new)
    if how == "mean":
        many = np.maximum(count + (1.0 if include_self else 0.0), 1.0)
        found = found / convert(many, c.dtype) if c.dtype.is_float else found // convert(many, c.dtype)
    return found.reshape(tensor.shape)


def _extreme(dtype: DType, low: bool) -> int:
    found = np.iinfo(dtype.numpy)
    return int(found.min if low else found.max)


@aten("index_add", along=True)
def _index_add(c: Call, x: Any, dim: int, places: Any, source: Any, alpha: float = 1) -> Tensor:
    tensor = c.tensor(x)
    rows = convert(c.tensor(source), c.dtype)
    added = c.b.apply(ScatterAdd(dim % tensor.ndim, tensor.shape), c.value(places), rows.value)
    return numbers(c, "index_add", lambda x, y: x + y * alpha, tensor, c.wrap(added))


@aten("index_copy", "index_fill", along=True)
def _index_copy(c: Call, x: Any, dim: int, places: Any, source: Any) -> Any:
    tensor: Any = c.tensor(x)
    where_ = c.tensor(places)
    axis = dim % tensor.ndim
    front: Any = np.moveaxis(tensor, axis, 0)
    given: Any = (
        c.tensor(source, c.dtype) if isinstance(source, bool | int | float) else convert(c.tensor(source), c.dtype)
    )
    rows: Any = broadcast(given, (where_.size, *front.shape[1:])) if not given.ndim else np.moveaxis(given, axis, 0)
    return np.moveaxis(_replaced(c, front, where_.reshape(-1), rows), 0, axis)


@aten("select_scatter", "slice_scatter")
def _put(c: Call, x: Any, source: Any, dim: int = 0, *at: Any, **named: Any) -> Any:
    tensor, given = c.tensor(x), convert(c.tensor(source), c.dtype)
    axis = dim % tensor.ndim
    places = np.arange(tensor.shape[axis])
    if c.name == "select_scatter":
        chosen = places[[at[0] if at else named["index"]]]
        given = given.reshape(*tensor.shape[:axis], 1, *tensor.shape[axis + 1 :])
    else:
        chosen = places[slice(*at)]
    source_of = places.copy()
    source_of[chosen] = tensor.shape[axis] + np.arange(len(chosen))
    both: Any = np.concatenate([tensor, given], axis=axis)
    return both[(*[slice(None)] * axis, source_of)]


@aten("one_hot")
def _one_hot(c: Call, x: Any, classes: int = -1) -> Any:
    return convert(c.tensor(x)[..., None] == np.arange(c.shape[-1]), c.dtype)


@aten("bucketize", "searchsorted")
def _bucketize(
    c: Call,
    x: Any,
    edges: Any,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Any = None,
) -> Any:
    given: Any = (c.tensor(x), c.tensor(edges)) if c.name == "bucketize" else (c.tensor(edges), c.tensor(x))
    values, bounds = given
    if sorter is not None:
        order: Any = c.tensor(sorter)
        bounds = as_tensor(np.take_along_axis(bounds, order, -1))
    rows = bounds if bounds.ndim == 1 else bounds[..., None, :]
    below = rows <= values[..., None] if right or side == "right" else rows < values[..., None]
    return convert(below, c.dtype).sum(-1)
