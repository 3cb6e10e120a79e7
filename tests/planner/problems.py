"""Problems to plan: random ones with every feature, and ones shaped like a training step."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from foreplan.planner import Action, Category, Overwrite, Part, Problem, Region, Role, Value

REGIONS = (Region("persistent"), Region("arena"), Region("host", on_device=False))


class Maker:
    """Collects values and actions."""

    def __init__(self, regions: tuple[Region, ...] = REGIONS) -> None:
        self.regions = regions
        self.values: list[Value] = []
        self.actions: list[Action] = []

    def value(self, name: str, nbytes: int, region: int = 1, **more: object) -> int:
        self.values.append(Value(name, nbytes, region=region, **more))  # type: ignore[arg-type]
        return len(self.values) - 1

    def action(self, name: str, reads: list[int], writes: list[int], *pairs: Overwrite, **more: object) -> None:
        self.actions.append(Action(name, tuple(reads), tuple(writes), tuple(pairs), **more))  # type: ignore[arg-type]

    def problem(self) -> Problem:
        return Problem(tuple(self.values), tuple(self.actions), self.regions)


def random_problem(seed: int, actions: int = 12) -> Problem:
    """In-place pairs, required ones, several outputs, stored values with and without next contents, workspaces, dead
    actions, second producers, odd sizes and alignments, a host region."""
    rng = random.Random(seed)
    make = Maker()
    size = lambda: rng.choice([0, 4, 64, 100, 128, 192, 256, 1000, 1024])  # noqa: E731
    align = lambda: rng.choice([4, 64, 64, 64, 256])  # noqa: E731
    stored = [
        make.value(f"w{i}", size(), 0, alignment=align(), role=Role.STORED, category=Category.PARAMETERS)
        for i in range(rng.randrange(4))
    ]
    inputs = [
        make.value(f"x{i}", size(), alignment=align(), role=Role.INPUT, category=Category.INPUTS)
        for i in range(rng.randint(1, 3))
    ]
    usable = [*stored, *inputs]
    waiting = [w for w in stored if rng.random() < 0.7]
    for i in range(actions):
        reads = rng.sample(usable, min(len(usable), rng.randint(0 if rng.random() < 0.1 else 1, 3)))
        if waiting and rng.random() < 0.15:
            old = waiting.pop()
            _update(make, rng, f"update{i}", old, [v for v in reads if v != old], usable)
            continue
        takes = [v for v in reads if make.values[v].role in (Role.TRANSIENT, Role.INPUT)]
        required = bool(takes) and rng.random() < 0.15
        writes = []
        pairs = []
        for k in range(rng.choice([1, 1, 1, 2, 3])):
            region = 2 if rng.random() < 0.05 else 1
            nbytes = size()
            if k == 0 and takes and rng.random() < 0.7:
                taken = rng.choice(takes)
                region, nbytes = make.values[taken].region, make.values[taken].nbytes
            role = Role.OUTPUT if not required and rng.random() < 0.15 else Role.TRANSIENT
            writes.append(make.value(f"v{i}.{k}", nbytes, region, alignment=align(), role=role))
        for k, write in enumerate(writes):
            for j, read in enumerate(reads):
                old, new = make.values[read], make.values[write]
                fits = old.region == new.region and old.nbytes >= new.nbytes
                if fits and (k == 0 or rng.random() < 0.5):
                    must = required and k == 0 and read in takes and not any(p.required for p in pairs)
                    pairs.append(Overwrite(k, j, must))
        workspace = rng.choice([0, 0, 50, 64, 512])
        more = {"workspace": workspace, "workspace_region": 1, "effect": rng.random() < 0.05}
        make.action(f"a{i}", reads, writes, *pairs, **more)
        if not more["effect"] and not required and rng.random() < 0.1:
            make.action(
                f"a{i}.again", reads, writes[:1], *[p for p in pairs if p.write == 0], workspace=rng.randrange(99)
            )
        gone = {reads[p.read] for p in pairs if p.required}
        usable = [v for v in usable if v not in gone] + writes
    for old in waiting:
        _update(make, rng, f"last update {old}", old, [rng.choice(usable)] if rng.random() < 0.5 else [], usable)
    return make.problem()


def _update(make: Maker, rng: random.Random, name: str, old: int, reads: list[int], usable: list[int]) -> None:
    """The next content of a stored value, which nobody listed later reads."""
    value = make.values[old]
    new = make.value(f"{value.name}'", value.nbytes, 0, alignment=4, role=Role.OUTPUT, home=old)
    reads = [v for v in reads if v != old]
    if rng.random() < 0.8:
        make.action(name, [old, *reads], [new], Overwrite(0, 0, rng.random() < 0.7), effect=rng.random() < 0.7)
    else:
        make.action(name, reads, [new], effect=True)
    usable.remove(old)
    usable.append(new)


def priced(problem: Problem, seed: int) -> Problem:
    """With predicted times and flops, some of them 0."""
    rng = random.Random(seed)
    actions = [
        replace(a, nanoseconds=rng.choice([0, 1, 10, 100, 1000]), flops=rng.randrange(9)) for a in problem.actions
    ]
    return replace(problem, actions=tuple(actions))


def with_round_trips(problem: Problem, seed: int) -> Problem:
    """With a way to the host and back for about half of what is written on the device within the step."""
    rng = random.Random(seed)
    make = Maker(problem.regions if any(not r.on_device for r in problem.regions) else (*problem.regions, REGIONS[2]))
    make.values, make.actions = list(problem.values), list(problem.actions)
    host = next(i for i, region in enumerate(make.regions) if not region.on_device)
    for v, value in enumerate(problem.values):
        on_device = problem.regions[value.region].on_device
        if value.role is Role.TRANSIENT and on_device and problem.producers[v] and rng.random() < 0.5:
            away = make.value(f"{value.name}/host", value.nbytes, host, alignment=value.alignment)
            make.action(f"{value.name}/save", [v], [away], nanoseconds=rng.choice([0, 1, 30]))
            make.action(f"{value.name}/fetch", [away], [v], nanoseconds=rng.choice([0, 1, 30]))
    return make.problem()


def chain(forward: Sequence[int], width: int, copy: int | None = None) -> Problem:
    """A step whose backward pass reads every activation of the forward pass, and nothing dies in place; at its peak,
    the first action of the backward pass, all of them live, and two gradients.

    Args:
        forward: predicted times; others take 100 and 200, and twice as many operations as nanoseconds.
        width: bytes of each value.
        copy: predicted time of every copy to the host, and back; None: there is none.
    """
    make = Maker((Region("arena"), Region("host", on_device=False))[: 1 if copy is None else 2])
    kept = [make.value("x0", width, 0, role=Role.INPUT)]
    for i, time in enumerate(forward, 1):
        kept.append(make.value(f"x{i}", width, 0))
        make.action(f"f{i}", [kept[-2]], [kept[-1]], nanoseconds=time, flops=2 * time)
    g = make.value("g", width, 0, category=Category.GRADIENTS)
    make.action("loss", [kept[-1]], [g], nanoseconds=100, flops=200)
    for i in reversed(range(len(kept))):
        new = make.value(f"g{i}", width, 0, role=Role.TRANSIENT if i else Role.OUTPUT)
        make.action(f"b{i}", [g, kept[i]], [new], nanoseconds=200, flops=400)
        g = new
    for v in kept[1:] if copy is not None else ():
        host = make.value(f"{make.values[v].name}/host", width, 1)
        make.action(f"save {v}", [v], [host], nanoseconds=copy)
        make.action(f"fetch {v}", [host], [v], nanoseconds=copy)
    return make.problem()


def training_chain(layers: int, width: int = 1 << 20, weight: int = 1 << 18, workspace: int = 1 << 16) -> Problem:
    """A chain of linear layers, each with an activation in place: forward, loss, backward; momentum updates last."""
    make = Maker(REGIONS[:2])
    weights = [make.value(f"w{i}", weight, 0, role=Role.STORED, category=Category.PARAMETERS) for i in range(layers)]
    momenta = [
        make.value(f"m{i}", weight, 0, role=Role.STORED, category=Category.OPTIMIZER_STATE) for i in range(layers)
    ]
    x = make.value("x", width, role=Role.INPUT, category=Category.INPUTS)
    saved = [x]
    for i in range(layers):
        z = make.value(f"z{i}", width)
        make.action(f"linear{i}", [saved[-1], weights[i]], [z], workspace=workspace, workspace_region=1)
        y = make.value(f"y{i}", width)
        make.action(f"relu{i}", [z], [y], Overwrite(0, 0))
        saved.append(y)
    loss = make.value("loss", 4, role=Role.OUTPUT, category=Category.OUTPUTS)
    gradient = make.value("dy", width, category=Category.GRADIENTS)
    make.action("loss", [saved[-1]], [loss, gradient])
    gradients = []
    for i in reversed(range(layers)):
        dz = make.value(f"dz{i}", width, category=Category.GRADIENTS)
        make.action(f"relu{i}'", [gradient, saved[i + 1]], [dz], Overwrite(0, 0))
        if i:
            gradient = make.value(f"dy{i}", width, category=Category.GRADIENTS)
            make.action(f"linear{i}'x", [dz, weights[i]], [gradient], workspace=workspace, workspace_region=1)
        dw = make.value(f"dw{i}", weight, category=Category.GRADIENTS)
        make.action(f"linear{i}'w", [saved[i], dz], [dw], workspace=workspace, workspace_region=1)
        gradients.append((i, dw))
    for i, dw in gradients:
        new_m = make.value(f"m{i}'", weight, 0, role=Role.OUTPUT, home=momenta[i], category=Category.OPTIMIZER_STATE)
        new_w = make.value(f"w{i}'", weight, 0, role=Role.OUTPUT, home=weights[i], category=Category.PARAMETERS)
        pairs = (Overwrite(0, 0, True), Overwrite(1, 1, True))
        make.action(f"sgd{i}", [momenta[i], weights[i], dw], [new_m, new_w], *pairs, effect=True)
    return make.problem()


def training_net(blocks: int, width: int = 1 << 20, seed: int = 0) -> Problem:
    """Residual blocks with branches and joins, sizes that shrink by stages, normalisation with small saved vectors,
    and gradients that are summed where a value has two readers: a convolutional or transformer-like training step."""
    rng = random.Random(seed)
    make = Maker(REGIONS[:2])
    x = make.value("x", width, role=Role.INPUT, category=Category.INPUTS)
    tape: list[tuple[str, list[int], int, int, list[int]]] = []  # kind, reads, write, weight, saved extras
    stored: list[int] = []

    def layer(name: str, reads: list[int], nbytes: int, weight: int, extra: int = 0, in_place: bool = False) -> int:
        w = []
        if weight:
            w = [make.value(f"{name}.w", weight, 0, role=Role.STORED, category=Category.PARAMETERS)]
            stored.append(w[0])
        y = make.value(name, nbytes)
        extras = [make.value(f"{name}.s{k}", 256) for k in range(extra)]
        pairs = [Overwrite(0, 0)] if in_place else []
        scratch = rng.choice([0, nbytes // 8, 64 * 1000]) if weight else 0
        make.action(name, [*reads, *w], [y, *extras], *pairs, workspace=scratch, workspace_region=1)
        tape.append((name, reads, y, w[0] if w else -1, extras))
        return y

    for b in range(blocks):
        nbytes = max(width >> (2 * b // max(blocks // 2, 1)), 1024)
        a = layer(f"conv{b}a", [x], nbytes, 64 * rng.randint(10, 2000))
        a = layer(f"norm{b}a", [a], nbytes, 256, extra=2)
        a = layer(f"relu{b}a", [a], nbytes, 0, in_place=True)
        a = layer(f"conv{b}b", [a], nbytes, 64 * rng.randint(10, 2000))
        skip = x if make.values[x].nbytes == nbytes else layer(f"skip{b}", [x], nbytes, 64 * rng.randint(10, 500))
        x = layer(f"add{b}", [a, skip], nbytes, 0, in_place=True)
    loss = make.value("loss", 4, role=Role.OUTPUT, category=Category.OUTPUTS)
    cotangent = {x: make.value("dx", make.values[x].nbytes, category=Category.GRADIENTS)}
    make.action("loss", [x], [loss, cotangent[x]])
    updates = []
    for name, reads, y, w, extras in reversed(tape):
        g = cotangent.pop(y)
        for k, r in enumerate(reads):
            if make.values[r].role is Role.INPUT:
                continue
            d = make.value(f"{name}'{k}", make.values[r].nbytes, category=Category.GRADIENTS)
            needs = [g, w] if w >= 0 else [g, y] if name.startswith("relu") else [g]
            needs += [*reads, *extras] if extras else []
            make.action(f"{name}'{k}", needs, [d], *([] if w >= 0 and not extras else [Overwrite(0, 0)]))
            if r in cotangent:
                total = make.value(f"{name}'{k}+", make.values[r].nbytes, category=Category.GRADIENTS)
                make.action(f"{name}'{k}+", [cotangent[r], d], [total], Overwrite(0, 0), Overwrite(0, 1))
                d = total
            cotangent[r] = d
        if w >= 0:
            dw = make.value(f"{name}'w", make.values[w].nbytes, category=Category.GRADIENTS)
            make.action(f"{name}'w", [g, *reads], [dw], workspace=make.values[w].nbytes, workspace_region=1)
            updates.append((name, w, dw))
    for name, w, dw in updates:
        new = make.value(f"{name}.w'", make.values[w].nbytes, 0, role=Role.OUTPUT, home=w, category=Category.PARAMETERS)
        make.action(f"{name}.sgd", [w, dw], [new], Overwrite(0, 0, True), effect=True)
    return make.problem()


def joined_problem(seed: int) -> Problem:
    """Tables made of two or three parts, one behind the other, which may be made in their places; parts that are read
    again, temporaries meanwhile, and a stored value that is updated from the last table."""
    rng = random.Random(seed)
    make = Maker(REGIONS[:2])
    w = make.value("w", 256, 0, role=Role.STORED, category=Category.PARAMETERS)
    last = make.value("x", 256, role=Role.INPUT, category=Category.INPUTS)
    for t in range(rng.randint(1, 3)):
        alignment = rng.choice([32, 64])
        parts: list[int] = []
        where, offset = [], 0
        for k, nbytes in enumerate(rng.choice([64, 128, 192, 320]) for _ in range(rng.choice([2, 2, 3]))):
            source = rng.choice([last, *parts])
            if rng.random() < 0.5:
                temporary = make.value(f"m{t}.{k}", rng.choice([64, 192, 640]))
                make.action(f"m{t}.{k}", [source], [temporary], workspace=64, workspace_region=1)
                source = temporary
            parts.append(make.value(f"p{t}.{k}", nbytes, alignment=alignment))
            where.append(Part(0, k, offset))
            offset += nbytes
            make.action(f"p{t}.{k}", [source], [parts[-1]], workspace=rng.choice([0, 64]), workspace_region=1)
        table = make.value(f"t{t}", offset + rng.choice([0, 0, 64]))
        scratch = rng.choice([0, 0, 64])
        make.action(f"join{t}", parts, [table], parts=tuple(where), workspace=scratch, workspace_region=1)
        last = make.value(f"y{t}", 256)
        make.action(f"y{t}", [table, *rng.sample(parts, rng.random() < 0.2), w], [last])
    out = make.value("out", 64, role=Role.OUTPUT, category=Category.OUTPUTS)
    make.action("out", [last, table], [out])
    new = make.value("w'", 256, 0, role=Role.OUTPUT, home=w, category=Category.PARAMETERS)
    make.action("update", [w, last], [new], Overwrite(0, 0, True), effect=True)
    return make.problem()


def rectangles(rng: random.Random, width: int, height: int, n: int) -> list[tuple[int, int, int, int]]:
    """A rectangle cut n - 1 times, at random: (left, right, bottom, top) of the pieces."""
    pieces = [(0, width, 0, height)]
    while len(pieces) < n:
        a, b, c, d = pieces.pop(rng.randrange(len(pieces)))
        if rng.random() < 0.5 and b - a > 1:
            t = rng.randint(a + 1, b - 1)
            pieces += [(a, t, c, d), (t, b, c, d)]
        elif d - c > 1:
            y = rng.randint(c + 1, d - 1)
            pieces += [(a, b, c, y), (a, b, y, d)]
        else:
            pieces.append((a, b, c, d))
    return pieces


def wiring(
    seed: int | str, actions: int, window: int, sigma: float = 0.5, far: float | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lower, upper and size of the values and workspaces of an irregular graph: each action reads one to three values,
    half of them such that nobody has read yet, among the last `window`, or with the probability `far` anywhere before;
    a third of the actions need workspace. Sizes are lognormal, in multiples of 64."""
    rng = random.Random(seed)
    lower, upper, size = list(range(actions)), [i + 1 for i in range(actions)], []
    unread: list[int] = []
    for i in range(actions):
        for _ in range(rng.randint(1, 3) if i else 0):
            fresh = unread[-window:] if rng.random() < 0.5 else None
            if fresh:
                read = rng.choice(fresh)
            elif far is not None and rng.random() < far:
                read = rng.randrange(i)
            else:
                read = max(0, i - rng.randint(1, window))
            upper[read] = i + 1
            if read in unread:
                unread.remove(read)
        unread = [*unread[-4 * window :], i]
        size.append(64 * max(1, round(rng.lognormvariate(6, sigma))))
    for i in range(actions):
        if rng.random() < 0.3:
            lower.append(i)
            upper.append(i + 1)
            size.append(64 * max(1, round(rng.lognormvariate(5, sigma))))
    return np.array(lower), np.array(upper), np.array(size)
