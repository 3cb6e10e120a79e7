"""The check of a problem before anything is done with it: types, indices, sizes, sharing, and an order that can run."""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

from foreplan.base.errors import PlanError, UsageError
from foreplan.planner.placement.problem import MOST
from foreplan.planner.plan import Plan
from foreplan.planner.problem import Action, Category, Overwrite, Part, Problem, Region, Role, Value

LARGEST_ALIGNMENT = 2**30
WORD = 63  # bits of a number, without its sign
_SOUND: WeakValueDictionary[int, Problem] = WeakValueDictionary()  # by id, for comparing two problems takes long
NUMBERS = ("workspace", "flops", "nbytes", "nanoseconds")


def check_problem(problem: Problem) -> None:
    """Check that a problem from outside is well-formed: types, indices, sizes, alignments, and an order that can run.

    Numbers are Python's own `int`: a NumPy integer, which would overflow in silence, or a bool is refused.
    A problem cannot change, so each is looked through once: every public function of the planner calls this.

    Raises:
        UsageError: the argument is not a Problem.
        PlanError: names the value or action and the rule it breaks.
    """
    if not isinstance(problem, Problem):
        raise UsageError(f"a Problem is needed, got {type(problem).__name__}")
    if _SOUND.get(id(problem)) is not problem:
        _check(problem)
        _SOUND[id(problem)] = problem


def _check(problem: Problem) -> None:
    parts: tuple[tuple[str, Any, type], ...] = (
        ("region", problem.regions, Region),
        ("value", problem.values, Value),
        ("action", problem.actions, Action),
    )
    for what, items, kind in parts:
        if not isinstance(items, tuple) or not all(isinstance(item, kind) for item in items):
            raise PlanError(f"a problem's {what}s must be a tuple of {kind.__name__}, got {_told(items)}")
        _check_names(what, items)
    for region in problem.regions:
        if type(region.on_device) is not bool:
            raise PlanError(
                f"region {_told(region.name)}: on_device must be True or False, got {_told(region.on_device)}"
            )
    if not problem.regions:
        raise PlanError("a problem needs at least one region")
    for value in problem.values:
        _check_value(problem, value)
    _check_homes(problem)
    there = {i for i, v in enumerate(problem.values) if v.role in (Role.INPUT, Role.STORED)}
    for action in problem.actions:
        _check_types(action)
        _check_action(problem, action, there)
        there.update(action.writes)
    for i, v in enumerate(problem.values):
        if v.role is Role.OUTPUT and i not in there:
            raise PlanError(f"value {v.name!r} must be there at the end, and no action writes it")
    _check_sums(problem)


def check_plan(plan: Plan, problem: Problem) -> None:
    """Check that a problem is well-formed, and that a plan is one of it.

    What the plan says is not proved: `verify` does that.

    Raises:
        UsageError: an argument is not a Plan, or not a Problem.
        PlanError: the problem is not well-formed (`check_problem`), or the plan answers another one.
    """
    check_problem(problem)
    if not isinstance(plan, Plan):
        raise UsageError(f"a Plan is needed, got {type(plan).__name__}")
    if plan.problem_digest != problem.digest:
        raise PlanError(
            f"the plan answers problem {plan.problem_digest[:12]}, not this one, {problem.digest[:12]}; plan again"
        )


def _check_names(what: str, items: tuple[Any, ...]) -> None:
    """Names are text that a file can hold; those of values are unique."""
    seen: dict[str, int] = {}
    for i, item in enumerate(items):
        if not isinstance(item.name, str):
            raise PlanError(f"{what} {i}: its name must be text, got {_told(item.name)}")
        if not item.name.isascii() and any("\ud800" <= letter <= "\udfff" for letter in item.name):
            raise PlanError(f"{what} {i}: its name has half of a character, {_told(item.name)}")
        if what == "value" and (first := seen.setdefault(item.name, i)) != i:
            raise PlanError(f"values {first} and {i} have the same name, {_told(item.name)}")


def _check_int(where: str, name: str, number: Any) -> None:
    if type(number) is not int:
        raise PlanError(f"{where}: {name} must be an int, got {_told(number)} ({type(number).__name__})")
    if number.bit_length() > WORD:
        raise PlanError(f"{where}: {name} is a number of {number.bit_length()} bits, but only {WORD + 1} are allowed")


def _told(thing: Any) -> str:
    """The first letters of anything, whatever it is."""
    try:
        return f"{thing!r:.80}"
    except ValueError:  # an int with more digits than Python writes
        return "numbers beyond 64 bits"
    except Exception:  # a list in a list in a list without end, or what cannot be shown at all
        return f"a {type(thing).__name__} that cannot be shown"


def _check_value(problem: Problem, v: Value) -> None:
    where = f"value {v.name!r}"
    for name in ("nbytes", "alignment", "region", "home", "copy_of"):
        _check_int(where, name, getattr(v, name))
    if type(v.kept) is not bool:
        raise PlanError(f"{where}: kept must be True or False, got {_told(v.kept)}")
    if not isinstance(v.role, Role) or not isinstance(v.category, Category):
        raise PlanError(
            f"{where}: its role must be a Role and its category a Category, got {_told(v.role)}, {_told(v.category)}"
        )
    if v.nbytes < 0 or v.alignment < 1 or v.alignment & (v.alignment - 1):
        raise PlanError(f"{where}: {v.nbytes} bytes aligned to {v.alignment} (a power of two is needed)")
    if v.alignment > LARGEST_ALIGNMENT:
        raise PlanError(f"{where}: its alignment is {v.alignment}, and the largest is {LARGEST_ALIGNMENT}")
    if not 0 <= v.region < len(problem.regions):
        raise PlanError(f"{where}: there is no region {v.region}")
    others = range(len(problem.values))
    if v.copy_of != -1 and (v.copy_of not in others or problem.values[v.copy_of].nbytes != v.nbytes):
        raise PlanError(f"{where}: there is no value {v.copy_of} of its size that it could be a copy of")


def _check_homes(problem: Problem) -> None:
    taken: dict[int, str] = {}
    for v in problem.values:
        if v.home == -1:
            continue
        home = problem.values[v.home] if 0 <= v.home < len(problem.values) else None
        if home is None or home.role is not Role.STORED or home.nbytes != v.nbytes or home.region != v.region:
            what = f"there is no value {v.home}" if home is None else f"{home.name!r} is not"
            raise PlanError(f"value {v.name!r}: its home must be a stored value of its size and region; {what}")
        if v.role is not Role.OUTPUT:
            raise PlanError(f"value {v.name!r}: a value with a home must have the role OUTPUT")
        if v.home in taken:
            raise PlanError(f"values {taken[v.home]!r} and {v.name!r} have the same home, {home.name!r}")
        taken[v.home] = v.name


def _check_types(action: Action) -> None:
    where = f"action {action.name!r}"
    for name, kind in (("reads", int), ("writes", int), ("overwrites", Overwrite), ("parts", Part)):
        items = getattr(action, name)
        if not isinstance(items, tuple) or not all(
            type(item) is int and item.bit_length() <= WORD if kind is int else isinstance(item, kind) for item in items
        ):
            raise PlanError(f"{where}: {name} must be a tuple of {kind.__name__}, got {_told(items)}")
    for name in (*NUMBERS, "workspace_region"):
        _check_int(where, name, getattr(action, name))
    if type(action.effect) is not bool or any(type(pair.required) is not bool for pair in action.overwrites):
        raise PlanError(f"{where}: effect and required must be True or False, got {_told(action.effect)}")
    pairs: tuple[Overwrite | Part, ...] = (*action.overwrites, *action.parts)
    for pair in pairs:
        _check_int(where, "the write of a pair", pair.write)
        _check_int(where, "the read of a pair", pair.read)
    for part in action.parts:
        _check_int(where, "the offset of a part", part.offset)


def _check_action(problem: Problem, action: Action, there: set[int]) -> None:
    n, name = len(problem.values), action.name
    if not all(0 <= value < n for value in (*action.reads, *action.writes)):
        raise PlanError(
            f"action {name!r}: reads {action.reads!r:.80} or writes {action.writes!r:.80} a value that is not there"
        )
    if len(set(action.reads)) != len(action.reads) or len(set(action.writes)) != len(action.writes):
        raise PlanError(f"action {name!r}: reads or writes a value twice")
    if both := set(action.reads).intersection(action.writes):
        raise PlanError(
            f"action {name!r}: reads and writes {problem.values[min(both)].name!r}; a value has one content"
        )
    if missing := [problem.values[v].name for v in action.reads if v not in there]:
        raise PlanError(f"action {name!r}: reads {missing[0]!r} before any action writes it")
    for v in action.writes:
        if problem.values[v].role in (Role.INPUT, Role.STORED):
            raise PlanError(f"action {name!r}: writes {problem.values[v].name!r}, which is there from the start")
    for number in NUMBERS:
        if getattr(action, number) < 0:
            raise PlanError(f"action {name!r}: {number} is {getattr(action, number)}, and must not be negative")
    if not 0 <= action.workspace_region < len(problem.regions):
        raise PlanError(f"action {name!r}: there is no region {action.workspace_region}")
    _check_overwrites(problem, action)
    _check_parts(problem, action)


def _check_overwrites(problem: Problem, action: Action) -> None:
    for pair in action.overwrites:
        if not (0 <= pair.write < len(action.writes) and 0 <= pair.read < len(action.reads)):
            raise PlanError(f"action {action.name!r}: an overwrite names a write or a read that the action lacks")
        new, old = problem.values[action.writes[pair.write]], problem.values[action.reads[pair.read]]
        if new.nbytes > old.nbytes or new.region != old.region:
            raise PlanError(
                f"action {action.name!r}: {new.name!r} cannot take the bytes of {old.name!r}, which has fewer, or lies "
                "in another region"
            )
    if len({(pair.write, pair.read) for pair in action.overwrites}) < len(action.overwrites):
        raise PlanError(f"action {action.name!r}: an overwrite is listed twice")


def _check_parts(problem: Problem, action: Action) -> None:
    ends: dict[int, int] = {}
    for part in sorted(action.parts, key=lambda part: (part.write, part.offset)):
        if not (0 <= part.write < len(action.writes) and 0 <= part.read < len(action.reads)):
            raise PlanError(f"action {action.name!r}: a part names a write or a read that the action lacks")
        whole, piece = problem.values[action.writes[part.write]], problem.values[action.reads[part.read]]
        if not ends.get(part.write, 0) <= part.offset <= whole.nbytes - piece.nbytes or whole.region != piece.region:
            raise PlanError(
                f"action {action.name!r}: {piece.name!r} cannot lie in {whole.name!r} from byte {part.offset} on"
            )
        ends[part.write] = part.offset + piece.nbytes
    if len({part.read for part in action.parts}) < len(action.parts):
        raise PlanError(f"action {action.name!r}: a read is a part of two writes, or twice of one")
    over = {pair.write for pair in action.overwrites}
    if any(part.write in over or problem.values[action.writes[part.write]].home >= 0 for part in action.parts):
        raise PlanError(f"action {action.name!r}: a write that takes other bytes, or is at home, cannot have parts")


def _check_sums(problem: Problem) -> None:
    sums = {"bytes of values": sum(v.nbytes + v.alignment for v in problem.values)}
    for number in NUMBERS:
        sums[number] = sum(getattr(action, number) for action in problem.actions)
    for what, total in sums.items():
        if total > MOST:
            raise PlanError(f"the {what} of a problem add up to {total:.3g}; at most {MOST} are allowed")
