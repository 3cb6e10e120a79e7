"""Batch normalisation over ranks beside PyTorch's over all samples, which is what its SyncBatchNorm computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make setup-torch")

import foreplan as fp  # noqa: E402
from tests.ranks.threads import Thread, run  # noqa: E402

nn = torch.nn
STEPS, SAMPLES = 5, 12


def layers(axes: int, momentum: float) -> Any:
    """Two of them, over so many axes, and a head."""
    norm = getattr(nn, f"BatchNorm{max(1, axes)}d")
    make = nn.Linear if axes == 0 else getattr(nn, f"Conv{axes}d")
    more = (3,) if axes else ()
    parts = [make(3, 6, *more, bias=False), norm(6, momentum=momentum), nn.ReLU()]
    parts += [make(6, 8, *more, bias=False), norm(8, eps=1e-3), nn.ReLU()]
    return nn.Sequential(*parts, nn.Flatten(), nn.Linear(8 * 2**axes, 5))


@pytest.mark.parametrize("axes", [0, 1, 2, 3])
@pytest.mark.parametrize(("ranks", "target"), [(2, "numpy"), (3, "cpu:threads=1")])
def test_ranks_train_as_pytorch_does_on_all_samples(ranks: int, target: str, axes: int) -> None:
    torch.manual_seed(axes)
    module, rng = layers(axes, 0.3), np.random.default_rng(axes)
    batches = [
        (rng.standard_normal((SAMPLES, 3, *[6] * axes), np.float32) + 1, rng.integers(0, 5, SAMPLES))
        for _ in range(STEPS)
    ]
    share = SAMPLES // ranks
    graph = fp.from_torch(module, torch.from_numpy(batches[0][0][:share]))
    options: dict[str, Any] = {"target": target, "ranks": ranks, "batch_norm": "sync"}
    step = fp.compile(graph, fp.losses.cross_entropy, fp.optim.Momentum(0.05, 0.9), **options)
    names = [slot.name for slot in step.program.inputs if slot.init is None]

    def job(world: Thread) -> tuple[list[float], dict[str, Any]]:
        session, own = step.bind(), slice(world.rank * share, (world.rank + 1) * share)
        losses = [session.step({name: x[own] for name, x in zip(names, batch)}).loss for batch in batches]
        home = layers(axes, 0.3)
        session.to_torch(home)
        return losses, home.state_dict()

    found = run(ranks, job)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    module.train()
    losses = []
    for x, labels in batches:
        loss = nn.functional.cross_entropy(module(torch.from_numpy(x)), torch.from_numpy(labels))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    for of_rank, state in found:
        assert of_rank == pytest.approx(losses, rel=2e-4)
        for name, theirs in module.state_dict().items():
            np.testing.assert_allclose(state[name], theirs, rtol=2e-3, atol=2e-4, err_msg=name)
