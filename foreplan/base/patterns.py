"""Patterns: how options name tensors, operations, and whole parts of a model.

A name's scopes are its beginnings that end before a `.` or `/`, outer ones first, and the name itself:
`layer1.0.conv1/conv` is in `layer1`, `layer1.0` and `layer1.0.conv1`. A leading `/`, as in names of ONNX files, is left
out. A pattern is a scope, or what a shell takes for one: `h.*` means `h.0`, `h.1` and so on.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from foreplan.base.errors import UsageError

SEPARATORS = "./"
TO = ".."  # between the two scopes of a range
# What becomes of the activations that these options name.
DONE = {"keep": "kept", "recompute": "recomputed", "to_host": "copied to the host"}


def scopes_of(name: str) -> Iterator[str]:
    """The scopes of a name."""
    own = name.lstrip("/")
    yield from (own[:i] for i, char in enumerate(own) if char in SEPARATORS and i)
    yield own


def all_scopes(names: Iterable[str]) -> tuple[str, ...]:
    """The scopes of an operation that goes by several names: of each name in turn."""
    return tuple(scope for name in dict.fromkeys(names) for scope in scopes_of(name))


def by_scope(scopes: Mapping[int, Iterable[str]], pattern: str) -> dict[str, list[int]]:
    """What a pattern means, by the outermost scope that it matches.

    Args:
        scopes: `all_scopes` of each thing that has a number.
    """
    found: dict[str, list[int]] = {}
    for number, names in scopes.items():
        match = matching_scope(names, pattern)
        if match is not None:
            found.setdefault(match, []).append(number)
    return found


def matching_scope(scopes: Iterable[str], pattern: str) -> str | None:
    """The outermost scope that a pattern means; None: it means none of them."""
    return next((scope for scope in scopes if scope == pattern or fnmatchcase(scope, pattern)), None)


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern means this name, or a part of the model around it."""
    return matching_scope(scopes_of(name), pattern.strip().lstrip("/")) is not None


def most_exact(name: str, patterns: Iterable[str]) -> list[str]:
    """Of the patterns that mean a name, those with the most characters that stand for themselves."""
    found = [pattern for pattern in patterns if matches(name, pattern)]
    most = max(map(exactness, found), default=0)
    return [pattern for pattern in found if exactness(pattern) == most]


def exactness(pattern: str) -> int:
    """How many characters of a pattern stand for themselves."""
    return sum(char not in "*?[" for char in pattern)


def close_names(wanted: str, names: Iterable[str]) -> str:
    """Up to three names or scopes like the one wanted, for an error's text."""
    every = dict.fromkeys(scope for name in names for scope in scopes_of(name))
    close = difflib.get_close_matches(wanted.strip().lstrip("/"), every, 3) or list(every)[:3]
    return ", ".join(map(repr, close))


@dataclass(frozen=True)
class Selection:
    """The weights that a user wants trained, and those that they want frozen, by patterns.

    Where patterns of both kinds mean one name, the more exact one counts: the one with more characters that stand for
    themselves. So `freeze=["*"], train=["head"]` trains the head alone. Tensors that are no weights, such as tables and
    masks, are meant only by a pattern that has the last part of their name: `rotary.cos`, and not `rotary` or `*`.
    """

    train: tuple[str, ...] = ()
    freeze: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.train or self.freeze)

    def of(self, name: str, is_weight: bool = True) -> tuple[bool, str] | None:
        """Whether a weight of that name is trained, and the pattern that says so; None: no pattern means it.

        Raises:
            UsageError: two patterns that are equally exact say both.
        """
        patterns = (p for p in (*self.train, *self.freeze) if is_weight or _last_part(name) == _last_part(p))
        found = most_exact(name, patterns)
        trained, frozen = ([p for p in found if p in some] for some in (self.train, self.freeze))
        if trained and frozen:
            raise UsageError(
                f"train and freeze both mean {name!r}, by {trained[0]!r} and {frozen[0]!r}, which are equally exact: "
                "give one of them more of the name"
            )
        return (bool(trained), found[0]) if found else None

    def chosen(self, stored: Mapping[str, bool], weights: Collection[str]) -> dict[str, tuple[bool, str]]:
        """For each name that a pattern means, whether it is trained, and why, for people.

        Args:
            stored: the names of all that a model stores, and whether training may change it.
            weights: those of weights; the others are tables, masks, and the like.

        Raises:
            UsageError: see `check` and `of`.
        """
        self.check(stored)
        found = {name: self.of(name, name in weights) for name, may_change in stored.items() if may_change}
        return {
            name: (each[0], f"{'train' if each[0] else 'freeze'}={each[1]!r}")
            for name, each in found.items()
            if each is not None
        }

    def check(self, names: Mapping[str, bool]) -> None:
        """Check that each pattern means something.

        Args:
            names: of all that a model stores, and whether training may change it: numbers that are no statistics may.

        Raises:
            UsageError: a pattern means no name, or one of `train` nothing that can be trained.
        """
        for option, patterns in (("train", self.train), ("freeze", self.freeze)):
            for pattern in patterns:
                found = [name for name in names if matches(name, pattern)]
                if not found:
                    raise no_such_weight(option, pattern, names)
                if option == "train" and not any(names[name] for name in found):
                    reason = "it holds integers, is a statistic that the model keeps, or a part of an expression"
                    raise UsageError(f"train: {found[0]!r} cannot be trained: {reason}")


AS_THE_MODEL = Selection()


def no_such_weight(option: str, pattern: str, names: Collection[str]) -> UsageError:
    """The error where a pattern of an option means no weight, of these names."""
    near = f"; there are {close_names(pattern, names)}" if names else ""
    return UsageError(f"{option}: no weight of the model is called {pattern!r}{near}")


@dataclass(frozen=True)
class ActivationChoices:
    """What a user says of activations, by patterns.

    Attributes:
        keep: these are there until their last use, and computed once.
        recompute: these are dropped behind their last use in the forward pass, and computed again for the backward
            pass.
        to_host: these are copied to host memory there, and copied back.
    """

    keep: tuple[str, ...] = ()
    recompute: tuple[str, ...] = ()
    to_host: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.keep or self.recompute or self.to_host)

    def entries(self) -> Iterator[tuple[str, str]]:
        """Each option with each of its entries."""
        for option in DONE:
            yield from ((option, entry) for entry in getattr(self, option))


AS_PLANNED = ActivationChoices()


def _last_part(name: str) -> str:
    return name.replace("/", ".").rpartition(".")[2]
