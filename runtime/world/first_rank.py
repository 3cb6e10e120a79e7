"""What one rank does for all, such as writing a file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from foreplan.base.errors import ForeplanError
from foreplan.runtime.world.agreement import together
from foreplan.runtime.world.world import World


@contextmanager
def first_alone(world: World, what: str, others: Iterable[object] = ()) -> Iterator[bool]:
    """A block that all ranks enter, and leave when the first one has done its work: `with first_alone(world) as mine`.

    Args:
        what: the first one does, for an error.
        others: what all ranks do in turn; what of it the block leaves is done here, so that none waits for another.

    Yields:
        Whether this rank does the work.

    Raises:
        SessionError: a rank has failed in it; that rank raises its own error.
    """
    with together(world, what):
        try:
            yield world.rank == 0
        except ForeplanError:
            _rest(world, others)
            raise
        _rest(world, others)


def _rest(world: World, others: Iterable[object]) -> None:
    """What the others do by themselves."""
    if world.size > 1:
        for _ in others:
            pass
