"""Drawn modules that write in place: through views, into what is detached, and where no gradient is recorded."""

from __future__ import annotations

import linecache
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

ROWS, COLUMNS = 4, 6
Draw = Callable[[list[str]], str]


class Drawn(nn.Module):
    """Two layers, a mask and places; what forward does with them is drawn."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(COLUMNS, COLUMNS), nn.Linear(COLUMNS, COLUMNS)
        self.register_buffer("mask", torch.rand(ROWS, COLUMNS) > 0.5)
        self.register_buffer("places", torch.tensor([2, 0]))


def source(seed: int) -> str:
    """The code of `forward(self, x)`, x [4, 6]."""
    rng = random.Random(seed)
    names, lines = ["x0"], ["x0 = self.a(x)"]

    def some() -> str:
        return rng.choice(names)

    def kept(line: str) -> str:
        names.append(f"x{len(names)}")
        return line.replace("NEW", names[-1])

    def one(*lines: str) -> str:
        return rng.choice(lines)

    def line(p: str) -> str:
        i, j, n = rng.randrange(ROWS - 1), rng.randrange(COLUMNS - 1), rng.randint(1, 3)
        value = one("1", f"{some()}[:1]", "self.b.bias")
        column = one("0.5", f"{some()}[:, 1]", f"torch.sin({some()}[:, 2])")
        quiet = one("mul_(2)", "add_(1)", "zero_()", f"copy_(torch.sin({some()}))", "clamp_(-0.3, 0.3)")
        q, r = some(), some()
        new = (
            f"NEW = torch.tanh(self.{one('a', 'b')}({p}))",
            f"NEW = {p}.detach()",
            f"NEW = {p}.t().contiguous().view(4, 6)",
            f"NEW = {p}.t(); NEW.{one('mul_(1.5)', 'sub_(0.1)')}; NEW = NEW.t()",
            f"NEW = {p}.view(2, 12); NEW[:, ::{n}].mul_(0.7); NEW = NEW.view(4, 6)",
            f"u, v = {p}.chunk(2); u.{one('mul_(2)', 'neg_()')}; NEW = torch.cat([{one('u, v', 'v, u')}])",
            f"NEW = {p}.clone(); NEW[self.places] += {q}[self.places]",
            f"NEW = torch.where({q} > 0.0123, {p}, {r})",
            f"NEW = {p} * {q}{one('', '.detach()', '.sum()')}",
            f"NEW = {p}.unsqueeze(0).expand(3, 4, 6).{one('sum(0)', 'mean(0)', 'clone()[1]')}",
            f"NEW = torch.empty_like({p}); NEW[:2] = {p}[2:]; NEW[2:].copy_({q}[:2])",
            f"with torch.no_grad(): NEW = {p}{one(' * 2', '.view(4, 6)', '[:]', '')}",
            f"u = {p}.unbind({rng.randrange(2)}); u[1].mul_(2); NEW = {p} + 0",
        )
        written = (
            f"{p}.mul_({one('2', '0.5', '-1')})",
            f"{p}[{i}:{i + n}].add_({value})",
            f"{p}[:, {j}] = {column}",
            f"with torch.no_grad(): {p}.{quiet}",
            f"{p}.masked_fill_({one(f'{q} > 0.0123', 'self.mask')}, {one('0', '-1.5')})",
            f"{p}.index_add_(0, self.places, {q}[:2].{one('detach()', 'clone()')})",
            f"{p}.detach(){one('', f'[{i}]')}.{one('mul_(3)', 'add_(0.3)')}",
            f"{p}.add_({q}, alpha=0.3)",
        )
        drawn = rng.choice(new + written)
        return kept(drawn) if "NEW" in drawn else drawn

    lines += [line(some()) for _ in range(rng.randint(3, 9))]
    lines.append("return " + " + ".join(f"{name} * {i + 1}" for i, name in enumerate(names[-3:])))
    return "def forward(self, x):\n" + "".join(f"    {each}\n" for each in lines)


def module(code: str) -> nn.Module:
    """A new module with that forward, always of the same weights."""
    name, found = f"<drawn {hash(code)}>", dict[str, Any]()
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    exec(compile(code, name, "exec"), {"torch": torch}, found)
    return type("Drawn", (Drawn,), found)()


def runs(code: str, x: torch.Tensor) -> bool:
    """Whether PyTorch takes it, which refuses writes of what a backward pass reads, and has a gradient."""
    made = module(code)
    try:
        made(x).square().sum().backward()
    except RuntimeError:
        return False
    return any(weight.grad is not None for weight in made.parameters())
