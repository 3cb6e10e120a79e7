"""Updates of rows beside PyTorch's for `nn.Embedding(sparse=True)`: tables and what is kept for them, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make setup-torch")

import foreplan as fp  # noqa: E402
from foreplan.passes.optimizer.site import SUMMED  # noqa: E402
from tests.passes.test_rows import Arrays, Shape, drawn, given, model  # noqa: E402
from tests.profile import pick  # noqa: E402

STEPS, RATE = 5, 0.05
SEEDS = range(pick(2, 6, 40))
TARGETS = {"numpy": "numpy", "cpu": "cpu:threads=1"}
KEPT = {"exp_avg": "first_moment", "exp_avg_sq": "second_moment", "sum": "sum_of_squares"}


def case(name: str, rng: np.random.Generator) -> tuple[Any, Any, Any]:
    """Our optimizer; PyTorch's of the table, and of the other parameter."""
    first = float(rng.uniform(0, 0.5))
    betas, epsilon = (float(rng.uniform(0.5, 0.95)), float(rng.uniform(0.9, 0.999))), float(rng.choice([1e-8, 1e-2]))
    if name == "adagrad":
        ours, theirs, options = fp.optim.Adagrad, torch.optim.Adagrad, {"initial_accumulator_value": first}
        return ours(RATE, first, epsilon), (theirs, {**options, "eps": epsilon}), (theirs, {**options, "eps": epsilon})
    both = {"betas": betas, "eps": epsilon}
    return fp.optim.SparseAdam(RATE, *betas, epsilon), (torch.optim.SparseAdam, both), (torch.optim.Adam, both)


def in_torch(start: Arrays, batches: Sequence[Arrays], table: Any, other: Any, sparse: bool) -> list[Arrays]:
    """Parameters after each step, and what the table's optimizer keeps of the table."""
    embedding = torch.nn.Embedding(*start["table"].shape, sparse=sparse)
    embedding.weight = torch.nn.Parameter(torch.tensor(start["table"]))
    scale = torch.nn.Parameter(torch.tensor(start["scale"]))
    optimizers = [make([each], lr=RATE, **how) for each, (make, how) in ((embedding.weight, table), (scale, other))]
    found = []
    for batch in batches:
        for each in optimizers:
            each.zero_grad()
        loss = 0.0
        for i in range(len(batch) // 2):
            read = embedding(torch.tensor(batch[f"i{i}"] % len(start["table"])))
            loss = loss + ((read * scale - torch.tensor(batch[f"w{i}"])) ** 2).sum()
        loss.backward()
        for each in optimizers:
            each.step()
        found.append({"table": embedding.weight.detach().numpy().copy(), "scale": scale.detach().numpy().copy()})
        for key, value in optimizers[0].state[embedding.weight].items():
            if key in KEPT:
                found[-1][f"table/{KEPT[key]}"] = value.numpy().copy()
    return found


def beside(
    name: str, seed: int, target: str, dtype: str, lookups: Sequence[Shape], table: Shape, sparse: bool, far: float
) -> None:
    """Compare each step with PyTorch's; what no step has read is as it was, bit for bit."""
    rng = np.random.default_rng(seed)
    optimizer, theirs, other = case(name, rng)
    start = {"table": rng.normal(size=table).astype(dtype), "scale": rng.normal(size=table[1:]).astype(dtype)}
    batches = [given(rng, lookups, table, dtype) for _ in range(STEPS)]
    session = fp.compile(model(lookups, table, dtype), optimizer=optimizer, target=TARGETS[target]).bind()
    for key, array in start.items():
        session.parameters[key] = array
    before = {key: np.array(session.stored[key]) for key in session.stored if key.startswith("table")}
    for i, (batch, wanted) in enumerate(zip(batches, in_torch(start, batches, theirs, other, sparse))):
        session.step(batch)
        read = np.concatenate([batch[f"i{j}"].reshape(-1) for j in range(len(lookups))]) % table[0]
        left = np.setdiff1d(np.arange(table[0]), read)
        assert len(before) == (2 if name == "adagrad" else 3)
        for key, array in before.items():
            now = np.array(session.stored[key])
            assert now[left].tobytes() == array[left].tobytes(), f"{key}, step {i + 1}"
            before[key] = now
        for key, array in wanted.items():
            scale = max(np.abs(array - start.get(key, 0)).max(), np.abs(array).max() * 1e-3)
            np.testing.assert_allclose(
                session.stored[key], array, rtol=0, atol=far * scale, err_msg=f"{key}, step {i + 1}"
            )


@pytest.mark.parametrize(("dtype", "far"), [("float64", 3e-6), ("float32", 3e-4)])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["sparse_adam", "adagrad"])
@pytest.mark.parametrize("seed", SEEDS)
def test_rows_are_updated_as_in_pytorch(seed: int, name: str, target: str, dtype: str, far: float) -> None:
    """Adagrad's tables both with gradients that are sparse there, and with whole ones."""
    rng = np.random.default_rng(seed)
    lookups, table = drawn(rng, SUMMED if seed % 2 else 1)
    for sparse in (True, False) if name == "adagrad" else (True,):
        beside(name, seed, target, dtype, lookups, table, sparse, far)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("seed", SEEDS)
def test_sparse_adam_of_more_rows_than_the_table_has(seed: int, target: str) -> None:
    """Which rows are read still matters where the whole gradient is made."""
    rng = np.random.default_rng(seed)
    lookups, table = [(int(rng.integers(9, 30)),), (3, 4)], (8, int(rng.integers(1, 9)))
    beside("sparse_adam", seed, target, "float32", lookups, table, True, 3e-4)
