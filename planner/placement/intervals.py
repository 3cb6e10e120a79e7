"""The placer on its own: buffers in a CSV file, `id,lower,upper,size` (MiniMalloc's form), offsets out."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Sequence
from dataclasses import dataclass

from foreplan.base.arguments import path_of
from foreplan.base.errors import DoesNotFitError, UsageError
from foreplan.base.files import write_atomically
from foreplan.base.units import format_bytes
from foreplan.planner.effort import USUAL
from foreplan.planner.placement.offsets import Placement, place

_REQUIRED = ("id", "lower", "upper", "size")
_OPTIONAL = ("alignment", "offset")


@dataclass(frozen=True, slots=True)
class Interval:
    """A buffer to place.

    Attributes:
        id: as the file names it.
        lower: when its bytes begin to be needed.
        upper: when they are no longer needed (half-open).
        size: bytes.
        alignment: its offset must be a multiple of this power of two.
        offset: where it lies already, or -1.
    """

    id: str
    lower: int
    upper: int
    size: int
    alignment: int = 1
    offset: int = -1


def read_intervals(path: str | os.PathLike[str]) -> tuple[Interval, ...]:
    """Read a CSV file with a header line naming `id,lower,upper,size` and, if wanted, `alignment` and `offset`.

    The columns may come in any order. An empty offset (or -1) leaves the buffer to be placed.

    Raises:
        UsageError: names the file, the line and what is wrong with it.
    """
    path = path_of("read_intervals", path)
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:  # as spreadsheets write it
            reader = csv.reader(file)
            header = [name.strip() for name in next(reader, [])]
            _check_header(path, header)
            found: dict[str, Interval] = {}
            for row in reader:
                if not row:
                    continue
                interval = _interval(f"{path}, line {reader.line_num}", header, row)
                if found.setdefault(interval.id, interval) is not interval:
                    raise UsageError(f"{path}, line {reader.line_num}: id {interval.id!r} is there twice")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except (ValueError, csv.Error) as error:
        raise UsageError(f"{path}: not a CSV file in UTF-8 ({error})") from None
    return tuple(found.values())


def _check_header(path: str, header: list[str]) -> None:
    missing = [name for name in _REQUIRED if name not in header]
    unknown = [name for name in header if name not in (*_REQUIRED, *_OPTIONAL)]
    if missing or unknown or len(set(header)) != len(header):
        raise UsageError(
            f"{path}, line 1: the header must name the columns {','.join(_REQUIRED)} and may name "
            f"{','.join(_OPTIONAL)}, each once; it is {','.join(header)!r}"
        )


def _interval(where: str, header: list[str], row: list[str]) -> Interval:
    if len(row) != len(header):
        raise UsageError(f"{where}: {len(row)} fields for {len(header)} columns")
    fields = {name: text.strip() for name, text in zip(header, row)}
    numbers: dict[str, int] = {"alignment": 1, "offset": -1}
    for name, text in fields.items():
        if name == "id" or (name in _OPTIONAL and not text):
            continue
        try:
            numbers[name] = int(text)
        except ValueError:
            raise UsageError(f"{where}: {name} must be an integer, got {text!r}") from None
    interval = Interval(fields["id"], **numbers)
    if interval.lower >= interval.upper:
        raise UsageError(f"{where}: lower {interval.lower} must be below upper {interval.upper}")
    if interval.size < 0 or max(map(abs, numbers.values())) >= 1 << 60:
        raise UsageError(f"{where}: size {interval.size} must not be negative, nor any number beyond 2**60")
    aligned = interval.alignment > 0 and interval.alignment & (interval.alignment - 1) == 0
    if not aligned or interval.offset < -1 or (interval.offset >= 0 and interval.offset % interval.alignment):
        raise UsageError(
            f"{where}: alignment {interval.alignment} must be a power of two, and offset {interval.offset} a multiple "
            "of it, or empty"
        )
    return interval


def place_intervals(
    intervals: Sequence[Interval], capacity: int | None = None, work: int = USUAL.placement.work
) -> Placement:
    """Offsets for intervals; those with an offset stay where they are.

    Args:
        capacity: bytes that must not be exceeded; the first placement within it will do.
        work: how long to search, see `place`.

    Raises:
        DoesNotFitError: the lowest placement found is higher than `capacity`.
        PlanError: intervals with offsets overlap.
    """
    placement = place(
        [interval.lower for interval in intervals],
        [interval.upper for interval in intervals],
        [interval.size for interval in intervals],
        [interval.alignment for interval in intervals],
        [interval.offset for interval in intervals],
        capacity,
        work,
    )
    if capacity is not None and placement.height > capacity:
        proved = "no placement fits" if placement.lower_bound > capacity else "a lower one may exist"
        raise DoesNotFitError(
            f"the lowest placement found takes {format_bytes(placement.height)} ({placement.height} bytes), allowed "
            f"are {capacity} bytes; none goes below {placement.lower_bound} bytes, so {proved}",
            needed=placement.height,
            capacity=capacity,
            lower_bound=placement.lower_bound,
        )
    return placement


def intervals_text(intervals: Sequence[Interval], offsets: Sequence[int]) -> str:
    """Intervals with their offsets as CSV."""
    aligned = any(interval.alignment != 1 for interval in intervals)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*_REQUIRED, *(["alignment"] if aligned else []), "offset"])
    for interval, offset in zip(intervals, offsets, strict=True):
        alignment = [interval.alignment] if aligned else []
        writer.writerow([interval.id, interval.lower, interval.upper, interval.size, *alignment, int(offset)])
    return out.getvalue()


def write_intervals(path: str | os.PathLike[str], intervals: Sequence[Interval], offsets: Sequence[int]) -> None:
    """Write intervals with their offsets as CSV; see `write_atomically` for how, and for the errors."""
    write_atomically(path, intervals_text(intervals, offsets))
