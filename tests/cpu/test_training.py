"""What users do on the CPU engine: train on real digits, fine-tune ResNet-50, run what others exported."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest

import foreplan as fp
from examples.digits_model import write_digits_model
from foreplan.lower.fallbacks import fallbacks
from foreplan.runtime.session import Session
from tests.cpu.check import needs_onednn
from tests.cpu.test_engine import RESIDUAL, built, is_near
from tests.profile import cases
from tests.runtime.micro_batches import data_for
from tests.runtime.test_light_models import NAMES, forward, shipped, with_scores

pytestmark = needs_onednn()
BATCH = 32


@pytest.fixture(scope="module")
def digits() -> tuple[np.ndarray, np.ndarray]:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    return (images[order] / 16).astype(np.float32).reshape(-1, 1, 8, 8), labels[order].astype(np.int64)


def train(session: Session, images: np.ndarray, labels: np.ndarray, steps: int) -> list[float]:
    """Losses of some steps, batch after batch."""
    losses = []
    for i in range(steps):
        some = slice(i * BATCH % 1408, i * BATCH % 1408 + BATCH)
        losses.append(session.step({"image": images[some], "target": labels[some]}).loss)
    return [loss for loss in losses if loss is not None]


def test_digits_are_learned(tmp_path: Path, digits: tuple[np.ndarray, np.ndarray]) -> None:
    write_digits_model(tmp_path / "digits.onnx")
    graph, (images, labels) = fp.from_onnx(tmp_path / "digits.onnx", batch=BATCH), digits
    steps = [
        fp.compile(graph, loss=fp.losses.cross_entropy, optimizer=fp.optim.Nesterov(0.05), target=target)
        for target in ("cpu:threads=1", "numpy")
    ]
    assert not fallbacks(steps[0].program)
    ours, theirs = (step.bind(seed=0) for step in steps)
    np.testing.assert_allclose(train(ours, images, labels, 10), train(theirs, images, labels, 10), rtol=1e-4)
    train(ours, images, labels, 4 * 44)
    evaluation = fp.compile(fp.from_onnx(tmp_path / "digits.onnx", batch=len(labels) - 1408), target="cpu:threads=1")
    (logits,) = evaluation.bind(share=ours).step({"image": images[1408:]}).outputs.values()
    assert (logits.argmax(axis=1) == labels[1408:]).mean() > 0.95


@pytest.mark.thorough
def test_a_step_of_resnet50() -> None:
    graph = fp.models.build("resnet50:batch=2")
    ours, theirs = (
        fp.compile(graph, loss=fp.losses.cross_entropy, optimizer=fp.optim.Nesterov(1e-3), target=target)
        for target in ("cpu:threads=1", "numpy")
    )
    assert not fallbacks(ours.program)
    data = data_for(ours)
    losses = [step.bind(seed=0).step(data).loss for step in (ours, theirs)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert is_near(theirs, ours, data, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", cases(NAMES, thorough=("vgg19",)))
def test_light_models_give_what_they_were_shipped_with(name: str) -> None:
    """Weights are all alike, and most scores are from 1e9 to 1e31: one rounding of such a score, or two channels that
    add in another order, and its probability is 0 or 1. So scores are held to float64, probabilities to the scores,
    and to those that were shipped where a rounding of the scores changes little.
    """
    step = fp.compile(fp.from_onnx(with_scores(name)), target="cpu:threads=1")
    assert not fallbacks(step.program)
    first, scores = (found := forward(step))[0], found[-1].astype(np.float64)
    exact = forward(fp.compile(fp.from_onnx(with_scores(name, "float64"))))[-1]
    largest = np.abs(exact).max()
    assert exact.dtype == np.float64 and np.abs(scores - exact).max() <= 1e-5 * largest
    if len(found) > 1:
        powers = np.exp(scores - scores.max(axis=1, keepdims=True))
        probabilities = powers / powers.sum(axis=1, keepdims=True)
        np.testing.assert_allclose(first.reshape(scores.shape), probabilities, rtol=1e-3, atol=1e-7)
    if len(found) == 1 or largest * np.finfo(np.float32).eps < 1e-4:
        np.testing.assert_allclose(first, shipped(name), rtol=1e-3, atol=1e-7)


class _Allocated(ctypes.Structure):
    """glibc's mallinfo2."""

    _fields_ = [(f"_{i}", ctypes.c_size_t) for i in range(4)] + [
        ("mapped", ctypes.c_size_t),
        ("_5", ctypes.c_size_t),
        ("_6", ctypes.c_size_t),
        ("in_use", ctypes.c_size_t),
        ("_8", ctypes.c_size_t),
        ("_9", ctypes.c_size_t),
    ]


def test_a_hundred_steps_allocate_nothing_that_stays() -> None:
    """Neither libraries nor the interpreter: bytes in use by malloc, and resident pages.

    What leaks, leaks in every hundred steps. Something else in this process may take pages
    in one hundred: the system that joins pages to a huge one, or a thread of another test.
    """
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        pytest.skip("needs glibc 2.33 or newer, whose mallinfo2 tells how many bytes are in use")
    mallinfo.restype = _Allocated
    step = fp.compile(
        built(RESIDUAL), loss=fp.losses.cross_entropy, optimizer=fp.optim.Nesterov(0.1), target="cpu:threads=1"
    )
    session, data = step.bind(), data_for(step)

    def used() -> tuple[int, int]:
        found = mallinfo()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return found.in_use + found.mapped, pages * 4096

    for _ in range(10):
        session.step(data)
    growth = []
    for _ in range(5):
        before = used()
        for _ in range(100):
            session.step(data)
        growth.append(tuple(now - then for now, then in zip(used(), before, strict=True)))
        if growth[-1][0] < 16 * 1024 and growth[-1][1] < 1024 * 1024:
            return
    raise AssertionError(f"bytes in use and resident bytes grew in each hundred of steps: {growth}")
