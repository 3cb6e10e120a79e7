"""Validation: a model that trains is measured on data that it is not trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from foreplan.cli.data import Arrays, read_arrays, samples_in
from foreplan.cli.options import Settings, is_plan_file, model_graph
from foreplan.errors import ModelError, ShapeError, UsageError
from foreplan.options import Options

if TYPE_CHECKING:
    from foreplan.compiled import Compiled
    from foreplan.runtime.session import Session


@dataclass(frozen=True)
class Validation:
    """What measures a model.

    Attributes:
        sessions: how many samples a step takes → a session that does, with the weights of the one that trains.
        arrays: all samples.
        sizes: how many samples each step takes, one after the other.
        left_out: how many samples at the end fill no step.
        averaged: the session whose averages of weights are measured; None: its weights are.
    """

    sessions: Mapping[int, Session]
    arrays: Arrays
    sizes: Sequence[int]
    left_out: int
    averaged: Session | None = None

    @property
    def names(self) -> list[str]:
        """Of what is measured."""
        return [slot.name for slot in next(iter(self.sessions.values())).program.outputs]

    def measure(self) -> dict[str, float]:
        """The loss and the metrics by name: means over the samples."""
        sums: dict[str, float] = {}
        start = 0
        with nullcontext() if self.averaged is None else self.averaged.averaged():
            for size in self.sizes:
                batch = {name: array[start : start + size] for name, array in self.arrays.items()}
                for name, mean in self.sessions[size].step(batch).outputs.items():
                    sums[name] = sums.get(name, 0.0) + float(mean) * size
                start += size
        return {name: total / start for name, total in sums.items()}


def validation_of(
    model: str, settings: Settings, step: Compiled, training: Session, path: str, metrics: Sequence[str]
) -> Validation:
    """What measures a model of the command line; samples that fill no batch are measured by a step of their own size.

    Args:
        model, settings: as the command has them.
        step: the step that trains the model.
        training: its session, whose weights are measured where they lie.
        path: of the .npz file with the samples.
        metrics: names of `foreplan.metrics`.

    Raises:
        UsageError: the model is a plan file, or there is no such metric.
        InputError: the file does not fit the model.
    """
    if is_plan_file(model):
        raise UsageError(f"--validation compiles the model's forward pass, and {model!r} is a plan: give the model")
    arrays = read_arrays(path)
    whole = _compiled(model, settings, step, metrics)
    samples, batch = samples_in(whole.program, arrays, path)
    count, rest = divmod(samples, batch)
    parts = [whole] if count else []
    if rest and (part := _of_size(model, settings, step, metrics, rest)) is not None:
        parts.append(part)
    sizes = [batch] * count + [rest] * (len(parts) > bool(count))
    if not sizes:
        raise UsageError(
            f"{path!r} has {samples} samples, a step takes {batch}, and the model has no step for fewer: give more"
        )
    taken = (batch, rest) if count else (rest,)
    left_out = samples - sum(sizes)
    sessions = {size: part.bind(share=training) for size, part in zip(taken, parts)}
    return Validation(sessions, arrays, sizes, left_out, training if training.keeps_averages else None)


def _compiled(model: str, settings: Settings, training: Compiled, metrics: Sequence[str]) -> Compiled:
    from foreplan import api

    graph, loss = model_graph(model, settings)
    own = replace(graph, outputs={name: graph.outputs[name] for name in list(graph.outputs)[:1]})
    step = settings.step
    measured = api.evaluation(
        own,
        settings.loss or loss,
        metrics,
        train=step.train,
        freeze=step.freeze,
        narrow_weights=step.narrow_weights,
    )
    return api.compile_with(measured, Options(target=step.target, precision=step.precision, share=training))


def _of_size(
    model: str, settings: Settings, training: Compiled, metrics: Sequence[str], samples: int
) -> Compiled | None:
    """A step that takes a number of samples; None: the model's batch is fixed."""
    try:
        step = _compiled(model, replace(settings, batch=samples), training, metrics)
    except (ModelError, ShapeError, UsageError):
        return None
    extents = {slot.operand.type.shape[:1] for slot in step.program.required_inputs}
    return step if extents == {(samples,)} else None
