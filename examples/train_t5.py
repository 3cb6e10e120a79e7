"""Train a small T5 as it was pretrained: to fill in spans that are cut out of a text, here of Python's own help."""

from __future__ import annotations

import numpy as np
from data import batches, characters
from loop import fit

import foreplan as fp
from foreplan.base.units import format_bytes

BATCH, LENGTH = 32, 64
SPANS, CUT = (
    4,
    32,
)  # the spans that are cut out of LENGTH characters, and their characters in all: more than the paper's
START, SENTINEL, VOCABULARY = 0, 128, 128 + SPANS + 1  # a sentinel for each span, and one that ends the answer
SIZES = {"layers": 2, "width": 96, "heads": 4, "depth": 24, "features": 256, "vocabulary": VOCABULARY}
EPOCHS, STEPS = 5, 120
LIMIT = 2.0


def model() -> fp.Graph:
    """The model of the zoo at small sizes. It reads the text with its gaps and the answer up to each position."""
    return fp.models.t5_small(batch=BATCH, seq=LENGTH - CUT + SPANS, decoder_seq=CUT + SPANS + 1, **SIZES)


def pieces(total: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """Random whole numbers of at least 1 with this sum."""
    cuts = np.sort(rng.choice(total - 1, count - 1, replace=False)) + 1
    return np.diff(cuts, prepend=0, append=total)


def corrupted(row: np.ndarray, rng: np.random.Generator) -> tuple[list[int], list[int]]:
    """The text, where a sentinel stands for each span, and the answer: each sentinel with its span behind it."""
    read: list[int] = []
    answer: list[int] = []
    at = 0
    for i, (kept, cut) in enumerate(zip(pieces(LENGTH - CUT, SPANS, rng), pieces(CUT, SPANS, rng))):
        read += [*row[at : at + kept], SENTINEL + i]
        answer += [SENTINEL + i, *row[at + kept : at + kept + cut]]
        at += kept + cut
    return read, [*answer, SENTINEL + SPANS]


def split(rows: np.ndarray, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """The batch of a step. The decoder reads the answer one position late, behind a start."""
    read, answer = (np.array(part, np.int64) for part in zip(*(corrupted(row, rng) for row in rows)))
    late = np.concatenate([np.full((len(rows), 1), START), answer[:, :-1]], 1)
    return {"tokens": read, "decoder_tokens": late, "target": answer}


def train(epochs: int, steps: int) -> tuple[list[float], float]:
    """The mean loss of each epoch of so many steps, and the loss on the test's part of the text."""
    train_rows, test_rows = characters(LENGTH)
    schedule = fp.optim.cosine(5e-2, steps=epochs * steps, warmup=epochs * steps // 20)
    optimizer = fp.optim.Adafactor(schedule)  # as the paper's
    step = fp.compile(model(), fp.losses.cross_entropy, optimizer, target="cpu:threads=1")
    print(f"a step takes an arena of {format_bytes(step.plan.arena_bytes)}, weights and moments included")
    session = step.bind(seed=0)

    rng = np.random.default_rng(0)
    order = batches(len(train_rows), BATCH, 1 + epochs * steps * BATCH // len(train_rows))
    losses = fit(session, (split(train_rows[pick], rng) for pick in order), epochs, steps)

    tests = [split(test_rows[pick], rng) for pick in batches(len(test_rows), BATCH, 1)]
    loss = float(np.mean([session.evaluate(test, outputs=[]).loss for test in tests]))
    answers = np.concatenate([test["target"] for test in tests])
    shares = np.bincount(answers.ravel()) / answers.size
    print(f"loss on other text {loss:.3f}; by frequencies alone {-np.log(shares[answers]).mean():.3f}")
    return losses, loss


def main() -> None:
    """Train, and fail where the model learned too little."""
    _, loss = train(EPOCHS, STEPS)
    if loss > LIMIT:
        raise SystemExit(f"the loss is above {LIMIT}")


if __name__ == "__main__":
    main()
