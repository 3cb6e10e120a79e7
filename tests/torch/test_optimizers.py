"""Optimizers beside PyTorch's and optax's: the weights after each of several steps, and learning rates step by step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make setup-torch")

import foreplan as fp  # noqa: E402
from foreplan.passes.optimizer import Optimizer  # noqa: E402
from tests.passes.quartic import SHAPES, batches, quartic, weights  # noqa: E402
from tests.profile import pick  # noqa: E402

STEPS = 6
SEEDS = range(pick(1, 2, 6))
Draw = Callable[..., float]


def rmsprop(draw: Draw) -> tuple[Optimizer, Any, dict[str, Any]]:
    given = {"momentum": draw(0.1, 0.9), "alpha": draw(0.5, 0.99), "weight_decay": draw(0, 0.1), "centered": True}
    return fp.optim.RMSprop(0.01, **given), torch.optim.RMSprop, {"lr": 0.01, **given}


def plain_rmsprop(draw: Draw) -> tuple[Optimizer, Any, dict[str, Any]]:
    given = {"alpha": draw(0.5, 0.99)}
    return fp.optim.RMSprop(0.02, epsilon=1e-3, **given), torch.optim.RMSprop, {"lr": 0.02, "eps": 1e-3, **given}


def adagrad(draw: Draw) -> tuple[Optimizer, Any, dict[str, Any]]:
    first, decay = draw(0, 0.5), draw(0, 0.1)
    given = {"lr": 0.05, "initial_accumulator_value": first, "weight_decay": decay}
    return fp.optim.Adagrad(0.05, initial=first, weight_decay=decay), torch.optim.Adagrad, given


def nadam(draw: Draw) -> tuple[Optimizer, Any, dict[str, Any]]:
    given = {"momentum_decay": draw(0.001, 0.1), "weight_decay": draw(0, 0.1)}
    one, two = draw(0.5, 0.95), draw(0.9, 0.999)
    ours = fp.optim.NAdam(0.01, beta1=one, beta2=two, **given)
    return ours, torch.optim.NAdam, {"lr": 0.01, "betas": (one, two), **given}


def adafactor(draw: Draw) -> tuple[Optimizer, Any, dict[str, Any]]:
    given = {"lr": draw(0.1, 0.9), "beta2_decay": -draw(0.3, 1.0), "weight_decay": draw(0, 0.1), "d": draw(1, 1.05)}
    epsilons = (None, draw(1e-4, 1e-2))
    ours = fp.optim.Adafactor(
        given["lr"], given["beta2_decay"], None, epsilons[1], given["d"], weight_decay=given["weight_decay"]
    )
    return ours, torch.optim.Adafactor, {**given, "eps": epsilons}


CASES = [rmsprop, plain_rmsprop, adagrad, nadam, adafactor]


def walk(optimizer: Optimizer, start: dict[str, np.ndarray], given: list[dict[str, np.ndarray]]) -> list[Any]:
    """Our weights after each step."""
    session = fp.compile(quartic("float64"), optimizer=optimizer).bind()
    for name, array in start.items():
        session.parameters[name] = array
    found = []
    for batch in given:
        session.step(batch)
        found.append(dict(session.parameters))
    return found


def assert_alike(ours: list[Any], theirs: list[Any], start: dict[str, np.ndarray], far: float = 2e-6) -> None:
    """Beside how far each weight has moved."""
    for i, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        for name, array in other.items():
            scale = np.abs(array - start[name]).max()
            assert scale > 0
            np.testing.assert_allclose(mine[name], array, rtol=0, atol=far * scale, err_msg=f"{name}, step {i + 1}")


def in_torch(make: Any, options: dict[str, Any], start: dict[str, np.ndarray], given: list[Any]) -> list[Any]:
    """PyTorch's weights after each step."""
    parameters = {name: torch.nn.Parameter(torch.tensor(array)) for name, array in start.items()}
    optimizer = make(parameters.values(), **options)
    found = []
    for batch in given:
        optimizer.zero_grad()
        loss = sum(((p - torch.tensor(batch[f"x_{name}"])) ** 4).sum() for name, p in parameters.items())
        loss.backward()
        optimizer.step()
        found.append({name: p.detach().numpy().copy() for name, p in parameters.items()})
    return found


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("case", CASES)
def test_steps_are_those_of_pytorch(case: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    ours, theirs, options = case(lambda low, high: float(rng.uniform(low, high)))
    start, given = weights(rng), batches(rng, STEPS)
    assert_alike(walk(ours, start, given), in_torch(theirs, options, start, given), start)


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_muon_is_that_of_pytorch(adjust: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch iterates in bfloat16; here in float64, so that rounding hides nothing."""
    plain = torch.Tensor.to

    def to(x: Any, *given: Any, copy: bool = False, **named: Any) -> Any:
        return x.clone() if copy else plain(x, *given, **named)

    monkeypatch.setattr(torch.Tensor, "to", to)
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda x: x.clone())  # as 2.13 converts
    rng = np.random.default_rng(1)
    start, given = weights(rng), batches(rng, STEPS)
    matrices = [name for name, shape in SHAPES.items() if len(shape) == 2]
    assert len({shape[0] < shape[1] for shape in SHAPES.values() if len(shape) == 2}) == 2
    for nesterov, decay in ((True, 0.1), (False, 0.0)):
        options = {"lr": 0.02, "weight_decay": decay, "momentum": 0.8, "nesterov": nesterov, "adjust_lr_fn": adjust}
        ours = walk(fp.optim.Muon(0.02, 0.8, decay, nesterov, adjust=adjust, adamw_rate=0.5), start, given)
        theirs = in_torch(torch.optim.Muon, options, {name: start[name] for name in matrices}, given)
        assert_alike(ours, theirs, start)
        others = {name: array for name, array in start.items() if name not in matrices}
        theirs = in_torch(torch.optim.AdamW, {"lr": 0.01, "weight_decay": decay}, others, given)
        assert_alike(ours, theirs, start)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ["lion", "lamb"])
def test_steps_are_those_of_optax(name: str, seed: int) -> None:
    optax = pytest.importorskip("optax", reason="Optax is not installed: make setup-torch")
    import jax

    rng = np.random.default_rng(seed)
    one, two, decay = (float(rng.uniform(low, high)) for low, high in ((0.5, 0.95), (0.9, 0.999), (0, 0.2)))
    kind = {"lion": fp.optim.Lion, "lamb": fp.optim.LAMB}[name]
    start, given = weights(rng), batches(rng, STEPS)
    start["vector"][:] = 0  # whose norm is no factor
    with jax.enable_x64(True):
        theirs = getattr(optax, name)(0.03, b1=one, b2=two, weight_decay=decay)
        parameters, found = start, []
        state = theirs.init(parameters)
        for batch in given:
            gradients = {key: 4 * (p - batch[f"x_{key}"]) ** 3 for key, p in parameters.items()}
            changes, state = theirs.update(gradients, state, parameters)
            parameters = {key: np.asarray(p + changes[key]) for key, p in parameters.items()}
            found.append(parameters)
    assert_alike(walk(kind(0.03, beta1=one, beta2=two, weight_decay=decay), start, given), found, start)


def test_averages_and_clipped_values_are_those_of_pytorch() -> None:
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    rng = np.random.default_rng(5)
    start, given = weights(rng), batches(rng, STEPS)
    session = fp.compile(quartic("float64"), optimizer=fp.optim.SGD(0.01, clip_value=0.7, ema=0.8)).bind()
    for name, array in start.items():
        session.parameters[name] = array
    module = torch.nn.Module()
    module.all = torch.nn.ParameterDict({name: torch.nn.Parameter(torch.tensor(a)) for name, a in start.items()})
    average = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    for batch in given:
        session.step(batch)
        optimizer.zero_grad()
        sum(((p - torch.tensor(batch[f"x_{name}"])) ** 4).sum() for name, p in module.all.items()).backward()
        torch.nn.utils.clip_grad_value_(module.parameters(), 0.7)
        optimizer.step()
        average.update_parameters(module)
        averages = session.state_dict(ema=True)
        for name, p in module.all.items():
            np.testing.assert_allclose(session.parameters[name], p.detach().numpy(), rtol=1e-6)
            np.testing.assert_allclose(averages[name], average.module.all[name].detach().numpy(), rtol=1e-6)
