"""Train a small MLP-Mixer on scikit-learn's handwritten digits, and measure it on digits it has not seen."""

from __future__ import annotations

from data import batches, digits
from loop import fit, recognised

import foreplan as fp
from foreplan.base.units import format_bytes

BATCH, EPOCHS = 64, 12
STEPS = 22  # of an epoch: 1,437 digits to train on
SIZES = {"size": 8, "patch": 2, "width": 64, "layers": 3, "classes": 10}
LIMIT = 0.95


def train(epochs: int, steps: int) -> tuple[list[float], float]:
    """The mean loss of each epoch of so many steps, and the share of the test's digits that are recognised."""
    images, labels, test_images, test_labels = digits(channels=3)
    loss = fp.losses.CrossEntropy(label_smoothing=0.1)
    # The rate rises for ten steps and then falls along half a cosine.
    schedule = fp.optim.cosine(3e-3, steps=epochs * steps, warmup=10)
    optimizer = fp.optim.AdamW(schedule, weight_decay=0.05, clip_norm=1.0)
    # One step is forward, backward and update. All its memory is planned here, before it runs.
    step = fp.compile(fp.models.mixer_b16(BATCH, **SIZES), loss, optimizer, target="cpu")
    print(f"a step takes an arena of {format_bytes(step.plan.arena_bytes)}, weights and moments included")
    session = step.bind(seed=0)

    order = batches(len(images), BATCH, epochs * steps)  # more passes than are needed
    feeds = ({"images": images[pick], "target": labels[pick]} for pick in order)
    losses = fit(session, feeds, epochs, steps)
    return losses, recognised(session, test_images, test_labels)


def main() -> None:
    """Train, and fail where the model learned too little."""
    _, accuracy = train(EPOCHS, STEPS)
    if accuracy < LIMIT:
        raise SystemExit(f"the accuracy is below {LIMIT}")


if __name__ == "__main__":
    main()
