"""Train a small Llama on the characters of Python's own help, and measure it on a part it has not seen."""

from __future__ import annotations

import math

import numpy as np
from data import batches, characters, unigram_perplexity
from loop import fit

import foreplan as fp
from foreplan.base.units import format_bytes

BATCH, LENGTH = 16, 64
SIZES = {"seq": LENGTH, "layers": 3, "width": 128, "heads": 4, "kv_heads": 2, "features": 320, "vocabulary": 128}
EPOCHS, STEPS = 5, 100
LIMIT = 5.5


def model(batch: int) -> fp.Graph:
    """The model of the zoo at small sizes. Its rotary embedding is that of a model for short texts."""
    return fp.models.llama(batch=batch, base=10000.0, stretch=1.0, **SIZES)


def split(rows: np.ndarray) -> dict[str, np.ndarray]:
    """What the model reads, and what it is to say: each character is followed by its target."""
    return {"tokens": rows[:, :-1].copy(), "target": rows[:, 1:].copy()}


def train(epochs: int, steps: int) -> tuple[list[float], float]:
    """The mean loss of each epoch of so many steps, and the perplexity on the test's part of the text."""
    train_rows, test_rows = characters(LENGTH + 1)
    schedule = fp.optim.cosine(3e-3, steps=epochs * steps, warmup=epochs * steps // 20)
    optimizer = fp.optim.AdamW(schedule, weight_decay=0.1, decay="matrices", clip_norm=1.0)
    step = fp.compile(model(BATCH), fp.losses.cross_entropy, optimizer, target="cpu:threads=1")
    print(f"a step takes an arena of {format_bytes(step.plan.arena_bytes)}, weights and moments included")
    session = step.bind(seed=0)

    order = batches(len(train_rows), BATCH, 1 + epochs * steps * BATCH // len(train_rows))
    losses = fit(session, (split(train_rows[pick]) for pick in order), epochs, steps)

    picks = batches(len(test_rows), BATCH, 1)
    test = [session.evaluate(split(test_rows[pick]), outputs=[]).loss for pick in picks]
    perplexity = math.exp(np.mean(test))
    print(
        f"perplexity {perplexity:.2f} a character; by frequencies alone {unigram_perplexity(train_rows, test_rows):.2f}"
    )
    return losses, perplexity


def main() -> None:
    """Train, and fail where the model learned too little."""
    _, perplexity = train(EPOCHS, STEPS)
    if perplexity > LIMIT:
        raise SystemExit(f"the perplexity is above {LIMIT}")


if __name__ == "__main__":
    main()
