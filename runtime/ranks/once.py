"""What one rank does for all, such as writing a file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from foreplan.errors import ForeplanError, SessionError
from foreplan.runtime.ranks.world import World


@contextmanager
def first_alone(world: World, together: Iterable[object] = ()) -> Iterator[bool]:
    """A block that all ranks enter, and leave when the first one has done its work: `with first_alone(world) as mine`.

    Args:
        together: what all ranks do in turn; what of it the block leaves is done here, so that none waits for another.

    Yields:
        Whether this rank does the work.

    Raises:
        SessionError: the first rank could not do it; that rank raises its own error.
    """
    error: ForeplanError | None = None
    try:
        yield world.rank == 0
    except ForeplanError as raised:
        if world.size == 1:
            raise
        error = raised
    if world.size == 1:
        return
    for _ in together:
        pass
    told = world.gather(None if error is None else str(error))
    if error is not None:
        raise error
    if told[0] is not None:
        raise SessionError(f"rank 0 failed: {told[0]}")
