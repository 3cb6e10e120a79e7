"""What a pass is: graph → graph, with its options, and what it asks of a graph and gives."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar, Literal

from foreplan.graph import Graph

# Properties of graphs; `properties.py` says what each means, and checks it.
Property = Literal[
    "forward",
    "loss",
    "training form",
    "backward",
    "live",
    "no loops",
    "no marks",
    "no inner gradients",
    "floating-point weights",
    "wide weights",
    "plain ops",
    "kernels",
]
Properties = tuple[Property, ...]
KNOWN: dict[str, type[Pass]] = {}  # by name


@dataclass(frozen=True)
class Pass:
    """A pass. Its fields are its options, and its docstring says what it does:

        @dataclass(frozen=True)
        class DropMarks(Pass, requires=("forward",), ensures=("forward", "no marks"), optional=True):

    A pass that has nothing to do gives back the very graph that it was given.

    Attributes:
        name: for people and for `--without`: that of the class, as functions are named.
        requires: properties of a graph that it takes.
        ensures: properties of the graph that it gives.
        optional: whether a step is right without it.
    """

    name: ClassVar[str] = ""
    requires: ClassVar[Properties] = ()
    ensures: ClassVar[Properties] = ()
    optional: ClassVar[bool] = False

    def __init_subclass__(cls, requires: Properties = (), ensures: Properties = (), optional: bool = False) -> None:
        cls.requires, cls.ensures, cls.optional = requires, ensures, optional
        cls.name = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()
        KNOWN[cls.name] = cls

    def __call__(self, graph: Graph) -> Graph:
        """The graph after the pass.

        Raises:
            ForeplanError: the graph cannot be had so; says where and why.
        """
        return self._run(graph)

    def _run(self, graph: Graph) -> Graph:
        raise NotImplementedError
