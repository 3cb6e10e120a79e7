"""What the examples share: epochs of a bound step, and how many digits a trained model recognises."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

import foreplan as fp


def fit(session: fp.Session, feeds: Iterator[dict[str, np.ndarray]], epochs: int, steps: int) -> list[float]:
    """The mean loss of each epoch of so many steps; each step takes the next feed."""
    losses = []
    for epoch in range(epochs):
        losses.append(float(np.mean([session.step(next(feeds)).loss for _ in range(steps)])))
        print(f"epoch {epoch + 1}: loss {losses[-1]:.3f}", flush=True)
    return losses


def recognised(session: fp.Session, images: np.ndarray, labels: np.ndarray) -> float:
    """The share of images, all given at once, to which the model gives the right label."""
    accuracy = session.evaluate({"images": images, "target": labels}, metrics=["accuracy"]).metrics["accuracy"]
    print(f"accuracy {accuracy:.1%} on {len(images)} digits that it has not seen")
    return accuracy
