"""`make demo`: plan ResNet-50 from an ONNX file, train on real digits in one arena, and write what can be looked at."""

from __future__ import annotations

import time
import tracemalloc
from pathlib import Path

import numpy as np
import onnx
from digits_model import write_digits_model
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import foreplan as fp
from foreplan.base.units import format_bytes, format_seconds
from foreplan.views.dot import write_dot

OUT = Path("out")
RESNET50 = Path(onnx.__file__).parent / "backend/test/data/light/light_resnet50.onnx"
BATCH, EPOCHS = 32, 12
console = Console()


def plan_resnet50() -> None:
    """Inference and training of the ResNet-50 that the onnx package ships, planned and not run."""
    console.rule("[bold]1  ResNet-50, batch 32: how much memory, before a byte is allocated")
    graph = fp.from_onnx(RESNET50, batch=32)
    inference = fp.compile(graph)
    training = fp.compile(graph, loss=fp.losses.cross_entropy, optimizer=fp.optim.Nesterov(0.1, momentum=0.9))
    for title, step in (("inference", inference), ("training with Nesterov momentum", training)):
        console.print(
            f"\n[bold]{title}[/bold]  ({len(step.plan.steps)} instructions, planned in "
            f"{format_seconds(step.plan_seconds)})"
        )
        print(step.memory)
    for note in training.program.notes:
        console.print(f"note: {note}", style="dim", markup=False)
    training.view(OUT / "resnet50.html")
    training.save(OUT / "resnet50.plan")
    assert training.graph is not None
    write_dot(OUT / "resnet50.dot", training.graph)


def train_digits() -> None:
    """A convolutional network on scikit-learn's handwritten digits."""
    console.rule("[bold]2  Training on real digits, in one arena")
    model = OUT / "digits.onnx"
    write_digits_model(model)
    images, labels = load_digits(return_X_y=True)
    images = (images / 16.0).astype(np.float32).reshape(-1, 1, 8, 8)
    data = train_test_split(images, labels, test_size=360, random_state=0, stratify=labels)
    train_images, test_images, train_labels, test_labels = data

    step = fp.compile(
        fp.from_onnx(model, batch=BATCH),
        loss=fp.losses.cross_entropy,
        optimizer=fp.optim.Nesterov(0.05, momentum=0.9, weight_decay=1e-4),
    )
    evaluation = fp.compile(fp.from_onnx(model, batch=len(test_images)))
    session, first = step.bind(seed=0), {"image": train_images[:BATCH], "target": train_labels[:BATCH]}
    session.step(first)
    tracemalloc.start()
    session.step(first)
    beside = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    examiner = evaluation.bind(share=session)

    def accuracy() -> float:
        (logits,) = examiner.step({"image": test_images}).outputs.values()
        return float((logits.argmax(axis=1) == test_labels).mean())

    rng, batches = np.random.default_rng(0), len(train_images) // BATCH
    started = time.perf_counter()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("training", total=EPOCHS * batches)
        for epoch in range(EPOCHS):
            order = rng.permutation(len(train_images))
            rate = 0.05 * 0.5 * (1 + np.cos(np.pi * epoch / EPOCHS))
            for i in range(batches):
                pick = order[i * BATCH : (i + 1) * BATCH]
                batch = {"image": train_images[pick], "target": train_labels[pick], "learning_rate": rate}
                loss = session.step(batch).loss
                progress.update(task, advance=1, description=f"epoch {epoch + 1:2d}  loss {loss:.4f}")
    seconds = time.perf_counter() - started
    console.print(
        f"test accuracy [bold]{accuracy():.2%}[/bold] after {EPOCHS} epochs in {format_seconds(seconds)}, "
        f"target {step.program.target}"
    )
    console.print(f"planned   {step.plan.arena_bytes:>10,} bytes: the arena, for a training step")
    console.print(f"allocated {session.allocated_bytes:>10,} bytes, once, when the session was bound")
    console.print(f"measured  {beside:>10,} more at most during a step: Python objects (tracemalloc)")
    console.print(f"          {examiner.allocated_bytes:>10,} more for evaluating on {len(test_images)} images at once")
    session.save(str(OUT / "digits.safetensors"))
    step.save(OUT / "digits.plan")
    step.view(OUT / "digits.html")
    assert step.graph is not None
    write_dot(OUT / "digits.dot", step.graph)
    if accuracy() < 0.97:
        raise SystemExit("the test accuracy is below 97 %")


def main() -> None:
    """Run both parts and say what was written."""
    OUT.mkdir(exist_ok=True)
    plan_resnet50()
    train_digits()
    console.rule("[bold]3  To look at")
    for file in sorted(OUT.iterdir()):
        console.print(f"{file!s:28s} {format_bytes(file.stat().st_size):>12s}", markup=False)
    console.print("Open out/resnet50.html in a browser: every tensor of the step, when and where it lives.")


if __name__ == "__main__":
    main()
