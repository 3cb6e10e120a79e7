"""Names of sizes in a file: which are symbols, which are signs for "not known", and which is the batch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from foreplan.graph.types import Shape

Extent = int | str | None  # a number, a symbol, or nothing at all
# Names that say of an extent that it is not known: words, or signs alone (`?`, `-1`), some with a number behind.
# tf2onnx writes `unk__123`, a new number for each axis.
_UNKNOWN = re.compile(
    r"(none|null|nil|nan|n/?a|unk|unknown|undef|undefined|unset|unspecified|any|dyn|dynamic|free|variable)?[\W\d_]*",
    re.IGNORECASE,
)
_BATCH = re.compile(r"n|b|bs|\w*batch\w*", re.IGNORECASE)


def symbol_of(name: str) -> str | None:
    """The symbol of that name; None where it is a sign for "not known", which two axes share without being equal."""
    return None if _UNKNOWN.fullmatch(name.strip()) else name


def without_contradicted(
    declared: Mapping[str, list[Extent] | None], given: Mapping[str, Shape], label: str
) -> tuple[str, ...]:
    """Take out the symbols to which one given shape gives several numbers; notes that say so.

    The file says that these axes are equal. Who gives that input's whole shape says that they are not, and ONNX Runtime
    computes with what it is given.
    """
    notes = []
    for name, extents in declared.items():
        numbers: dict[str, set[int]] = {}
        for extent, number in zip(extents or (), given.get(name, ())):
            if isinstance(extent, str):
                numbers.setdefault(extent, set()).add(number)
        for symbol in [each for each, found in numbers.items() if len(found) > 1]:
            notes.append(
                f"{label}: the file calls several axes of input {name!r} {symbol!r}, as if they were equal; shapes= "
                f"gives {list(given[name])}, which counts, and {symbol!r} binds nothing"
            )
            for each in filter(None, declared.values()):
                each[:] = [None if extent == symbol else extent for extent in each]
    return tuple(notes)


def batch_axes(declared: Mapping[str, Sequence[Extent] | None]) -> dict[str, int]:
    """By input, the axis that has the batch: the first, or the one that has the symbol of other inputs' first axes."""
    listed = [extents for extents in declared.values() if extents]
    first = [extents[0] for extents in listed if isinstance(extents[0], str)]
    later = [
        extent for extents in listed for extent in extents if isinstance(extent, str) and "batch" in extent.lower()
    ]
    symbol = next((each for each in [*first, *later] if _BATCH.fullmatch(each)), first[0] if first else None)
    return {
        name: extents.index(symbol) if extents and symbol is not None and symbol in extents else 0
        for name, extents in declared.items()
    }
