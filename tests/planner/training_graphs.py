"""Small training steps on which recomputation can be solved exactly: lowered from models, and random ones."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import foreplan as fp
from foreplan.frontend import Tensor, nn, spec, trace
from foreplan.planner import Category, Overwrite, Part, Problem, Role
from tests.planner.problems import REGIONS, Maker


def lowered(model: Callable[[Tensor], dict[str, Tensor]], *shape: int) -> Problem:
    """The training step of a traced classifier with plain gradient descent, on the NumPy target."""
    graph = trace(model, spec(shape), name="model")
    return fp.lower(fp.differentiate(graph, fp.losses.cross_entropy, fp.optim.SGD(0.1)))


def perceptron(layers: int, batch: int = 1024, width: int = 64) -> Problem:
    """Linear layers with ReLU."""

    def model(x: Tensor) -> dict[str, Tensor]:
        for i in range(layers):
            x = nn.relu(nn.linear(x, width, name=f"l{i}"))
        return {"logits": nn.linear(x, 10, name="out")}

    return lowered(model, batch, 16)


def tapering(layers: int, batch: int = 1024) -> Problem:
    """Linear layers with GELU, each narrower than the last."""

    def model(x: Tensor) -> dict[str, Tensor]:
        for i in range(layers):
            x = nn.gelu(nn.linear(x, 128 >> i // 2, bias=False, name=f"l{i}"))
        return {"logits": nn.linear(x, 10, name="out")}

    return lowered(model, batch, 32)


def convolutions(layers: int) -> Problem:
    """3×3 convolutions with batch normalisation and ReLU."""

    def model(x: Tensor) -> dict[str, Tensor]:
        for i in range(layers):
            x = nn.relu(nn.batch_norm(nn.conv(x, 16, 3, padding=1, bias=False, name=f"c{i}"), name=f"n{i}"))
        return {"logits": nn.linear(nn.global_avg_pool(x), 10, name="out")}

    return lowered(model, 16, 3, 16, 16)


def residual(blocks: int) -> Problem:
    """Residual blocks of two 3×3 convolutions, the first normalised."""

    def model(x: Tensor) -> dict[str, Tensor]:
        x = nn.conv(x, 16, 3, padding=1, bias=False, name="stem")
        for i in range(blocks):
            y = nn.relu(nn.batch_norm(nn.conv(x, 16, 3, padding=1, bias=False, name=f"a{i}"), name=f"n{i}"))
            x = nn.relu(x + nn.conv(y, 16, 3, padding=1, bias=False, name=f"b{i}"))
        return {"logits": nn.linear(nn.global_avg_pool(x), 10, name="out")}

    return lowered(model, 16, 3, 16, 16)


def transformer(layers: int) -> Problem:
    """Pre-norm encoder layers of width 32."""

    def model(x: Tensor) -> dict[str, Tensor]:
        for i in range(layers):
            with nn.scope(f"layer{i}"):
                x = x + nn.multi_head_attention(nn.layer_norm(x, name="n1"), heads=4, name="attention")
                y = nn.gelu(nn.linear(nn.layer_norm(x, name="n2"), 128, bias=False, name="up"))
                x = x + nn.linear(y, 32, bias=False, name="down")
        return {"logits": nn.linear(x.mean(axis=1), 10, name="out")}

    return lowered(model, 8, 64, 32)


def small_unet() -> Problem:
    """Two levels of two convolutions: down by pooling, up by nearest neighbours, joined with what came before."""

    def conv(x: Tensor, channels: int, name: str) -> Tensor:
        return nn.relu(nn.conv(x, channels, 3, padding=1, bias=False, name=name))

    def model(x: Tensor) -> dict[str, Tensor]:
        a = conv(conv(x, 16, "down0a"), 8, "down0b")
        b = conv(nn.max_pool(a, 2), 16, "down1")
        c = conv(conv(nn.concat([a, nn.upsample(b, 2)]), 16, "up0a"), 16, "up0b")
        return {"logits": nn.linear(nn.global_avg_pool(c), 10, name="out")}

    return lowered(model, 8, 3, 32, 32)


def random_training(seed: int, layers: int, *, joins: bool = False) -> Problem:
    """A forward chain with skips, its backward pass with sums where a value has several readers, updates; random sizes,
    costs and workspaces, and what each backward action needs of the forward pass at random; with `joins`, a third of
    the layers are concatenations."""
    rng = random.Random(seed)
    make = Maker(REGIONS[:2])
    size = lambda: 64 * rng.choice([1, 8, 16, 16, 16, 32])  # noqa: E731
    price = lambda: rng.choice([1, 2, 5, 10, 20, 50])  # noqa: E731
    scratch = lambda: 64 * rng.choice([0, 0, 0, 1, 4])  # noqa: E731
    values = [make.value("x", size(), role=Role.INPUT, category=Category.INPUTS)]
    tape: list[tuple[int, list[int], list[int], int, bool]] = []  # layer, reads, results, weight, element-wise

    def run(name: str, reads: list[int], writes: list[int], *pairs: Overwrite, **more: object) -> None:
        fits = [p for p in pairs if make.values[reads[p.read]].nbytes >= make.values[writes[p.write]].nbytes]
        more |= {"nanoseconds": price(), "workspace": scratch(), "workspace_region": 1}
        make.action(name, reads, writes, *fits, **more)

    for i in range(layers):
        reads = [values[-1]]
        if len(values) > 1 and rng.random() < 0.4:
            reads.append(rng.choice(values[:-1]))
        if joins and len(values) > 1 and rng.random() < 0.35:
            reads = [values[-1], rng.choice(values[:-1])]
            first, second = (make.values[v].nbytes for v in reads)
            results = [make.value(f"y{i}", first + second)]
            run(f"join{i}", reads, results, parts=(Part(0, 0, 0), Part(0, 1, first)))
            tape.append((i, reads, results, -1, False))
            values.append(results[0])
            continue
        simple = rng.random() < 0.4
        weight = -1 if simple else make.value(f"w{i}", 256, 0, role=Role.STORED, category=Category.PARAMETERS)
        nbytes = make.values[reads[0]].nbytes if simple else size()
        results = [make.value(f"y{i}", nbytes)]
        results += [make.value(f"s{i}", 64)] if rng.random() < 0.2 else []
        run(f"f{i}", [*reads, weight] if weight >= 0 else reads, results, *[Overwrite(0, 0)] * simple)
        tape.append((i, reads, results, weight, simple))
        values.append(results[0])
    gradient = {values[-1]: make.value("dy", make.values[values[-1]].nbytes, category=Category.GRADIENTS)}
    run("loss", [values[-1]], [make.value("loss", 64, role=Role.OUTPUT), gradient[values[-1]]])
    for i, reads, results, weight, simple in reversed(tape):
        g = gradient.pop(results[0])
        for k, v in enumerate(dict.fromkeys(reads)):
            if make.values[v].role is Role.INPUT:
                continue
            saved = [u for u in [*reads, results[0]] if rng.random() < 0.4] + results[1:]
            needs = list(dict.fromkeys([g, *saved, *([weight] if weight >= 0 else [])]))
            d = make.value(f"d{i}.{k}", make.values[v].nbytes, category=Category.GRADIENTS)
            run(f"b{i}.{k}", needs, [d], *[Overwrite(0, 0)] * simple)
            if v in gradient:
                total = make.value(f"t{i}.{k}", make.values[v].nbytes, category=Category.GRADIENTS)
                run(f"sum{i}.{k}", [gradient[v], d], [total], Overwrite(0, 0), Overwrite(0, 1))
                d = total
            gradient[v] = d
        if weight >= 0:
            dw = make.value(f"dw{i}", 256, category=Category.GRADIENTS)
            run(f"w{i}'", [g, reads[0]], [dw])
            new = make.value(f"w{i}+", 256, 0, role=Role.OUTPUT, home=weight, category=Category.PARAMETERS)
            run(f"update{i}", [weight, dw], [new], Overwrite(0, 0, True), effect=True)
    return make.problem()


def nothing_in_place(problem: Problem) -> Problem:
    """The same without optional overwrites."""
    actions = [replace(a, overwrites=tuple(p for p in a.overwrites if p.required)) for a in problem.actions]
    return Problem(problem.values, tuple(actions), problem.regions)


JOINED: dict[str, Callable[[], Problem]] = {
    f"joined{seed}": lambda seed=seed: random_training(seed, 5 + seed % 5, joins=True)  # type: ignore[misc]
    for seed in range(24)
}
GRAPHS: dict[str, Callable[[], Problem]] = {
    "perceptron4": lambda: perceptron(4),
    "perceptron6": lambda: perceptron(6),
    "tapering5": lambda: tapering(5),
    "convolutions3": lambda: convolutions(3),
    "residual1": lambda: residual(1),
    "residual2": lambda: residual(2),
    "transformer1": lambda: transformer(1),
    "unet": small_unet,
    **{f"random{seed}": lambda seed=seed: random_training(seed, 6 + seed % 7) for seed in range(16)},  # type: ignore[misc]
}
"""By name; each is a function without arguments."""
