"""Names that are taken, and free ones like them."""

from __future__ import annotations

from collections.abc import Iterable


class Names:
    """A set of names that gives each newcomer one of its own: `conv`, then `conv.1`, `conv.2`."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._taken = set(taken)
        self._next: dict[str, int] = {}

    def take(self, names: Iterable[str]) -> None:
        """These are taken from now on."""
        self._taken.update(names)

    def free(self, name: str) -> str:
        """The name, or where it is taken, the name with the lowest number behind it that was not given yet."""
        found, number = name, self._next.get(name, 1)
        while found in self._taken:
            found, number = f"{name}.{number}", number + 1
        self._next[name] = number
        return found

    def claim(self, name: str) -> str:
        """A free name, taken from now on."""
        found = self.free(name)
        self._taken.add(found)
        return found
