"""Train a small DLRM on scikit-learn's table of patients: measured numbers, and categories that have embeddings."""

from __future__ import annotations

import numpy as np
from data import Split, batches, patients
from loop import fit

import foreplan as fp
from foreplan.base.units import format_bytes

BATCH, EPOCHS = 65, 10
STEPS = 7  # of an epoch: 455 patients to train on
BINS = 16  # rows of each table
SIZES = {"dense": 10, "tables": 20, "rows": BINS, "width": 8, "hidden": 64}
LIMIT = 0.92


def inputs(part: Split, pick: np.ndarray) -> dict[str, np.ndarray]:
    """What the model reads of some patients."""
    dense, categories, _, _ = part
    return {"dense": dense[pick], "categories": categories[pick]}


def train(epochs: int, steps: int) -> tuple[list[float], float]:
    """The mean loss of each epoch of so many steps, and the share of the test's patients that are classified right."""
    known, test = patients(BINS)
    schedule = fp.optim.cosine(3e-3, steps=epochs * steps)
    # One step is forward, backward and update. All its memory is planned here, before it runs.
    step = fp.compile(
        fp.models.dlrm(BATCH, **SIZES), fp.losses.binary_cross_entropy, fp.optim.Adam(schedule), target="cpu"
    )
    print(f"a step takes an arena of {format_bytes(step.plan.arena_bytes)}, tables and moments included")
    session = step.bind(seed=0)

    labels = known[2]
    order = batches(len(labels), BATCH, epochs * steps)  # more passes than are needed
    feeds = ({**inputs(known, pick), "target": labels[pick]} for pick in order)
    losses = fit(session, feeds, epochs, steps)

    everyone = np.arange(len(test[2]))
    logits = session.evaluate(inputs(test, everyone)).outputs["logits"]  # in the arena of the step
    accuracy = float(((logits > 0) == test[2]).mean())
    print(f"accuracy {accuracy:.1%} on {len(everyone)} patients that it has not seen")
    return losses, accuracy


def main() -> None:
    """Train, and fail where the model learned too little."""
    _, accuracy = train(EPOCHS, STEPS)
    if accuracy < LIMIT:
        raise SystemExit(f"the accuracy is below {LIMIT}")


if __name__ == "__main__":
    main()
