"""What several tests need alike is made once: steps, and what one process comes to."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import foreplan as fp
from foreplan.compiler.compiled import Compiled
from foreplan.graph import Graph
from foreplan.passes import loss_scale
from foreplan.passes.ranks import Ranks, overlap, setting

Result = TypeVar("Result")

_made: dict[Hashable, tuple[Any, Any]] = {}


def once(what: Callable[..., Result], graph: Graph, *words: Any, **options: Any) -> Result:
    """What a function gives for a graph and options, which is not changed by anybody; made anew where tests have
    changed what plans depend on.
    """
    settings = setting.LEAST, overlap.SOON, loss_scale.FIRST, Ranks.bucket
    key = what, graph.as_text(), settings, repr(words), repr(sorted(options.items()))
    if key not in _made:
        _made[key] = what(graph, *words, **options), (words, options)  # which live on, with what their text names
    found: Result = _made[key][0]
    return found


def compiled_once(graph: Graph, *words: Any, **options: Any) -> Compiled:
    """As `foreplan.compile`."""
    return once(fp.compile, graph, *words, **options)
