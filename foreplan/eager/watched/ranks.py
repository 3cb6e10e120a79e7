"""One rank of several within FSDP2 (`fully_shard`), which PyTorch runs on tensors without bytes: exchanges are
those of a group that sends nothing.

Parts of the module are gathered one by one, and freed when they have run; gradients are summed in float32. With a
precision, gathered weights and products are narrow, and the parts that a rank keeps are float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from foreplan.base.errors import UsageError
from foreplan.base.patterns import close_names


def members_of_lists(module: torch.nn.Module) -> tuple[str, ...]:
    """The parts of a module that most users wrap by themselves, as patterns: the members of its lists of modules.

    Raises:
        UsageError: it has no such list.
    """
    lists = [name for name, part in module.named_modules() if isinstance(part, torch.nn.ModuleList)]
    outer = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    if not outer:
        raise UsageError("--as fsdp2: the module has no list of layers; say what is wrapped: --as fsdp2:shard=a+b")
    return tuple(f"{name}.*" for name in outer)


@contextmanager
def sharded(
    module: torch.nn.Module, ranks: int, parts: Sequence[str], dtype: torch.dtype | None, device: str
) -> Iterator[None]:
    """While a module is wrapped: each named part by itself, and the rest as one.

    Raises:
        UsageError: a name that means nothing, or this process belongs to a group already.
    """
    from torch import distributed
    from torch.distributed import _composable_state as states
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if distributed.is_initialized():
        raise UsageError("ranks: this process belongs to a group already: count the step in a process that does not")
    wrapped = _parts(module, parts)
    classes = {part: type(part) for part in (*wrapped, module)}
    current = torch.accelerator.current_stream
    if device != "cpu":
        _give_streams(device)
        torch.accelerator.current_stream = lambda *args: _Stream()
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        with unset_fake_temporarily():
            mesh = init_device_mesh(device, (ranks,))
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if dtype else None)
        for part in (*wrapped, module):
            fully_shard(part, mesh=mesh, mp_policy=policy)
        yield
    finally:
        torch.accelerator.current_stream = current
        distributed.destroy_process_group()
        for part, kind in classes.items():
            part.__class__ = kind
            states._module_state_mapping.pop(part, None)


def _parts(module: torch.nn.Module, patterns: Sequence[str]) -> list[torch.nn.Module]:
    """The parts with names that patterns such as `layers.*` mean; a star is one name of the path."""
    found: dict[torch.nn.Module, None] = {}
    names = {name: part for name, part in module.named_modules() if name}
    for pattern in patterns:
        depth = pattern.count(".")
        matching = [part for name, part in names.items() if name.count(".") == depth and fnmatchcase(name, pattern)]
        if not matching:
            raise UsageError(f"shard: no part of the module is {pattern!r}; there are {close_names(pattern, names)}")
        found.update(dict.fromkeys(matching))
    return list(found)


class _Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def record(self, *args: Any) -> None: ...
    def wait(self, *args: Any) -> None: ...
    def synchronize(self) -> None: ...


class _Stream:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_stream(self, stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def record_event(self, event: Any = None) -> _Event:
        return _Event()


def _give_streams(device: str) -> None:
    """Streams and events of a device on which nothing runs."""
    library: Any = getattr(torch, device)
    library.Stream, library.Event = _Stream, _Event
    library.current_stream = lambda *args: _Stream()
    library.stream = lambda stream: nullcontext()
