"""What is written in place: the views of a tensor, and what becomes of them and of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from foreplan.base.errors import UnsupportedError
from foreplan.frontend.torch.known_tensors import array_of
from foreplan.frontend.torch.pairs import Pair, as_pair
from foreplan.frontend.tracing.tensor import Tensor, as_tensor
from foreplan.graph import Kind
from foreplan.ops.join import concat
from foreplan.ops.marks import StopGradient, StraightThrough
from foreplan.ops.shape import reshape, slice_axis

if TYPE_CHECKING:
    import torch

Replay = Callable[[Any], Any]  # from the content of a tensor to that of a view of it


@dataclass(frozen=True)
class _View:
    """How a tensor is seen.

    Attributes:
        of: the node of the tensor that is seen.
        replay: computes the view again from another content.
        known: the same for a PyTorch tensor, which has strides.
        shape: of the tensor that is seen.
        stops: whether no gradient comes back of the view, so that what is written into it has none either.
        is_same: whether it is the tensor itself.
    """

    of: torch.fx.Node
    replay: Replay
    known: Replay
    shape: tuple[int, ...]
    stops: bool = False
    is_same: bool = False


class Places:
    """The content of each tensor of a program as the program goes on. Nodes of PyTorch's graph stand for tensors."""

    def __init__(self) -> None:
        self.content: dict[torch.fx.Node, Any] = {}
        self._views: dict[torch.fx.Node, _View] = {}
        self._viewers: dict[torch.fx.Node, list[torch.fx.Node]] = {}
        self._hooked: set[torch.fx.Node] = set()
        self._own: set[torch.fx.Node] = set()  # detached tensors that were written with gradients

    def __getitem__(self, node: torch.fx.Node) -> Any:
        return self.content[node]

    def __setitem__(self, node: torch.fx.Node, content: Any) -> None:
        self.content[node] = content

    def view(
        self,
        node: torch.fx.Node,
        of: torch.fx.Node,
        shape: tuple[int, ...],
        replay: Replay,
        known: Replay,
        stops: bool = False,
        is_same: bool = False,
    ) -> None:
        """One node sees the elements of another one, whose shape is given."""
        self._views[node] = _View(of, replay, known, shape, stops, is_same)
        self._viewers.setdefault(of, []).append(node)

    def alias(self, node: torch.fx.Node, of: torch.fx.Node, shape: tuple[int, ...]) -> None:
        """One node is the same tensor as another one."""
        self.view(node, of, shape, lambda content: content, lambda content: content, is_same=True)

    def tensor_of(self, node: torch.fx.Node) -> torch.fx.Node:
        """The first node that is the same tensor."""
        while (view := self._views.get(node)) is not None and view.is_same:
            node = view.of
        return node

    def hook(self, node: torch.fx.Node, new: Any) -> None:
        """A tensor has the same content with another gradient, which what it is a view of has not."""
        self.content[node] = new
        self._hooked.add(node)

    def write(self, node: torch.fx.Node, new: Any, stops: bool = False) -> None:
        """A tensor has another content: so has what it is a view of, and so have all views of that.

        Args:
            stops: whether no gradient is recorded.
        """
        apart: set[torch.fx.Node] = set()  # which have the gradient of what is written, and what they see has not
        while (view := self._views.get(node)) is not None:
            whole = _put_back(view, self.content[view.of], new)
            if view.stops:
                self._follow(node, without_gradient(new, self.content[node]) if stops else new, apart)
                apart.add(node)
                self._own.add(node)
                stops = True
            new, node = whole, view.of
        self._follow(node, without_gradient(new, self.content[node]) if stops else new, apart)

    def _follow(self, node: torch.fx.Node, new: Any, apart: set[torch.fx.Node]) -> None:
        pending = [(node, new)]
        while pending:
            node, content = pending.pop()
            if node in apart:
                continue
            if content is not new and node in self._hooked:
                raise UnsupportedError("a tensor is written of which a view has a hook; register the hook after that")
            self.content[node] = content
            for viewer in self._viewers.get(node, ()):
                seen = self._views[viewer].replay(content)
                pending.append((viewer, without_gradient(seen, self.content[viewer]) if viewer in self._own else seen))


def without_gradient(new: Any, old: Any) -> Any:
    """What a tensor becomes that is written where no gradient is recorded: it has still the gradient that it had."""
    if isinstance(new, Pair):
        before = as_pair(array_of(old)) if not isinstance(old, Tensor | Pair) else as_pair(old)
        return Pair(without_gradient(new.real, before.real), without_gradient(new.imag, before.imag))
    if not isinstance(new, Tensor) or not new.value.dtype.is_float:
        return new
    had = (
        isinstance(old, Tensor)
        and old.value.kind in (Kind.ACTIVATION, Kind.PARAMETER)
        and old.value.type == new.value.type
    )
    b = new.tracer.at()
    value = b.apply(StraightThrough(), new.value, old.value) if had else b.apply(StopGradient(), new.value)
    return Tensor(new.tracer, value)


def _put_back(view: _View, whole: Any, part: Any) -> Any:
    """What a tensor becomes when one of its views is written."""
    import torch

    if isinstance(whole, Pair) or isinstance(part, Pair):
        pairs = as_pair(array_of(whole) if isinstance(whole, torch.Tensor) else whole), as_pair(part)
        return Pair(*(_put_back(view, *parts) for parts in zip(*((p.real, p.imag) for p in pairs))))
    places = view.known(torch.arange(int(np.prod(view.shape, dtype=np.int64))).reshape(view.shape))
    flat = places.reshape(-1).numpy()
    if isinstance(whole, torch.Tensor):
        whole = array_of(whole)
    part_tensor = as_tensor(part)
    whole_tensor = as_tensor(whole, part_tensor.value.dtype)
    b = whole_tensor.tracer.at()
    if flat.size == np.prod(view.shape) and (flat == np.arange(flat.size)).all():
        return Tensor(whole_tensor.tracer, reshape(b, part_tensor.value, view.shape))
    found = _slab(view.shape, flat)
    if found is not None:
        axis, start, count = found
        shape = list(view.shape)
        shape[axis] = count
        piece = reshape(b, part_tensor.value, shape)
        before = slice_axis(b, whole_tensor.value, axis, 0, start)
        after = slice_axis(b, whole_tensor.value, axis, start + count, view.shape[axis] - start - count)
        joined = [value for value in (before, piece, after) if value.shape[axis]]
        return Tensor(whole_tensor.tracer, concat(b, joined, axis))
    # Any other view: each element comes from the part if that has it, else from the whole.
    return spliced(whole_tensor, part_tensor, flat)


def spliced(whole: Tensor, part: Tensor, places: np.ndarray) -> Any:
    """A tensor with the elements of another one at some places of it, counted in C order."""
    source = np.arange(whole.size)
    source[places] = whole.size + np.arange(places.size)
    both: Any = np.concatenate([whole.reshape(-1), part.reshape(-1)])
    return both[source].reshape(whole.shape)


def _slab(shape: tuple[int, ...], flat: np.ndarray) -> tuple[int, int, int] | None:
    """Axis, start and count if these places, in this order, are neighbouring entries of one axis."""
    if not flat.size:
        return None
    grid = np.arange(int(np.prod(shape, dtype=np.int64))).reshape(shape)
    first, last = np.unravel_index(flat[0], shape), np.unravel_index(flat[-1], shape)
    for axis, (low, high) in enumerate(zip(first, last)):
        slab = grid.take(range(int(low), int(high) + 1), axis)
        if slab.size == flat.size and (slab.reshape(-1) == flat).all():
            return axis, int(low), int(high) - int(low) + 1
    return None
