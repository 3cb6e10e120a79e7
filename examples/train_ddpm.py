"""Train a small diffusion model on scikit-learn's handwritten digits, and draw new digits with it."""

from __future__ import annotations

import numpy as np
from data import batches, digits
from loop import fit

import foreplan as fp
from foreplan.base.units import format_bytes

BATCH, EPOCHS = 64, 20
STEPS = 22  # of an epoch: 1,437 digits to train on
SIZES = {"size": 8, "channels": 1, "width": 16, "groups": 4}
TIMES = 100  # steps of noise; behind the last one nothing of the image is left
NOISE = np.linspace(1e-3, 0.2, TIMES, dtype=np.float32)  # variance that each step adds
KEPT = np.cumprod(1 - NOISE)  # share of the image's variance that is left after each step
LIMIT = 0.15
SHADES = " .:-=+*#%@"


def noisy(images: np.ndarray, rng: np.random.Generator) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Images after a random number of steps of noise, as the model reads them, and the noise that is in them."""
    times = rng.integers(0, TIMES, len(images))
    noise = rng.standard_normal(images.shape, dtype=np.float32)
    share = KEPT[times][:, None, None, None]
    return {"images": np.sqrt(share) * images + np.sqrt(1 - share) * noise, "timesteps": times}, noise


def sample(session: fp.Session, count: int, rng: np.random.Generator) -> np.ndarray:
    """New images: from noise alone, each step takes a little of the predicted noise away (Ho et al. 2020)."""
    x = rng.standard_normal((count, 1, 8, 8), dtype=np.float32)
    for time in reversed(range(TIMES)):
        noise = session.step({"images": x, "timesteps": np.full(count, time)}).outputs["noise"]
        x = (x - NOISE[time] / np.sqrt(1 - KEPT[time]) * noise) / np.sqrt(1 - NOISE[time])
        if time:
            x += np.sqrt(NOISE[time]) * rng.standard_normal(x.shape, dtype=np.float32)
    return x


def show(images: np.ndarray, across: int = 8) -> None:
    """Images of one channel as text, some of them side by side."""
    levels = np.clip((images[:, 0] + 1) / 2 * len(SHADES), 0, len(SHADES) - 1).astype(int)
    for first in range(0, len(levels), across):
        for row in levels[first : first + across].swapaxes(0, 1):
            print("  ".join("".join(SHADES[level] for level in line) for line in row))
        print()


def train(epochs: int, steps: int) -> tuple[list[float], float]:
    """The mean loss of each epoch of so many steps, and the mean squared error of the noise in the test's images."""
    images, _, test_images, _ = digits()
    rng = np.random.default_rng(0)
    optimizer = fp.optim.Adam(fp.optim.cosine(4e-3, steps=epochs * steps, warmup=20), clip_norm=1.0)
    # One step is forward, backward and update. All its memory is planned here, before it runs.
    step = fp.compile(fp.models.ddpm_unet(BATCH, **SIZES), fp.losses.mse, optimizer, target="cpu")
    print(f"a step takes an arena of {format_bytes(step.plan.arena_bytes)}, weights and moments included")
    session = step.bind(seed=0)

    order = batches(len(images), BATCH, epochs * steps)  # more passes than are needed
    noised = (noisy(images[pick], rng) for pick in order)
    losses = fit(session, ({**given, "target": noise} for given, noise in noised), epochs, steps)

    # Evaluation is a graph of its own, for another batch. It uses the trained weights where they lie.
    evaluation = fp.compile(fp.models.ddpm_unet(len(test_images), **SIZES), target="cpu").bind(share=session)
    given, noise = noisy(test_images, rng)
    error = float(np.square(evaluation.step(given).outputs["noise"] - noise).mean())
    print(
        f"squared error of the noise in images it has not seen: {error:.3f}; of a guess of 0: {(noise**2).mean():.3f}"
    )
    drawing = fp.compile(fp.models.ddpm_unet(16, **SIZES), target="cpu").bind(share=session)
    show(sample(drawing, 16, rng))
    return losses, error


def main() -> None:
    """Train, and fail where the model learned too little."""
    _, error = train(EPOCHS, STEPS)
    if error > LIMIT:
        raise SystemExit(f"the squared error is above {LIMIT}")


if __name__ == "__main__":
    main()
