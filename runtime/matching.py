"""Which tensor of a file belongs to which of a session's values, where their names, shapes or types differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from foreplan.base.arguments import names_in, shown
from foreplan.base.errors import SessionError, UsageError
from foreplan.base.patterns import SEPARATORS, close_names, matches
from foreplan.base.units import listed
from foreplan.graph.origin import ModuleOrigin
from foreplan.runtime.tensor_files import Entry, type_text

_FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})
_COUNTER, _STATISTIC = "num_batches_tracked", "running_mean"  # PyTorch counts what foreplan has no use for


@dataclass(frozen=True)
class SessionValue:
    """A value that a session keeps.

    Attributes:
        key: its name in files.
        dtype, shape: its element type and extents.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return type_text(self.dtype, self.shape)


@dataclass(frozen=True)
class Match:
    """A tensor of a file for one of a session's values.

    Attributes:
        entry: the tensor.
        transposed: whether the file has the matrix the other way round.
    """

    entry: Entry
    transposed: bool = False


@dataclass(frozen=True)
class Names:
    """How the names in a file become those of a session, and which values are not read.

    Attributes:
        prefix: a beginning of the file's names that is left out; other names of the file count as not wanted.
        rename: parts of the file's names → what stands for them in the session. A part is a name's beginning up to a
            dot or slash, or all of it; the longest one counts. "" as a part puts a beginning before every name.
        transpose: patterns of the session's matrices that the file has the other way round.
        skip: patterns of the session's values that are left as they are.
    """

    prefix: str = ""
    rename: Mapping[str, str] = field(default_factory=dict)
    transpose: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()

    @classmethod
    def of(cls, prefix: object, rename: object, transpose: Iterable[str], skip: Iterable[str]) -> Names:
        """From a caller's arguments.

        Raises:
            UsageError: one of them has the wrong type.
        """
        if not isinstance(prefix, str):
            raise UsageError(f"prefix is a text, the beginning of names, and was given {shown(prefix)}")
        pairs = rename if isinstance(rename, Mapping) else None
        if pairs is None or not all(isinstance(text, str) for pair in pairs.items() for text in pair):
            raise UsageError(f'rename is a mapping of names, such as {{"fc": "head"}}, and was given {shown(rename)}')
        return cls(prefix, dict(pairs), tuple(names_in("transpose", transpose)), tuple(names_in("skip", skip)))

    def __bool__(self) -> bool:
        return bool(self.prefix or self.rename or self.transpose or self.skip)

    def applied(self, path: str, entries: Mapping[str, Entry]) -> tuple[dict[str, Entry], list[str]]:
        """The file's tensors by the session's names, and the file's names that do not have the prefix.

        Raises:
            SessionError: no name has the prefix or a part to rename, or two get the same name.
        """
        found: dict[str, tuple[str, Entry]] = {}
        used: set[str] = set()
        start = self.prefix if self.prefix[-1:] in (*SEPARATORS, "") else f"{self.prefix}."
        held = {name: None for name in entries if name.startswith(start)}
        if start and not held:
            raise SessionError(
                f"{path!r} has no name that begins with {start!r}; there are {close_names(start, entries)}"
            )
        for name in held:
            own = name[len(start) :]
            if parts := [part for part in self.rename if _is_part(part, own)]:
                longest = max(parts, key=len)
                used.add(longest)
                own = _replaced(own, longest, self.rename[longest])
            if own in found:
                raise SessionError(f"{path!r}: {found[own][0]!r} and {name!r} are both renamed to {own!r}")
            found[own] = (name, entries[name])
        if unused := [part for part in self.rename if part not in used]:
            near = close_names(unused[0], (name[len(start) :] for name in held))
            raise SessionError(f"{path!r} has nothing called {unused[0]!r} to rename; there are {near}")
        return {own: entry for own, (_, entry) in found.items()}, [name for name in entries if name not in held]

    def check(self, values: Mapping[str, SessionValue]) -> None:
        """Check that each pattern means something.

        Raises:
            UsageError: a pattern means no value, or one of `transpose` no matrix.
        """
        for option, patterns in (("transpose", self.transpose), ("skip", self.skip)):
            for pattern in patterns:
                meant = [key for key in values if matches(key, pattern)]
                if not meant:
                    near = close_names(pattern, values)
                    raise UsageError(f"{option}: no value of the model is called {pattern!r}; there are {near}")
                if option == "transpose" and all(len(values[key].shape) != 2 for key in meant):
                    raise UsageError(f"transpose: {meant[0]!r} is {values[meant[0]]}, and no matrix")

    def turns(self, value: SessionValue) -> bool:
        """Whether a pattern says that the file has this matrix the other way round."""
        return len(value.shape) == 2 and any(matches(value.key, pattern) for pattern in self.transpose)

    def skips(self, key: str) -> bool:
        """Whether a value is left as it is."""
        return any(matches(key, pattern) for pattern in self.skip)


AS_THEY_ARE, NO_MODULE = Names(), ModuleOrigin()


@dataclass(frozen=True, repr=False)
class Loaded:
    """What `Session.load` has read.

    Attributes:
        read: names of the values that the file had.
        missing: of those that it lacks; they are as they were.
        unexpected: names of the file that mean no value of the session.
        transposed: names of matrices that the file has the other way round.
        converted: names of values that the file has in another element type.
    """

    read: tuple[str, ...]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    transposed: tuple[str, ...] = ()
    converted: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = (
            ("not in the file, left as they were", self.missing),
            ("in the file, and not in the model", self.unexpected),
            ("transposed", self.transposed),
            ("converted from another element type", self.converted),
        )
        lines = [f"read {len(self.read)} tensors"]
        lines += [f"{len(names)} {what}: {listed(names, 3)}" for what, names in parts if names]
        return "\n".join(lines)

    __repr__ = __str__


def match(
    path: str,
    model: str,
    entries: Mapping[str, Entry],
    wanted: Iterable[SessionValue],
    names: Names,
    strict: bool,
    origin: ModuleOrigin = NO_MODULE,
) -> tuple[dict[str, Match], Loaded]:
    """What a file has for each of a session's values.

    Args:
        path, model: of what they are, for errors.
        entries: the file's tensors.
        wanted: the session's values.
        names: how their names differ.
        strict: the file has all values, with their shapes and types, and nothing else; if not, values that it lacks are
            left, other tensors are passed over, a matrix that fits the other way round alone is transposed, and
            floating-point numbers are converted.
        origin: of the model: a file may have a tied weight by any of its names, and has the constants that the model
            was computed with.

    Raises:
        SessionError: the file is not as strict demands, or has other constants; or a shape does not fit, it is not
            clear whether a square matrix is transposed, or the file has nothing of what is wanted.
        UsageError: a pattern means nothing.
    """
    values = {each.key: each for each in wanted}
    names.check(values)
    renamed, others = names.applied(path, entries)
    renamed = _untied(path, renamed, origin)
    kept = {key: each for key, each in values.items() if not names.skips(key)}
    missing = tuple(key for key in kept if not (key in renamed or key in origin.unlisted or _is_counter(key, kept)))
    foreign = (*(name for name in renamed if name not in values and not _is_counter(name, values)), *others)
    if missing and (strict or len(missing) == len(kept)):
        raise SessionError(f"{path!r} is of another model: it has no {missing[0]!r}{_hint(missing[0], entries)}")
    if strict and foreign:
        raise SessionError(
            f"{path!r} is of another model: its {min(foreign)!r} has no place in {model!r}; strict=False passes it over"
        )
    found = {key: _fitting(path, each, renamed[key], names, strict) for key, each in kept.items() if key in renamed}
    turned = tuple(key for key, each in found.items() if each.transposed)
    if turned and not names.transpose:
        _check_squares(path, kept, found, turned)
    converted = tuple(key for key, each in found.items() if each.entry.dtype != kept[key].dtype)
    return found, Loaded(tuple(found), missing, foreign, turned, converted)


def _untied(path: str, entries: Mapping[str, Entry], origin: ModuleOrigin) -> dict[str, Entry]:
    """A file's tensors without constants, and those of tied weights by the names that are stored.

    Raises:
        SessionError: a constant is another one than the model was computed with.
    """
    found = dict(entries)
    for name, wanted in origin.constants.items():
        entry = found.pop(name, None) if name not in origin.aliases else found.get(name)
        if entry is not None and not entry.holds(wanted):
            raise SessionError(
                f"{path!r} has another {name!r} than the module, whose {type_text(wanted.dtype.name, wanted.shape)} "
                "the model was computed with: load it into the module first, and import that"
            )
    for name, own in origin.aliases.items():
        if name in found:
            found.setdefault(own, found.pop(name))
    return found


def _fitting(path: str, value: SessionValue, entry: Entry, names: Names, strict: bool) -> Match:
    """The tensor of a name, if its shape and type fit.

    Raises:
        SessionError: they do not.
    """
    asked, same = names.turns(value), entry.dtype == value.dtype
    turned = len(value.shape) == 2 and entry.shape == value.shape[::-1]
    if (turned if asked else entry.shape == value.shape) and same:
        return Match(entry, asked)
    convertible = same or {entry.dtype, value.dtype} <= _FLOATS
    if not strict and convertible and (turned or (entry.shape == value.shape and not asked)):
        return Match(entry, asked or entry.shape != value.shape)
    remedy = f"to leave the session's as it is, give skip=[{value.key!r}]"
    if strict and convertible and turned and not asked and not same:
        remedy = "strict=False transposes and converts it"
    elif strict and turned and same:
        remedy = f"where the file has it the other way round, give transpose=[{value.key!r}]"
    elif strict and convertible and entry.shape == value.shape:
        remedy = "strict=False converts it"
    raise SessionError(f"{path!r} is of another model: its {value.key!r} is {entry}, and not {value}; {remedy}")


def _check_squares(path: str, values: Mapping[str, SessionValue], found: Iterable[str], turned: Sequence[str]) -> None:
    """Where matrices are transposed because only so they fit, the shape of a square one does not show how it lies.

    Raises:
        SessionError: there is one.
    """
    squares = [key for key in found if len(values[key].shape) == 2 and len(set(values[key].shape)) == 1]
    if unclear := [key for key in squares if values[key].shape != (1, 1)]:
        raise SessionError(
            f"{path!r} has {turned[0]!r} the other way round. {unclear[0]!r} is square, so that its shape does not "
            f"show how it lies: say by patterns which matrices to transpose, as in transpose=[{turned[0]!r}]"
        )


def _hint(wanted: str, names: Iterable[str]) -> str:
    """How to load a file whose names begin in another way; else its names that come close to the wanted one."""
    held = list(names)
    for name in held:
        if name.endswith(f".{wanted}"):
            return f"; it has {name!r}: give prefix={name.removesuffix(f'.{wanted}')!r}"
        if name and wanted.endswith(f".{name}"):
            start = wanted.removesuffix(f".{name}")
            return f"; it has {name!r}: give rename={{'': {start!r}}}"
    return f"; it has {close_names(wanted, held)}" if held else ""


def _is_counter(name: str, values: Mapping[str, object]) -> bool:
    scope, _, last = name.rpartition(".")
    return last == _COUNTER and (f"{scope}.{_STATISTIC}" if scope else _STATISTIC) in values


def _is_part(part: str, name: str) -> bool:
    return not part or name == part or (name.startswith(part) and name[len(part)] in SEPARATORS)


def _replaced(name: str, part: str, new: str) -> str:
    rest = name[len(part) :]
    if not part:
        return f"{new}{name}" if new[-1:] in SEPARATORS else f"{new}.{name}"
    return rest[1:] if not new and rest else f"{new}{rest}"
