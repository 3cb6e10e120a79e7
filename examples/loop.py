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


def recognised(session: fp.Session, graph: fp.Graph, images: np.ndarray, labels: np.ndarray, target: str) -> float:
    """The share of images, all in one batch, to which a graph with the session's weights gives the right label."""
    # Evaluation is a graph of its own. It uses the trained weights where they lie.
    evaluation = fp.compile(graph, target=target).bind(share=session)
    logits = evaluation.step({"images": images}).outputs["logits"]
    accuracy = float((logits.argmax(1) == labels).mean())
    print(f"accuracy {accuracy:.1%} on {len(images)} digits that it has not seen")
    return accuracy
