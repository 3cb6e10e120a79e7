"""Data that packages ship, so that an example needs no download: digits, a table of patients, and a text."""

from __future__ import annotations

from collections.abc import Iterator
from pydoc_data import topics

import numpy as np
from sklearn.datasets import load_breast_cancer, load_digits
from sklearn.model_selection import train_test_split

Split = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def digits(size: int = 8, channels: int = 1) -> Split:
    """1,797 handwritten digits of scikit-learn: images and labels to train on, then 360 to test on.

    Args:
        size: extent of the images, a multiple of 8; pixels are repeated.
        channels: how often the one channel is repeated.

    Returns:
        Images float32 [n, channels, size, size] from -1 to 1, labels int64 [n]; the same for the test.
    """
    images, labels = load_digits(return_X_y=True)
    images = (images / 8 - 1).astype(np.float32).reshape(-1, 1, 8, 8)
    images = images.repeat(size // 8, 2).repeat(size // 8, 3).repeat(channels, 1)
    train, test, train_labels, test_labels = train_test_split(
        images, labels.astype(np.int64), test_size=360, random_state=0, stratify=labels
    )
    return train, train_labels, test, test_labels


def patients(bins: int = 16) -> tuple[Split, Split]:
    """569 patients of scikit-learn's breast cancer table, to train on, and 114 to test on.

    Returns:
        For each of the two: ten measured means float32 [n, 10], standardised; twenty further features as numbers of
        equally filled bins int64 [n, 20]; labels float32 [n, 1], 1 for benign; and the number of each patient.
    """
    table, labels = load_breast_cancer(return_X_y=True)
    dense = ((table[:, :10] - table[:, :10].mean(0)) / table[:, :10].std(0)).astype(np.float32)
    ranks = table[:, 10:].argsort(0).argsort(0)
    binned = (ranks * bins // len(table)).astype(np.int64)
    numbers = np.arange(len(table))
    train, test = train_test_split(numbers, test_size=114, random_state=0, stratify=labels)
    parts = [(dense[n], binned[n], labels[n, None].astype(np.float32), n) for n in (train, test)]
    return parts[0], parts[1]


def text() -> np.ndarray:
    """The topics of Python's own help, about 465,000 characters, as bytes uint8 below 128."""
    joined = "\n".join(topics.topics[name] for name in sorted(topics.topics))
    return np.frombuffer(joined.encode("ascii", "replace"), np.uint8)


def characters(length: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of the text, int64 [n, length], one behind the other: nine tenths to train on, then a tenth to test on."""
    whole = text().astype(np.int64)
    rows = whole[: len(whole) - len(whole) % length].reshape(-1, length)
    first = len(rows) * 9 // 10
    return rows[:first], rows[first:]


def unigram_perplexity(train: np.ndarray, test: np.ndarray) -> float:
    """That of a model which knows nothing but how frequent each character is."""
    counts = np.bincount(train.ravel(), minlength=128) + 1
    return float(np.exp(-np.log(counts / counts.sum())[test].mean()))


def batches(count: int, batch: int, epochs: int, seed: int = 0) -> Iterator[np.ndarray]:
    """Whole batches of numbers below `count`, in a new order each epoch."""
    rng = np.random.default_rng(seed)
    for _ in range(epochs):
        order = rng.permutation(count)
        yield from order[: count - count % batch].reshape(-1, batch)
