"""An oracle for recomputation: the cheapest schedule whose live bytes stay within a budget, by CP-SAT.

The formulation is Checkmate's (Jain et al., "Checkmate: Breaking the Memory Wall with Optimal Tensor
Rematerialization", MLSys 2020): the actions stand in a line, an order in which they can run; in stage t every action
up to the t-th may run again, in the order of the line, and then the t-th runs for the first time; from one place where
a value is used to the next it is held or not. What Checkmate does not have is there as the planner has it: several
readers and results, workspaces, inputs and outputs, writes that take the bytes of a read that goes, parts that lie in
their wholes, values that are gone because they are overwritten of necessity or replaced at home, several actions that
write one value. Effects, and actions that must overwrite or that write the next content of a stored value, run in
their own stage only.

All constraints are linear over 0/1 variables. `check` of an answer is the planner's own `schedule`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

from foreplan.base.units import align_up
from foreplan.planner import ALIGNMENT, Action, Overwrite, Problem, Role
from tests.oracle.peers import cp_model

Terms = list[tuple[int, int]]  # coefficient and variable
WORKERS = 8  # CP-SAT's portfolio; fewer leave out the searches that prove most here


@dataclass(frozen=True)
class Exact:
    """What the solver says.

    Attributes:
        order: the actions of the best schedule found, or None.
        cost: of all their runs, or None.
        bound: no schedule that the formulation permits costs less; None where there is none at all.
        proved: whether `order` is optimal, or it is proved that there is none.
    """

    order: tuple[int, ...] | None
    cost: int | None
    bound: int | None
    proved: bool


def line_of(problem: Problem, order: Sequence[int]) -> tuple[int, ...]:
    """An order, with the other pure producers of its values put where all that they read has been written."""
    line = list(order)
    ran = set(order)
    given = {v for v, value in enumerate(problem.values) if value.role in (Role.INPUT, Role.STORED)}
    for index, action in enumerate(problem.actions):
        if index in ran or runs_once(problem, action):
            continue
        first: dict[int, int] = {}
        for position, other in enumerate(line):
            for v in problem.actions[other].writes:
                first.setdefault(v, position)
        if first.keys() & set(action.writes) and given.union(first).issuperset(action.reads):
            line.insert(max((first[v] for v in action.reads if v in first), default=-1) + 1, index)
    return tuple(line)


def runs_once(problem: Problem, action: Action) -> bool:
    """Whether an action has its own stage only."""
    required = any(pair.required for pair in action.overwrites)
    return action.effect or required or any(problem.values[v].home >= 0 for v in action.writes)


def device_bytes(problem: Problem) -> tuple[list[int], list[int], int]:
    """Bytes on the device of each value (0 where stored or at home), of each workspace, and of all stored values.

    Offsets in a region are multiples of the smallest alignment in it, hence every buffer takes a multiple of it.
    """
    grain = [
        min([ALIGNMENT, *(v.alignment for v in problem.values if v.region == region and v.nbytes)])
        for region in range(len(problem.regions))
    ]
    here = [region.on_device for region in problem.regions]
    size = [align_up(v.nbytes, grain[v.region]) * here[v.region] for v in problem.values]
    stored = sum(n for n, v in zip(size, problem.values) if v.role is Role.STORED)
    size = [0 if v.role is Role.STORED or v.home >= 0 else n for n, v in zip(size, problem.values)]
    workspace = [align_up(a.workspace, grain[a.workspace_region]) * here[a.workspace_region] for a in problem.actions]
    return size, workspace, stored


def may_take(problem: Problem, action: Action, pair: Overwrite) -> bool:
    """Whether an optional overwrite is of use: both are the step's own."""
    old, new = problem.values[action.reads[pair.read]], problem.values[action.writes[pair.write]]
    return old.role is not Role.STORED and max(old.home, new.home) < 0


class Formulation:
    """Variables and rows of one problem, order and budget.

    Attributes:
        line: the order with other producers of its values, which need not run.
        events: (stage, position in the line) in the order of time, wherever something may run.
        runs: by event, the variable that says whether it does.
        fixed: variables with their values.
        rows: (terms, high): the terms' sum is at most `high`.
    """

    def __init__(self, problem: Problem, order: Sequence[int], budget: int) -> None:
        self.problem = problem
        self.line = line_of(problem, order)
        self.budget = budget
        self.count = 0
        self.fixed: dict[int, int] = {}
        self.rows: list[tuple[Terms, int]] = []
        self.events: list[tuple[int, int]] = []
        self.runs: list[int] = []
        self.size, self.workspace, self.stored = device_bytes(problem)
        needed = set(order)
        for stage, newest in enumerate(self.line):
            for position, index in enumerate(self.line[: stage + 1]):
                if position == stage or not runs_once(problem, problem.actions[index]):
                    self.events.append((stage, position))
                    self.runs.append(self._variable())
            if newest in needed:
                self.fixed[self.runs[-1]] = 1
        self._forbid_replaced()
        self._follow()

    def _variable(self) -> int:
        self.count += 1
        return self.count - 1

    def _row(self, high: int, *terms: tuple[int, int]) -> None:
        self.rows.append((list(terms), high))

    def _action(self, event: int) -> Action:
        return self.problem.actions[self.line[self.events[event][1]]]

    def _forbid_replaced(self) -> None:
        """Nothing reads a stored value once its next content is written at home."""
        gone: set[int] = set()
        for event, run in enumerate(self.runs):
            action = self._action(event)
            if not gone.isdisjoint(action.reads):
                assert self.fixed.setdefault(run, 0) == 0, f"{action.name} reads what is replaced before"
            gone |= {self.problem.values[v].home for v in action.writes} - {-1}

    def _follow(self) -> None:
        """Go through the events: what each needs, what is held after it, and the bytes while it runs."""
        values = self.problem.values
        now: dict[int, int] = {}  # of each value, the variable that says whether it is held
        for v, value in enumerate(values):
            if value.role is Role.INPUT:
                now[v] = self._variable()
        for event, run in enumerate(self.runs):
            action = self._action(event)
            before = dict(now)
            for v in action.writes:
                now[v] = self._variable()
                self._row(0, (1, now[v]), (-1, run), *([(-1, before[v])] if v in before else []))
                if v in before:  # What is written again need not be held until then; what is not stays as it was.
                    self._row(1, (1, before[v]), (1, run))
                    self._row(0, (1, before[v]), (-1, now[v]))
            for v in action.reads:
                if values[v].role is Role.STORED:
                    continue
                now[v] = self._variable()
                self._row(0, (1, run), (-1, before[v]))
                self._row(0, (1, now[v]), (-1, before[v]))
                self._row(0, (1, before[v]), (-1, now[v]), (-1, run))  # it is let go where it is read last
            saved = self._overwrite(action, run, now)
            held = [(self.size[v], variable) for v, variable in before.items() if self.size[v]]
            own = self.workspace[self.line[self.events[event][1]]] + sum(self.size[v] for v in action.writes)
            there = self.budget - self.stored
            if event == 0:  # all inputs are there when the step begins
                there, held = there - sum(n for n, _ in held), []
            self._row(there, *held, (own, run), *((-n, taken) for n, taken in saved))
        for v, variable in now.items():
            self.fixed[variable] = int(values[v].role is Role.OUTPUT)

    def _overwrite(self, action: Action, run: int, now: dict[int, int]) -> Terms:
        """Bytes of writes that take those of a read, and of parts that lie in their wholes, with the variables that say
        so.
        """
        saved: Terms = []
        sharing: dict[tuple[str, int], Terms] = {}
        for pair in action.overwrites:
            new, old = action.writes[pair.write], action.reads[pair.read]
            if pair.required and old in now:
                self._row(1, (1, now[old]), (1, run))
            if self.problem.values[new].home >= 0 or not (pair.required or may_take(self.problem, action, pair)):
                continue
            taken = run
            if not pair.required:
                taken = self._variable()
                self._row(0, (1, taken), (-1, run))
                self._row(1, (1, taken), (1, now[old]))
            saved.append((self.size[new], taken))
            for side in (("read", old), ("write", new)):
                sharing.setdefault(side, []).append((1, taken))
        for part in action.parts:
            piece = action.reads[part.read]
            if piece not in now or self.problem.values[piece].home >= 0:
                continue
            taken = self._variable()
            self._row(0, (1, taken), (-1, run))
            self._row(1, (1, taken), (1, now[piece]))
            saved.append((self.size[piece], taken))
            sharing.setdefault(("read", piece), []).append((1, taken))
        for terms in sharing.values():
            self._row(1, *terms)
        return [(nbytes, taken) for nbytes, taken in saved if nbytes]

    def runs_of(self, order: Sequence[int]) -> set[int] | None:
        """The run variables of a schedule, each run as early as may be; None where the formulation permits it not."""
        at = dict(zip(self.events, self.runs))
        place = {index: position for position, index in enumerate(self.line)}
        chosen: set[int] = set()
        stage, last = 0, -1
        for index in order:
            stage = max(stage + (place[index] <= last), place[index])
            last = place[index]
            if (stage, last) not in at:
                return None
            chosen.add(at[stage, last])
        return chosen if all(run in chosen for run in self.runs if self.fixed.get(run) == 1) else None

    def solve(self, cost: Sequence[int], seconds: float, start: Sequence[int] | None = None) -> Exact:
        """The cheapest schedule.

        Args:
            cost: of a run of each action of the problem.
            seconds: after which the solver stops.
            start: a schedule to begin from.
        """
        model = cp_model.CpModel()
        variables = [model.new_bool_var("") for _ in range(self.count)]
        for variable, value in self.fixed.items():
            model.add(variables[variable] == value)
        for terms, high in self.rows:
            unit = gcd(*(coefficient for coefficient, _ in terms)) or 1
            weights = [coefficient // unit for coefficient, _ in terms]
            chosen = [variables[variable] for _, variable in terms]
            model.add(cp_model.LinearExpr.weighted_sum(chosen, weights) <= high // unit)
        prices = [cost[self.line[position]] for _, position in self.events]
        model.minimize(cp_model.LinearExpr.weighted_sum([variables[run] for run in self.runs], prices))
        begun = None if start is None else self.runs_of(start)
        for run in self.runs if begun is not None else ():
            model.add_hint(variables[run], run in begun)
        solver = cp_model.CpSolver()
        solver.parameters.max_time_in_seconds = seconds
        solver.parameters.num_workers = WORKERS
        status = solver.solve(model)
        if status == cp_model.INFEASIBLE:
            return Exact(None, None, None, True)
        bound = round(solver.best_objective_bound)
        if status == cp_model.UNKNOWN:
            return Exact(None, None, bound, False)
        ran = [e for e, run in enumerate(self.runs) if solver.boolean_value(variables[run])]
        order = tuple(self.line[self.events[e][1]] for e in ran)
        return Exact(order, sum(cost[index] for index in order), bound, status == cp_model.OPTIMAL)
