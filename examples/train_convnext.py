"""Train a small ConvNeXt on scikit-learn's handwritten digits, and measure it on digits it has not seen."""

from __future__ import annotations

from data import batches, digits
from loop import fit, recognised

import foreplan as fp
from foreplan.base.units import format_bytes

BATCH, EPOCHS = 64, 20
STEPS = 22  # of an epoch: 1,437 digits to train on
SIZES = {"size": 32, "width": 16, "blocks": 1, "layer_scale": 1.0, "classes": 10}
TARGET = "cpu:threads=1"  # enough for a network of this size
LIMIT = 0.95


def train(epochs: int, steps: int) -> tuple[list[float], float]:
    """The mean loss of each epoch of so many steps, and the share of the test's digits that are recognised."""
    images, labels, test_images, test_labels = digits(SIZES["size"], channels=3)
    # The rate rises for ten steps and then falls along half a cosine.
    schedule = fp.optim.cosine(4e-3, steps=epochs * steps, warmup=10)
    optimizer = fp.optim.AdamW(schedule, weight_decay=0.05, decay="matrices")
    # In training, the deepest residual branch is left out for one image in ten, others less often.
    graph = fp.models.convnext_tiny(BATCH, stochastic_depth=0.1, **SIZES)
    # One step is forward, backward and update. All its memory is planned here, before it runs.
    step = fp.compile(graph, fp.losses.cross_entropy, optimizer, target=TARGET)
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
