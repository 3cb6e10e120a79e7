"""Several ranks train as one process does on all of their samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import foreplan as fp
from tests.ranks.threads import Thread, run

MODELS = {
    "mlp": "mlp:width=24,layers=2,batch={batch}",
    "gpt2": "gpt2_small:layers=2,width=32,heads=2,seq=8,vocabulary=61,batch={batch}",
}


def trained(text: str, batch: int, ranks: int, steps: int, optimizer: Any, target: str, **options: Any) -> Any:
    """Losses and weights of each rank after some steps on random batches, each rank with its own part of them."""
    model = fp.models.build(MODELS[text].format(batch=batch // ranks))
    compiled = fp.compile(model, fp.losses.cross_entropy, optimizer, target=target, ranks=ranks, **options)
    rng = np.random.default_rng(3)
    batches = []
    for _ in range(steps):
        arrays = {}
        for slot in compiled.program.required_inputs:
            shape = (batch, *slot.operand.type.shape[1:])
            is_float = slot.operand.type.dtype.is_float
            arrays[slot.name] = rng.standard_normal(shape, np.float32) if is_float else rng.integers(0, 10, shape)
        batches.append(arrays)

    def job(world: Thread) -> tuple[list[float], dict[str, np.ndarray], Any]:
        session = compiled.bind(seed=1)
        own = slice(world.rank * batch // ranks, (world.rank + 1) * batch // ranks)
        losses = [session.step({name: x[own] for name, x in arrays.items()}).loss for arrays in batches]
        return losses, dict(session.parameters), world.log

    if ranks == 1:
        session = compiled.bind(seed=1)
        return [([session.step(arrays).loss for arrays in batches], dict(session.parameters), [])]
    return run(ranks, job)


@pytest.mark.parametrize("target", ["numpy", "cpu"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("text", MODELS)
def test_ranks_train_as_one_process(text: str, ranks: int, target: str) -> None:
    ((losses, weights, _),) = trained(text, 12, 1, 3, fp.optim.AdamW(0.01), target)
    found = trained(text, 12, ranks, 3, fp.optim.AdamW(0.01), target)
    for each, others, log in found:
        assert each == found[0][0] and log == found[0][2] and log
        np.testing.assert_allclose(each, losses, rtol=2e-5)
        for name, weight in others.items():
            np.testing.assert_array_equal(weight, found[0][1][name], name)
            np.testing.assert_allclose(weight, weights[name], atol=1e-4, err_msg=name)
