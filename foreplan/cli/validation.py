"""Validation: a model that trains is measured on data that it is not trained on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from foreplan.base.errors import ModelError, ShapeError, UsageError
from foreplan.cli.data import Arrays
from foreplan.cli.job import Share, read_alike, samples_alike
from foreplan.cli.model import model_graph
from foreplan.cli.options import is_plan_file
from foreplan.cli.settings import Settings
from foreplan.cli.stages import samples_of_stages
from foreplan.options import Options

if TYPE_CHECKING:
    from foreplan.compiler.compiled import Compiled
    from foreplan.runtime.ranks import World
    from foreplan.runtime.session import Session


@dataclass(frozen=True)
class Validation:
    """What measures a model.

    Attributes:
        sessions: how many samples a step takes → a session that does, with the weights of the one that trains.
        arrays: all samples.
        sizes: how many samples each step takes, one after the other; the last one may take fewer.
        left_out: how many samples at the end fill no step.
        training: the session that trains.
        world: the ranks.
        share: the share of the steps that this one takes.
        names: of what is measured.
    """

    sessions: Mapping[int, Session]
    arrays: Arrays
    sizes: Sequence[int]
    left_out: int
    training: Session
    world: World
    share: Share
    names: Sequence[str]

    def measure(self) -> dict[str, float]:
        """The loss and the metrics by name: means over the samples, the same on all ranks, which all call this."""
        from foreplan.runtime.ranks.statistics import of_first_rank

        training, found = self.training, dict[int, dict[str, float]]()
        averages = training.averaged() if training.keeps_averages else nullcontext()
        with averages, of_first_rank(training.program, training.stored, self.world):
            for step in self._own_steps():
                start, size = step * self.sizes[0], self.sizes[step]
                batch = {name: array[start : start + size] for name, array in self.arrays.items()}
                outputs = self.sessions[size].step(batch).outputs
                if outputs:  # which the last stage has, where there are several
                    found[step] = {name: float(mean) for name, mean in outputs.items()}
        means = {step: each for own in reversed(self.world.gather(found, "a validation")) for step, each in own.items()}
        sums = dict.fromkeys(self.names, 0.0)
        for step, size in enumerate(self.sizes):
            for name, mean in means[step].items():
                sums[name] += mean * size
        return {name: total / sum(self.sizes) for name, total in sums.items()}

    def _own_steps(self) -> Iterator[int]:
        """The steps of this rank. Ranks exchange weights, so all take as many, of the same sizes: where there are fewer
        steps of a size than shares, some take the last one, too.
        """
        for size in dict.fromkeys(self.sizes):
            steps = [step for step, each in enumerate(self.sizes) if each == size]
            for first in range(0, len(steps), self.share.shares):
                yield steps[min(first + self.share.number, len(steps) - 1)]


def validation_of(
    model: str,
    settings: Settings,
    training: Session,
    path: str,
    metrics: Sequence[str],
    world: World,
    share: Share,
) -> Validation:
    """What measures a model of the command line; samples that fill no batch are measured by a step of their own size.

    Args:
        model, settings: as the command has them.
        training: the session of the step that trains the model, whose weights are measured where they lie.
        path: of the .npz file with the samples.
        metrics: names of `foreplan.metrics`.
        world, share: see `Validation`.

    Raises:
        UsageError: the model is a plan file, or there is no such metric.
        InputError: the file does not fit the model.
    """
    if is_plan_file(model):
        raise UsageError(f"--validation compiles the model's forward pass, and {model!r} is a plan: give the model")
    arrays = read_alike(path, world)
    whole = _compiled(model, settings, training, metrics)
    if whole.program.is_stage:
        samples, batch, arrays = samples_of_stages(whole.program, arrays, path, 1, world)
    else:
        samples, batch = samples_alike(whole.program, arrays, path, world)
    count, rest = divmod(samples, batch)
    parts = [whole] if count else []
    if rest:
        part = _of_size(model, settings, training, metrics, rest)
        if all(world.gather(part is not None, "the last step of a validation")) and part is not None:
            parts.append(part)
    sizes = [batch] * count + [rest] * (len(parts) > bool(count))
    if not sizes:
        raise UsageError(
            f"{path!r} has {samples} samples, a step takes {batch}, and the model has no step for fewer: give more"
        )
    taken = (batch, rest) if count else (rest,)
    left_out = samples - sum(sizes)
    sessions = {size: part.bind(share=training) for size, part in zip(taken, parts)}
    names = next(
        names for names in world.gather([slot.name for slot in whole.program.outputs], "what is measured") if names
    )
    return Validation(sessions, arrays, sizes, left_out, training, world, share, names)


def _compiled(model: str, settings: Settings, training: Session, metrics: Sequence[str]) -> Compiled:
    from foreplan.compiler import api

    graph, loss = model_graph(model, settings)
    step = settings.step
    measured = api.evaluation(
        graph,
        settings.loss or loss,
        metrics,
        train=step.train,
        freeze=step.freeze,
        narrow_weights=step.narrow_weights,
    )
    return api.compile_with(measured, Options(target=step.target, precision=step.precision, share=training))


def _of_size(
    model: str, settings: Settings, training: Session, metrics: Sequence[str], samples: int
) -> Compiled | None:
    """A step that takes a number of samples; None: the model's batch is fixed."""
    try:
        step = _compiled(model, replace(settings, batch=samples), training, metrics)
    except (ModelError, ShapeError, UsageError):
        return None
    extents = {slot.operand.type.shape[:1] for slot in step.program.required_inputs}
    return step if extents <= {(samples,)} else None
