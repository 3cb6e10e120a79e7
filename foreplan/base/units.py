"""Bytes, counts and times, to and from the text that people write and read."""

from __future__ import annotations

import contextlib
import math
import operator
import re
from collections.abc import Iterable
from fractions import Fraction
from numbers import Integral, Real
from typing import Any, SupportsIndex

from foreplan.base.errors import UsageError

_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_UNITS |= {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_MOST = 2**63 - 1  # bytes
_DIGITS = 1000
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([a-zA-Z]*)\s*")
_RATE = re.compile(r"\s*([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([kKMGT]?i?)(B|bit)/s\s*")
_TIME = re.compile(r"\s*([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*(ns|us|µs|μs|ms|s)\s*")
_NANOSECONDS = {"ns": 1, "us": 10**3, "µs": 10**3, "μs": 10**3, "ms": 10**6, "s": 10**9}


def parse_bytes(text: str | SupportsIndex) -> int:
    """Bytes from "2GiB", "512MiB", "1.5 GB" (powers of ten) or a plain number of bytes, Python's or NumPy's; less than
    2**63.

    Raises:
        UsageError: the text is not a size.
    """
    if isinstance(text, str):
        nbytes = _parsed(text)
    elif isinstance(text, bool) or not isinstance(text, SupportsIndex):
        raise UsageError(f"a size is a whole number of bytes or a text such as '512MiB', got {text!r}")
    else:
        nbytes = operator.index(text)
    if nbytes < 0:
        raise UsageError(f"a size in bytes must not be negative, got {text}")
    if nbytes > _MOST:
        shown = f"{text:.40}..." if isinstance(text, str) else f"one of {nbytes.bit_length()} bits"
        raise UsageError(f"a size is at most 2**63 - 1 bytes, got {shown}")
    return nbytes


def parse_budget(budget: Any) -> int | float:
    """A budget: bytes, from a whole number or a text such as "2GiB"; or a share, from a float above 0 or a text such as
    "0.5".

    Raises:
        UsageError: it is neither.
    """
    if isinstance(budget, Integral) and not isinstance(budget, bool):
        return parse_bytes(max(int(budget), -1))
    if isinstance(budget, str):
        with contextlib.suppress(ValueError):
            if 0 < (ratio := float(budget)) < 1:
                return ratio
        return parse_bytes(budget)
    share: Any = budget
    if isinstance(budget, Real) and not isinstance(budget, bool) and 0 < share < math.inf:
        return float(min(share, _MOST))
    raise UsageError(f"a budget is bytes, text such as '2GiB', or a float above 0 as a share, got {budget!r:.80}")


def _parsed(text: str) -> int:
    match = _SIZE.fullmatch(text)
    if match is None or match[2].lower() not in _UNITS:
        raise UsageError(f"{text!r:.40} is not a size; write bytes or a unit, such as 2147483648, 512MiB or 1.5GiB")
    if len(match[1]) > _DIGITS:
        raise UsageError(f"a size has at most {_DIGITS} digits, and {text:.40}... has {len(match[1])}")
    return int(Fraction(match[1]) * _UNITS[match[2].lower()])


def parse_rate(text: str) -> int:
    """Bytes a second from "12.5GB/s", "100Gbit/s" or "2GiB/s", at least 1.

    Raises:
        UsageError: the text is no rate. So is "Gb/s", which means bits to some and bytes to others.
    """
    match = _RATE.fullmatch(text)
    prefix = match[2].lower() if match else ""
    factor = _UNITS.get(prefix + "b" if prefix else "")
    rate = int(Fraction(match[1]) * factor / (1 if match[3] == "B" else 8)) if match and factor else 0
    if not 0 < rate <= _MOST:
        raise UsageError(f"{text!r:.40} is not a rate; write bytes or bits a second, such as 12.5GB/s or 100Gbit/s")
    return rate


def parse_nanoseconds(text: str) -> int:
    """Nanoseconds from "5us", "5 µs", "1.5ms" or "800ns".

    Raises:
        UsageError: the text is no time.
    """
    match = _TIME.fullmatch(text)
    found = int(Fraction(match[1]) * _NANOSECONDS[match[2]]) if match else -1
    if not 0 <= found <= _MOST:
        raise UsageError(f"{text!r:.40} is not a time; write a number with ns, us, ms or s, such as 5us")
    return found


def ceil_div(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


def align_up(nbytes: int, alignment: int) -> int:
    """The smallest multiple of `alignment` that is at least `nbytes` (both in bytes)."""
    return -(-nbytes // alignment) * alignment


def format_bytes(nbytes: int) -> str:
    """Bytes as people read them, in IEC units: `7.25 GiB`, `512 B`."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{nbytes} B" if unit == "B" else f"{size:,.2f} {unit}"


def in_common(part: int, whole: int) -> str:
    """One size of another, in the unit of the second: `24.3 of 14.8 GiB`; with as many digits as tell them apart."""
    unit = format_bytes(whole).split()[1]
    scale = _UNITS[unit.lower()]
    for digits in (1, 2, 3):
        texts = [f"{nbytes / scale:,.{digits}f}" for nbytes in (part, whole)]
        if part == whole or texts[0] != texts[1]:
            break
    return f"{texts[0]} of {texts[1]} {unit}"


def as_size(nbytes: int, most: int) -> str:
    """A size as options take it, at least as large, with few digits: `13.9GiB`.

    Args:
        most: what it must not exceed, at least `nbytes`.
    """
    unit = format_bytes(nbytes).split()[1]
    for digits in (1, 2, 3):
        text = f"{ceil_div(nbytes * 10**digits, _UNITS[unit.lower()]) / 10**digits:.{digits}f}{unit}"
        if nbytes <= parse_bytes(text) <= most:
            return text
    return str(nbytes)


def format_count(count: float, unit: str = "") -> str:
    """A count of some unit with a decimal prefix: `12.3 GFLOP`, `5 M`, `17 FLOP`."""
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= factor:
            return f"{count / factor:.3g} {prefix}{unit}"
    return f"{count:.3g} {unit}".rstrip()


def listed(names: Iterable[str], most: int) -> str:
    """The first of some names, and how many more there are: `a, b and 1,200 more`."""
    found = list(names)
    return ", ".join(found[:most]) + (f" and {len(found) - most:,} more" if len(found) > most else "")


def format_seconds(seconds: float) -> str:
    """A duration as people read it: `1.53 s`, `12.0 ms`, `3 min 05 s`."""
    if seconds >= 120:
        return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"
    if seconds >= 1:
        return f"{seconds:.2f} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds * 1e6:.1f} µs"
