"""What a module does with Python's own objects: attributes, of which an export has what they were at its one call, and
results that are no tensors.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from foreplan.base.errors import UnsupportedError
from foreplan.frontend.torch.patches import around_forward

if TYPE_CHECKING:
    import torch

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_DEEPEST = 6  # containers within containers that are looked at


@dataclass
class Changes:
    """What forward did besides computing tensors.

    Attributes:
        after: what they became, by the part and the name.
        counted: for people, those that count or say something: numbers and texts.
        left_out: results that hold no tensors that a graph could give, by name, and their types.
    """

    after: dict[tuple[torch.nn.Module, str], Any] = field(default_factory=dict)
    counted: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def apply(self) -> None:
        """Let the attributes be what they became; tensors are others of their shapes."""
        for (part, name), content in self.after.items():
            vars(part)[name] = _mapped(content, None, lambda x, _: x.other() if isinstance(x, _Made) else x)

    def __str__(self) -> str:
        names = [name for _, name in self.after]
        return ", ".join(self.counted.values()) or ", ".join(f"self.{name}" for name in names[:3])


@contextlib.contextmanager
def kept(module: torch.nn.Module) -> Iterator[None]:
    """Whatever the body does to attributes, to containers in them and to their tensors is undone."""
    import torch

    undo: list[Callable[[], None]] = []
    for x in _reached(module):
        if isinstance(x, torch.Tensor):
            undo.append(_written_back(x))
        elif isinstance(x, list | deque):
            undo.append(partial(_refill, x, x.extend, list(x)))
        elif isinstance(x, dict | set):
            undo.append(partial(_refill, x, x.update, x.copy()))
        elif _is_record(x):
            undo.append(partial(_refill, vars(x), vars(x).update, dict(vars(x))))
    for part in module.modules():
        undo.append(partial(_put_back, part, _attributes(part)))
        for each in (part._parameters, part._buffers):
            undo.append(partial(_refill, each, each.update, dict(each)))
    try:
        yield
    finally:
        for step in undo:
            step()


def tensors_of(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """The tensors that attributes lead to, and that are neither parameters nor buffers."""
    import torch

    return (x for x in _reached(module) if isinstance(x, torch.Tensor))


def _attributes(part: torch.nn.Module) -> dict[str, Any]:
    """Those of one part that not every module has."""
    return {name: x for name, x in vars(part).items() if name not in _of_every_module()}


@cache
def _of_every_module() -> frozenset[str]:
    import torch

    return frozenset((*vars(torch.nn.Module()), "forward"))


def _reached(module: torch.nn.Module) -> Iterator[Any]:
    """What attributes lead to: tensors, containers, and objects that keep values."""
    import torch

    pending = [(x, 0) for part in module.modules() for x in _attributes(part).values()]
    seen: set[int] = set()
    while pending:
        x, depth = pending.pop()
        if id(x) in seen or depth > _DEEPEST or isinstance(x, (*_PLAIN, torch.nn.Module, torch.nn.Parameter)):
            continue
        seen.add(id(x))
        if isinstance(x, torch.Tensor):
            if x.device.type != "meta":
                yield x
            continue
        if not isinstance(x, list | tuple | deque | dict | set) and not _is_record(x):
            continue
        yield x
        inner = x.values() if isinstance(x, dict) else x if isinstance(x, Iterable) else vars(x).values()
        pending += [(each, depth + 1) for each in inner]


def _refill(container: Any, fill: Callable[[Any], None], content: Any) -> None:
    """Let a container hold what it held. One that does is left alone: others may be reading it."""
    pairs = [(each.items() if isinstance(each, dict) else each) for each in (container, content)]
    if len(container) != len(content) or any(not _is_same(a, b) for a, b in zip(*pairs)):
        container.clear()
        fill(content)


def _is_same(one: Any, other: Any) -> bool:
    """Of two elements, or of two pairs of a name and a content."""
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        return all(a is b for a, b in zip(one, other))
    return one is other


def _written_back(tensor: torch.Tensor) -> Callable[[], None]:
    import torch

    content, version = tensor.detach().clone(), tensor._version

    def back() -> None:
        if tensor._version != version:
            with torch.no_grad():
                tensor.copy_(content)

    return back


def _put_back(part: torch.nn.Module, before: dict[str, Any]) -> None:
    for name in _attributes(part):
        if name not in before:
            del vars(part)[name]
    vars(part).update(before)


@contextlib.contextmanager
def watched(module: torch.nn.Module, *, giving_kept: bool = False) -> Iterator[Changes]:
    """While the body calls a module once, what its forward changes, and gives that is left out.

    Args:
        giving_kept: whether forward gives the tensors that it puts into attributes, and not its results.

    Raises:
        UnsupportedError: forward changes which parameters are trained.
    """

    def vars_of(module: torch.nn.Module) -> list[tuple[str, int]]:
        return [(name, id(p)) for part in module.modules() for name, p in part._parameters.items()]

    parameters: list[tuple[str, int]] = []
    made: list[torch.Tensor] = []
    found, before, trained = Changes(), dict[tuple[Any, str], Any](), dict[str, bool]()

    def now() -> Iterator[tuple[tuple[torch.nn.Module, str], Any]]:
        for part in module.modules():
            if not type(part).__module__.startswith("torch.nn."):  # whose own layers keep what they compute in buffers
                yield from (((part, name), x) for name, x in _attributes(part).items())

    def begin(*_: Any) -> None:
        before.update((key, (x, _frozen(x))) for key, x in now())
        parameters.extend(vars_of(module))
        trained.update((name, p.requires_grad) for name, p in module.named_parameters())

    def end(_module: Any, _args: Any, output: Any) -> Any:
        for name, p in module.named_parameters():
            if trained.get(name, p.requires_grad) != p.requires_grad:
                raise UnsupportedError(
                    f"forward changes requires_grad of {name!r}; set it before the module is imported"
                )
        paths = {part: path for path, part in module.named_modules()}
        for (part, name), x in now():
            was, frozen = before.get((part, name), (None, None))
            if _frozen(x) != frozen:
                found.after[part, name] = _mapped(x, was, _Made.of)
                if giving_kept:
                    _mapped(x, was, lambda tensor, was: tensor if tensor is was else made.append(tensor))
                if isinstance(x, _PLAIN) and x is not None:
                    path = f"{paths[part]}.{name}" if paths[part] else name
                    found.counted[path] = f"self.{path} ({was!r:.20} → {x!r:.20})"
        if vars_of(module) != parameters:
            raise UnsupportedError("forward sets a parameter; change it in place before the module is imported")
        if giving_kept:
            return made
        tensors, found.left_out = of_tensors(output)
        return tensors

    with around_forward(module, begin, end):
        yield found


def of_tensors(output: Any) -> tuple[Any, dict[str, str]]:
    """What forward gives as tensors and containers that PyTorch knows: a dataclass as a dict. What else there is, by
    name, is None; and its types.
    """
    import torch
    from torch.utils import _pytree as pytree

    known = (*_PLAIN, torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, torch.dtype)
    left_out: dict[str, str] = {}

    def given(path: tuple[Any, ...], x: Any) -> Any:
        if isinstance(x, known):
            return x
        if dataclasses.is_dataclass(x) and not isinstance(x, type) and len(path) <= _DEEPEST:
            fields = {each.name: getattr(x, each.name) for each in dataclasses.fields(x)}
            return pytree.tree_map_with_path(lambda inner, y: given((*path, *inner), y), fields)
        if path:
            left_out["".join(map(str, path)).strip("[]'.")] = type(x).__name__
            return None
        return x

    return pytree.tree_map_with_path(given, output), left_out


def _is_record(x: Any) -> bool:
    """Whether an object is one that keeps values: not code, and not of PyTorch."""
    kind = type(x)
    return hasattr(x, "__dict__") and not callable(x) and kind.__module__.partition(".")[0] not in ("torch", "builtins")


def _frozen(x: Any, depth: int = 0) -> Any:
    """What can be compared of a content later; two tensors are the same if they are one object."""
    import torch

    if isinstance(x, _PLAIN):
        return type(x), x
    if isinstance(x, torch.Tensor | torch.nn.Module) or depth > _DEEPEST:
        return id(x)
    if isinstance(x, list | tuple | deque):
        return type(x), *(_frozen(each, depth + 1) for each in x)
    if isinstance(x, dict):
        return type(x), *((key, _frozen(each, depth + 1)) for key, each in x.items())
    if isinstance(x, set | frozenset):
        return type(x), frozenset(x)
    if _is_record(x):
        return id(x), _frozen(dict(vars(x)), depth + 1)
    return id(x)


def _mapped(x: Any, was: Any, leaf: Callable[[Any, Any], Any], depth: int = 0) -> Any:
    """A copy of a content, whose tensors are what a function of them, and of what was there, gives."""
    import torch

    def inner(each: Any) -> Any:
        return _mapped(each, None, leaf, depth + 1)

    if isinstance(x, torch.Tensor | _Made):
        return leaf(x, was)
    if isinstance(x, (*_PLAIN, torch.nn.Module)) or depth > _DEEPEST:
        return x
    if isinstance(x, tuple) and hasattr(x, "_fields"):  # a named one
        return type(x)(*map(inner, x))
    if isinstance(x, list | deque) or type(x) is tuple:
        return type(x)(map(inner, x))
    if type(x) is dict:
        return {key: inner(each) for key, each in x.items()}
    if _is_record(x):
        other = copy.copy(x)
        vars(other).update({key: inner(each) for key, each in vars(x).items()})
        return other
    return x


@dataclass(frozen=True)
class _Made:
    """A tensor that forward put into an attribute; was: the tensor that was there."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    was: torch.Tensor | None

    @staticmethod
    def of(x: torch.Tensor, was: Any) -> Any:
        """In the place of a tensor, if it is not the one that was there."""
        return x if x is was else _Made(tuple(x.shape), x.dtype, was if hasattr(was, "logical_not") else None)

    def other(self) -> torch.Tensor:
        """A tensor of the same kind, of other numbers than were there."""
        import torch

        if self.was is None or self.was.shape != self.shape or self.was.dtype != self.dtype:
            return torch.ones(self.shape, dtype=self.dtype)
        return self.was.logical_not() if self.dtype == torch.bool else self.was.detach() + 1
