"""What compiled functions have of NumPy, in the language that they are written in. All arrays have one axis."""

from __future__ import annotations

from foreplan.jit.source import Source

_FEW = 16  # elements that are sorted by insertion


@Source
def copy(source, target):  # type: ignore[no-untyped-def]
    """Copy all elements."""
    for i in range(len(source)):
        target[i] = source[i]


@Source
def fill(array, value):  # type: ignore[no-untyped-def]
    """Set all elements."""
    for i in range(len(array)):
        array[i] = value


@Source
def smallest(array):  # type: ignore[no-untyped-def]
    """The least element, of one at least."""
    found = array[0]
    for i in range(1, len(array)):
        found = min(found, array[i])
    return found


@Source
def largest(array):  # type: ignore[no-untyped-def]
    """The greatest element, of one at least."""
    found = array[0]
    for i in range(1, len(array)):
        found = max(found, array[i])
    return found


@Source
def argmax(array):  # type: ignore[no-untyped-def]
    """The first place of the greatest element, of one at least."""
    at = 0
    for i in range(1, len(array)):
        if array[i] > array[at]:
            at = i
    return at


@Source
def argsort(keys, order, spare):  # type: ignore[no-untyped-def]
    """Write the places of keys to `order`, those of lower keys first, equal ones as they come: runs are sorted by
    insertion, and then merged.
    """
    n = len(keys)
    for low in range(0, n, _FEW):
        for i in range(low, min(low + _FEW, n)):
            at = i
            while at > low and keys[order[at - 1]] > keys[i]:
                order[at] = order[at - 1]
                at -= 1
            order[at] = i
    width = _FEW
    while width < n:
        for low in range(0, n, 2 * width):
            middle, high = min(low + width, n), min(low + 2 * width, n)
            left, right = low, middle
            for at in range(low, high):
                if left < middle and (right >= high or keys[order[left]] <= keys[order[right]]):
                    spare[at] = order[left]
                    left += 1
                else:
                    spare[at] = order[right]
                    right += 1
        for at in range(n):
            order[at] = spare[at]
        width *= 2
