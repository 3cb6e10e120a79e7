"""The storages that are alive while PyTorch runs: ops are seen one by one, and the bytes of what they make are counted
until nothing refers to them any more.

A mode that looks on changes one thing: PyTorch's engine adds gradients in new tensors then, which it does in place
otherwise (`torch/csrc/autograd/input_buffer.cpp`). Those additions are known by where they happen, and are done in
place here where PyTorch would do so.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from foreplan.eager.storage import Memory, Use
from foreplan.eager.watched.convolutions import workspaces_of
from foreplan.eager.watched.kernels import as_kernels_give
from foreplan.eager.watched.known_values import KnownValues
from foreplan.eager.watched.paths import Paths
from foreplan.eager.workspace import Workspaces

_ADD = torch.ops.aten.add.Tensor
_ADD_IN_PLACE = torch.ops.aten.add_.Tensor
_IS_DENSE = torch.ops.aten.is_non_overlapping_and_dense.default
Counts = tuple[int, int]  # references to a tensor, and to its storage


class StorageTracker(TorchDispatchMode):
    """Counts the storages of one kind of device.

    Attributes:
        memory: what is alive.
        indices: of the block of each storage in it; none, while it is empty.

    Args:
        device: the type of the device whose storages count.
        known: values of tensors; None: all tensors are real.
        paths: which part of the module runs.
        sums_in_place: whether gradients are added in place where PyTorch does so, beside which nothing looks on.
        workspaces: who says what convolutions take; None: nothing, on a processor.
    """

    def __init__(
        self,
        memory: Memory,
        device: str,
        known: KnownValues | None,
        paths: Paths,
        sums_in_place: bool,
        workspaces: Workspaces | None = None,
    ) -> None:
        super().__init__()
        self.workspaces = workspaces
        self.memory, self.device, self.known, self.paths = memory, device, known, paths
        self.alone = _counts_of_one_owner() if sums_in_place else None
        self.indices = weakref.WeakKeyDictionary[torch.UntypedStorage, list[int]]()
        self.delivers = self.pauses = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "prim" or self.pauses:
            return func(*args, **(kwargs or {}))
        if any(hasattr(kind, "_local_tensor") for kind in types):  # it runs ops on a rank's parts, which are seen
            return NotImplemented
        if func is _ADD and self.delivers and self.alone is not None and self.may_overwrite(*args):
            _ADD_IN_PLACE(*args)
            return args[0]
        kwargs = kwargs or {}
        if self.known is None:
            result = func(*args, **kwargs)
        else:
            result = as_kernels_give(func, args, self.known.call(func, args, kwargs))
        self.paths.mark(self.memory)
        name = func.overloadpacket.__name__
        for value in tree_iter((args, kwargs)):
            if isinstance(value, torch.Tensor):
                self.count(value, name)
        results = list(tree_iter(result))
        asked = {} if self.workspaces is None else workspaces_of(self.workspaces, func, args, results, self.memory.node)
        for i, value in enumerate(results):
            if isinstance(value, torch.Tensor):
                self.count(value, name)
            if i in asked:
                self.memory.use = Use.WORKSPACE
                self.memory.give_back(self.memory.take(*asked[i]))
        return result

    def may_overwrite(self, gradient: torch.Tensor, other: torch.Tensor) -> bool:
        """Whether PyTorch's engine, which alone holds a gradient, would add another one to it in place."""
        alone = _counts(gradient) == self.alone
        return alone and gradient.dtype == other.dtype and bool(_IS_DENSE(gradient))

    def count(self, tensor: torch.Tensor, name: str) -> None:
        """Count the storage of a tensor, unless it is counted already."""
        tensor = local(tensor)
        if tensor.device.type != self.device or tensor.layout is not torch.strided:
            return
        if self.known is not None and not isinstance(tensor, FakeTensor):  # a value, as a number in the code has it
            return
        storage = tensor.untyped_storage()
        if storage not in self.indices:
            held = self.indices[storage] = []
            weakref.finalize(storage, self.drop, held).atexit = False
            self.take(storage, name)

    def take(self, storage: torch.UntypedStorage, name: str) -> None:
        """The bytes of a storage are new."""
        if nbytes := storage.nbytes():
            self.indices[storage].append(self.memory.take(nbytes, name))

    def drop(self, held: list[int]) -> None:
        """The bytes of a storage are free."""
        while held:
            self.memory.give_back(held.pop())

    @contextmanager
    def of_ranks(self) -> Iterator[None]:
        """While storages may change their sizes, as FSDP frees weights and gathers them again. Whole tensors, which a
        tensor in parts makes to know the form of a result, are not there in a usual step.
        """
        from torch.distributed.tensor._sharding_prop import ShardingPropagator

        ask = ShardingPropagator._propagate_tensor_meta_non_cached

        def asked(*args: Any) -> Any:
            self.pauses = True
            try:
                return ask(*args)
            finally:
                self.pauses = False

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            found = torch._C.StorageBase.resize_(storage, size)
            if (held := self.indices.get(storage)) is not None:
                self.drop(held)
                use, self.memory.use = self.memory.use, Use.GATHERED
                self.take(storage, "weight")
                self.memory.use = use
            return found

        torch.UntypedStorage.resize_ = resize
        ShardingPropagator._propagate_tensor_meta_non_cached = asked
        try:
            yield
        finally:
            del torch.UntypedStorage.resize_
            ShardingPropagator._propagate_tensor_meta_non_cached = ask

    def call(self, tensor: torch.Tensor, use: Use, name: str) -> None:
        """Say what the storage of a tensor has become."""
        for index in self.indices.get(local(tensor).untyped_storage(), ()):
            self.memory.call(index, use, name)

    def name(self, tensor: torch.Tensor) -> str:
        """What the storage of a tensor is called."""
        held = self.indices.get(local(tensor).untyped_storage())
        return self.memory.blocks[held[0]].name if held else ""

    @contextmanager
    def backward(self, loss: torch.Tensor) -> Iterator[None]:
        """While gradients flow: between two functions of autograd, its engine adds gradients of the same tensor."""

        def begins(*_: Any) -> None:
            self.delivers = False

        def ends(*_: Any) -> None:
            self.delivers = True

        handles = []
        if self.alone is not None:
            for node in _nodes(loss):
                handles += [node.register_prehook(begins), node.register_hook(ends)]
        yield
        self.delivers = False
        for handle in handles:
            handle.remove()


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this rank has."""
    found: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return found


def _nodes(loss: torch.Tensor) -> Iterator[Any]:
    """The functions of autograd behind a tensor."""
    todo: list[Any] = [loss.grad_fn]
    seen = set(todo)
    while todo:
        node = todo.pop()
        if node is None:
            continue
        yield node
        new = [each for each, _ in node.next_functions if each not in seen]
        seen.update(new)
        todo += new


def _counts(tensor: torch.Tensor) -> Counts:
    """How many refer to a tensor, and to its storage."""
    return tensor._use_count(), torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


class _Count(TorchDispatchMode):
    """Notes the counts of the first operand of additions."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Counts] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _ADD:
            self.found.append(_counts(args[0]))
        return func(*args, **(kwargs or {}))


@cache
def _counts_of_one_owner() -> Counts:
    """The counts of a gradient that the engine alone holds, as a mode sees it. They depend on how Python's objects
    refer to tensors, so one is looked at: the gradients of two products, which nothing else holds, are added.
    """
    x = torch.ones(2, requires_grad=True)
    y = x.exp()
    loss = (y * 2.0).sum() + (y * 3.0).sum()
    with _Count() as mode:
        loss.backward()
    return mode.found[-1]
