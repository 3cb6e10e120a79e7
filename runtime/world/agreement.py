"""What ranks must agree on: named facts that each of them tells, and one error on all where they differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from foreplan.base.errors import ForeplanError, SessionError
from foreplan.base.units import listed
from foreplan.runtime.world.world import World

Facts = Mapping[str, object]
ALIKE = "all ranks must run one command, on the same files"
_MOST = 6  # differences, and ranks, that a message names


def agree(world: World, what: str, facts: Facts, advice: str = ALIKE) -> None:
    """Check that all ranks tell the same. All of them call this at the same time, in one order.

    Args:
        what: the facts are of, such as "options of the run".
        facts: by name, as texts or numbers. A rank that does not tell one that others tell has "nothing"; None goes
            with whatever others tell.
        advice: what to do, for the message.

    Raises:
        SessionError: they differ; with the same message on all ranks, which names each rank and what it has.
    """
    if world.size > 1:
        refuse_differences(what, world.gather(dict(facts), what), advice)


def refuse_differences(what: str, told: Sequence[Facts], advice: str = ALIKE) -> None:
    """Check facts that were told already.

    Args:
        told: by rank; otherwise as `agree`.

    Raises:
        SessionError: they differ.
    """
    names = dict.fromkeys(name for facts in told for name in facts)
    found = [text for name in names if (text := _difference(name, [facts.get(name, "nothing") for facts in told]))]
    if found:
        more = f"; and {len(found) - _MOST} further ones" if len(found) > _MOST else ""
        raise SessionError(f"ranks differ in {what}: {'; '.join(found[:_MOST])}{more}. To go on, {advice}")


@contextmanager
def together(world: World, what: str, advice: str = ALIKE) -> Iterator[dict[str, object]]:
    """A block that all ranks run at the same time: where one fails in it, all fail; where they differ, too.

    Yields:
        Where the block puts the facts that must be the same.

    Raises:
        SessionError: another rank has failed; that one raises its own error. Or they differ, as in `agree`.
    """
    facts: dict[str, object] = {}
    error: ForeplanError | None = None
    try:
        yield facts
    except ForeplanError as raised:
        if world.size == 1:
            raise
        error = raised
    if world.size == 1:
        return
    told = world.gather((None if error is None else str(error), facts), what)
    if error is not None:
        raise error
    failed = [(rank, text) for rank, (text, _) in enumerate(told) if text is not None]
    if failed:
        raise SessionError("; ".join(f"rank {rank} failed: {text}" for rank, text in failed[:1]))
    refuse_differences(what, [own for _, own in told], advice)


def _difference(name: str, values: Sequence[object]) -> str:
    """What each rank has of one fact, for people; empty: all have the same."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        if value is not None:
            ranks.setdefault(_shown(value), []).append(rank)
    if len(ranks) <= 1:
        return ""
    shown = [f"{value} on {_these(own)}" for value, own in list(ranks.items())[:_MOST]]
    shown += [f"other values on {_MOST} ranks or more"] if len(ranks) > _MOST else []
    return f"{name} is {', and '.join(shown)}"


def _shown(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 120 else f"{text[:120]}…"


def _these(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {listed(map(str, ranks), _MOST)}"
