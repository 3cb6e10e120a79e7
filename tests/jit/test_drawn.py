"""Programs drawn at random do what Python does; the planner plans the same whether it is compiled, checked, or not."""

from __future__ import annotations

import importlib.util
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from foreplan import jit
from tests.profile import pick


class Writer:
    """Writes a function of two integers and an array of eight."""

    def __init__(self, seed: int) -> None:
        self.random, self.lines, self.loops = random.Random(seed), list[str](), 0

    def number(self, depth: int = 0) -> str:
        draw = self.random.random()
        if depth > 2 or draw < 0.35:
            return self.random.choice(["a", "b", "c", "d", str(self.random.randint(-9, 9))])
        one, other = self.number(depth + 1), self.number(depth + 1)
        if draw < 0.6:
            return f"({one} {self.random.choice(['+', '-', '*', '&', '|', '^'])} {other}) % 1009"
        if draw < 0.7:
            return f"({one}) {self.random.choice(['//', '%'])} {self.random.choice([-7, -1, 1, 2, 3, 8, 64])}"
        if draw < 0.75:
            return f"({one}) {self.random.choice(['//', '%'])} (({other}) % 5 + 1)"
        if draw < 0.8:
            return f"x[({one}) % 8]"
        if draw < 0.85:
            return f"({one} if {self.condition(depth + 1)} else {other})"
        if draw < 0.9:
            return f"{self.random.choice(['min', 'max'])}({one}, {other})"
        return self.random.choice(
            [f"abs({one})", f"-({one})", f"~({one})", f"(({one}) % 64 >> {self.random.randint(0, 5)})"]
        )

    def condition(self, depth: int = 0) -> str:
        draw = self.random.random()
        one, other = self.number(depth + 1), self.number(depth + 1)
        if depth > 2 or draw < 0.5:
            return f"({one}) {self.random.choice(['<', '<=', '>', '>=', '==', '!='])} ({other})"
        if draw < 0.6:
            return f"{one} <= ({other}) < {self.number(depth + 1)}"
        if draw < 0.7:
            return f"not ({self.condition(depth + 1)})"
        return f"({self.condition(depth + 1)} {self.random.choice(['and', 'or'])} {self.condition(depth + 1)})"

    def statements(self, indent: int, count: int, in_loop: bool = False) -> None:
        for _ in range(count):
            self.statement(" " * 4 * indent, indent, in_loop)

    def statement(self, space: str, indent: int, in_loop: bool) -> None:
        draw, add = self.random.random(), self.lines.append
        if indent > 3 or draw < 0.4:
            add(f"{space}{self.random.choice('abcd')} = {self.number()}")
        elif draw < 0.5:
            add(f"{space}{self.random.choice('abcd')} {self.random.choice(['+=', '-=', '^='])} ({self.number()}) % 97")
        elif draw < 0.6:
            add(f"{space}x[({self.number()}) % 8] {self.random.choice(['=', '+=', '-='])} ({self.number()}) % 50")
        elif draw < 0.65:
            add(f"{space}a, b = b, ({self.number()})")
        elif draw < 0.8:
            add(f"{space}if {self.condition()}:")
            self.statements(indent + 1, self.random.randint(1, 2), in_loop)
            if in_loop and self.random.random() < 0.3:
                add(f"{space}    {self.random.choice(['break', 'continue'])}")
            if self.random.random() < 0.5:
                add(f"{space}else:")
                self.statements(indent + 1, 1, in_loop)
        elif draw < 0.9:
            step = self.random.choice(["", ", 2", ", -1", ", -3"])
            bounds = f"{self.random.randint(0, 6)}, {self.random.randint(0, 6)}{step}"
            name = self.random.choice("cd")
            add(f"{space}for {name} in range({bounds}):")
            self.statements(indent + 1, self.random.randint(1, 3), True)
        else:
            self.loops += 1
            name = f"left{self.loops}"
            add(f"{space}{name} = {self.random.randint(1, 5)}")
            add(f"{space}while {name} and {self.condition()}:")
            add(f"{space}    {name} -= 1")
            self.statements(indent + 1, 2, True)

    def function(self, name: str) -> str:
        self.lines = [f"def {name}(a, b, x):", "    c = a - b", "    d = 3"]
        self.statements(1, 9)
        self.lines += ["    return a, b, c % 1013, d"]
        return "\n".join(self.lines)


def test_drawn_programs(tmp_path: Path) -> None:
    count = pick(10, 25, 400)
    file = tmp_path / "drawn.py"
    file.write_text("\n\n\n".join(Writer(seed).function(f"f{seed}") for seed in range(count)))
    spec = importlib.util.spec_from_file_location("drawn", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    rng = np.random.default_rng(0)
    for seed in range(count):
        function = getattr(module, f"f{seed}")
        compiled = jit.compiled(function, vectorize=seed % 2 == 0)
        for _ in range(4):
            a, b, x = int(rng.integers(-20, 20)), int(rng.integers(-20, 20)), rng.integers(-9, 9, 8)
            mine, other = x.copy(), x.copy()
            assert compiled(a, b, mine) == function(a, b, other), (function.__name__, a, b, x)
            np.testing.assert_array_equal(mine, other)


PLANS = """
import sys
import foreplan as fp
from foreplan.planner.driver import plan
from tests.planner.problems import joined_problem, priced, random_problem, with_round_trips
from tests.profile import SHORT

problems = []
for seed in range(int(sys.argv[1])):
    problem = random_problem(seed, int(sys.argv[2]) + seed)
    problems += priced(problem, seed), with_round_trips(problem, seed), joined_problem(seed)
for model in sys.argv[3:]:
    graph = fp.models.build(model)
    step = fp.differentiate(graph, getattr(fp.losses, fp.models.default_loss(model)), fp.optim.SGD(0.1))
    problems.append(fp.lower(step))
for problem in problems:
    for budget in (None, 0.8):
        try:
            print(plan(problem, budget, effort=SHORT).as_text(problem))
        except fp.DoesNotFitError as error:
            print(error)
"""


def plans(mode: str, problems: int, actions: int, *models: str) -> str:
    """Plans of drawn problems, of so many actions and more, and of models, where compiled functions run in some way."""
    command = [sys.executable, "-c", PLANS, str(problems), str(actions), *models]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, cwd=root, env=os.environ | {"FOREPLAN_JIT": mode}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.thorough
def test_the_planner_plans_the_same_where_nothing_is_compiled() -> None:
    assert plans("off", 1, 7) == plans("", 1, 7)


@pytest.mark.thorough
def test_the_planner_keeps_within_its_arrays() -> None:
    """Compiled code that checks every index: out of its axis, it would read or write what is not its own."""
    models = ["mlp:width=8,layers=3,batch=2", "gpt2_small:layers=1,batch=1,seq=16,width=32,heads=4,vocabulary=50"]
    assert plans("checked", pick(1, 5, 20), 12, *models) == plans("", pick(1, 5, 20), 12, *models)
