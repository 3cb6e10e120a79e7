"""A module and its inputs as tensors without bytes, on a processor, or on a card that is not here.

For a card, PyTorch's place for further devices (PrivateUse1) is taken by an imagined one. PyTorch chooses there what it
chooses on cards: optimizers for all parameters at once, dropout by a mask of one byte an element.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_iter, tree_map_only

from foreplan.base.errors import UnsupportedError
from foreplan.eager.watched.attention import attention_on_card
from foreplan.eager.watched.autocast import autocast_on
from foreplan.eager.watched.kernels import ops_of_cards
from foreplan.eager.watched.known_values import KnownValues

CARD = "imagined"
_AMP_TYPES = [torch.float16, torch.bfloat16]


@cache
def imagined_card() -> str:
    """The type of the device that stands for a card; one in a process.

    Raises:
        UnsupportedError: another library has taken the place of further devices in this process.
    """
    from torch.utils import backend_registration as backends

    class Module(backends._DummyBackendModule):
        def get_amp_supported_dtype(self) -> list[torch.dtype]:
            return _AMP_TYPES

        def is_autocast_enabled(self) -> bool:
            return torch.is_autocast_enabled(CARD)

    taken = torch._C._get_privateuse1_backend_name()
    if taken != "privateuseone":
        raise UnsupportedError(
            f"this process has the device {taken!r}, in the place that a card without bytes needs: "
            "count this step in a process that does not import it, or with device='cpu'"
        )
    backends._setup_privateuseone_for_python_backend(CARD, backend_module=Module())
    autocast_on(CARD)
    attention_on_card()
    ops_of_cards()
    return CARD


class _Mode(FakeTensorMode):
    """Numbers in the code become tensors without bytes before they go to a card, which is not there."""

    avoid_device_init = True


class FakeTensors:
    """Makes tensors without bytes of a user's tensors.

    Attributes:
        mode: in which they live.
        device: where they lie.
        known: values of those that are no parameters.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self.mode = _Mode(allow_non_fake_inputs=True)
        self.known = KnownValues(self.mode)
        self._storages: dict[int, torch.Tensor] = {}
        self._made: dict[int, torch.Tensor] = {}
        self._held: list[torch.Tensor] = []

    def tensor(self, real: torch.Tensor) -> torch.Tensor:
        """One of the same shape and strides; a parameter stays one. What shares a storage shares one again."""
        trained = real.requires_grad
        with self.mode, torch.no_grad():
            fake = self._laid(real.detach())
        if isinstance(real, torch.nn.Parameter):
            found = torch.nn.Parameter(fake, requires_grad=trained)
            for name, value in vars(real).items():
                setattr(found, name, value)
            return found
        if not trained:
            self.known.keep(fake, real)
        return fake.requires_grad_(trained)

    def _laid(self, real: torch.Tensor) -> torch.Tensor:
        storage = real.untyped_storage()
        count = storage.nbytes() // real.itemsize
        if storage.nbytes() == real.numel() * real.itemsize and storage._cdata not in self._storages:
            fake = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=self.device)
            self._storages[storage._cdata] = fake
            self._held.append(real)  # so that no other storage is made in its place
            return fake
        base = self._storages.get(storage._cdata)
        if base is None:
            base = self._storages[storage._cdata] = torch.empty(count, dtype=real.dtype, device=self.device)
            self._held.append(real)
        view = base if base.dtype == real.dtype else base.view(real.dtype)
        return view.as_strided(real.shape, real.stride(), real.storage_offset())

    @contextmanager
    def module(self, module: torch.nn.Module) -> Iterator[None]:
        """While all tensors of a module are ones without bytes. Functions that refer to its parts see the same. What it
        had is put back at the end.
        """
        parts = list(dict.fromkeys(module.modules()))
        before = [dict(vars(part)) for part in parts]
        try:
            for part in parts:
                for name, value in vars(part).items():
                    if "_hooks" in name:
                        vars(part)[name] = copy.copy(value)
                    elif name != "_modules" and any(isinstance(each, torch.Tensor) for each in tree_iter(value)):
                        vars(part)[name] = tree_map_only(torch.Tensor, self.once, value)
            yield
        finally:
            for part, attributes in zip(parts, before):
                vars(part).clear()
                vars(part).update(attributes)

    def once(self, real: torch.Tensor) -> torch.Tensor:
        """The one of a tensor that may be met again."""
        if id(real) not in self._made:
            self._made[id(real)] = self.tensor(real)
            self._held.append(real)
        return self._made[id(real)]

    def inputs(self, given: Any) -> Any:
        """The same nest of inputs, all tensors without bytes."""
        return tree_map_only(torch.Tensor, self.once, given)

    def done(self) -> None:
        """All is made: nothing is held any more."""
        self._storages.clear()
        self._made.clear()
        self._held.clear()


@contextmanager
def told_real() -> Iterator[None]:
    """While transformers is told that these tensors are no tracer's: it looks for such, and keeps a mask for them that
    hides nothing, which real steps leave out.
    """
    asks = sys.modules.get("transformers.utils.import_utils")
    fake = getattr(asks, "is_fake_tensor", None)
    if fake is None:
        yield
        return
    asks.is_fake_tensor = lambda x: False  # type: ignore[union-attr]
    try:
        yield
    finally:
        asks.is_fake_tensor = fake  # type: ignore[union-attr]
