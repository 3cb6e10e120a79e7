"""`torch.utils.checkpoint` in a module: what it recomputes, as segments of the graph."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from foreplan.frontend.torch.patches import patched
from foreplan.graph import Node

if TYPE_CHECKING:
    import torch

_KEY = "foreplan_checkpoint"


@contextlib.contextmanager
def checkpoints_marked() -> Iterator[Callable[..., Any]]:
    """While the body runs, the ops of each checkpointed function are marked with a number of their own.

    Yields:
        What calls a function so, for `CheckpointFunction`, an autograd function that calls one.
    """
    import torch.fx.traceback
    import torch.utils.checkpoint as checkpointing

    count = itertools.count()

    @contextlib.contextmanager
    def marked() -> Iterator[None]:
        meta = torch.fx.traceback.get_current_meta()  # nodes get a copy; later versions say `annotate` for this
        before = meta.get("custom")
        meta["custom"] = {**(before or {}), _KEY: next(count)}
        try:
            yield
        finally:
            meta.pop("custom") if before is None else meta.update(custom=before)

    def beside(function: Any, *_: Any, **__: Any) -> Iterator[None]:
        """In the place of the generator that `checkpoint` runs to its `yield` before a function, and on after it."""
        with marked():
            yield

    def called(function: Callable[..., Any], _: Any, *args: Any) -> Any:
        if any(isinstance(x, torch.Tensor) and x.requires_grad for x in args):
            with marked():
                return function(*args)
        with torch.no_grad():  # as PyTorch has it: where no argument has a gradient, nothing within gets one
            return function(*args)

    generator = "_checkpoint_without_reentrant_generator"
    with patched(checkpointing, generator, beside), torch.fx.traceback.preserve_node_meta():
        yield called


def mark_of(node: torch.fx.Node) -> int | None:
    """The number of the checkpointed call that a node belongs to."""
    found: int | None = (node.meta.get("custom") or {}).get(_KEY)
    return found


def segments_of(marked: Sequence[Sequence[Node]], nodes: Sequence[Node]) -> tuple[str, ...]:
    """Checkpointed calls as `foreplan.compile(checkpoint=…)` names segments: a module, or a range of modules.

    Args:
        marked: the nodes of each call, in order; one may be there twice.
        nodes: all of the graph.
    """
    within = (node.name[: at.start()] for node in nodes for at in re.finditer("[./]", node.name))
    counts = Counter(within) if marked else {}
    found = (_segment([*dict.fromkeys(node.name for node in each)], counts) for each in marked if each)
    return tuple(dict.fromkeys(found))


def _segment(names: Sequence[str], counts: Mapping[str, int]) -> str:
    """The segment of nodes, given how many nodes each module has."""
    scopes = [name.rpartition("/")[0].split(".") for name in names]
    common = [parts[0] for parts in itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*scopes))]
    for length in range(1, len(common) + 1):  # the outermost module that has nothing else
        start = ".".join(common[:length])
        if counts.get(start) == len(names):
            return start
    modules = [scope for name in names if (scope := name.rpartition("/")[0])] or names
    return f"{modules[0]}..{modules[-1]}"
