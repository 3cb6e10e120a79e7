"""Values of tensors that have no bytes, where they depend on nothing but what the user gave: code may ask for them.

A model asks whether a mask hides anything, or for the largest index. Such tensors are small. Beside each there is a
real one, with which every op on known tensors runs too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten
from torch.utils.weak import WeakIdKeyDictionary

_LARGEST = 1 << 22  # elements: larger tensors are not known
_CPU = torch.device("cpu")
_SCALAR = torch.ops.aten._local_scalar_dense.default
_INDEX = torch.ops.aten.index.Tensor


class KnownValues:
    """Real tensors beside those without bytes.

    Attributes:
        mode: makes the tensors without bytes.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode
        self._real = WeakIdKeyDictionary()
        self._finite = False

    @contextmanager
    def all_finite(self) -> Iterator[None]:
        """While a `GradScaler` asks whether gradients are finite: the number of those that are not is 0."""
        self._finite = True
        yield
        self._finite = False

    def keep(self, fake: torch.Tensor, real: torch.Tensor) -> None:
        """The value of a tensor is known."""
        if real.numel() <= _LARGEST and not real.is_meta:
            with unset_fake_temporarily():
                self._real[fake] = real.detach().to(_CPU, copy=True)

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of an op, and its value where those of all operands are known."""
        leaves, tree = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        known = all(each in self._real if isinstance(each, FakeTensor) else _small(each) for each in tensors)
        if not known:
            if func is _SCALAR and self._finite:
                return 0.0
            self._forget_what_is_written(func, args, kwargs)
            return func(*self._as_indices(func, args), **kwargs)
        try:
            result = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            return self._made(self._really(func, leaves, tree), tensors[0].device)
        results, _ = tree_flatten(result)
        made = [each for each in results if isinstance(each, FakeTensor)]
        if all(_small(each) for each in made) and (tensors or made):
            real, _ = tree_flatten(self._really(func, leaves, tree))
            for fake, value in zip(results, real):
                if isinstance(fake, FakeTensor) and isinstance(value, torch.Tensor):
                    self._real[fake] = value
        return result

    def _really(self, func: Any, leaves: list[Any], tree: Any) -> Any:
        """The result of an op on the values."""
        found = []
        for leaf in leaves:
            if isinstance(leaf, FakeTensor):
                leaf = self._real[leaf]
            elif isinstance(leaf, torch.device) and leaf.type != "meta":
                leaf = _CPU
            found.append(leaf)
        args, kwargs = tree_unflatten(found, tree)
        with unset_fake_temporarily(), torch.no_grad():
            return func(*args, **kwargs)

    def _made(self, real: Any, device: torch.device) -> Any:
        """A result whose form depends on values."""

        def one(value: torch.Tensor) -> torch.Tensor:
            fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
            self._real[fake] = value
            return fake

        with self.mode:
            return tree_map_only(torch.Tensor, one, real)

    def _as_indices(self, func: Any, args: Any) -> Any:
        """The operands of an op. A mask that selects elements is put as their indices, as PyTorch does itself."""
        if func is not _INDEX:
            return args
        found: list[Any] = []
        for index in args[1]:
            if isinstance(index, FakeTensor) and index.dtype == torch.bool and index in self._real:
                with unset_fake_temporarily():
                    places = self._real[index].nonzero(as_tuple=True)
                found += [self._made(each, index.device) for each in places]
            else:
                found.append(index)
        return args[0], found

    def _forget_what_is_written(self, func: Any, args: Any, kwargs: Any) -> None:
        """A value is not known any more when one that is not known is written into it."""
        if not func._schema.is_mutable:
            return
        names = [each.name for each in func._schema.arguments if each.is_write]
        given = dict(zip((each.name for each in func._schema.arguments), args)) | kwargs
        written, _ = tree_flatten([given.get(name) for name in names])
        lost = {self._real[each].untyped_storage().data_ptr() for each in written if _in(each, self._real)}
        if lost:
            for fake, real in list(self._real.items()):
                if real.untyped_storage().data_ptr() in lost:
                    del self._real[fake]


def _in(value: Any, known: WeakIdKeyDictionary) -> bool:
    return isinstance(value, FakeTensor) and value in known


def _small(tensor: torch.Tensor) -> bool:
    return tensor.numel() <= _LARGEST and tensor.layout is torch.strided
