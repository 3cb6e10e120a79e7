"""Commands about memory and what it costs: pareto, fit."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import click

from foreplan.cli.options import (
    compile_model,
    echo,
    given,
    json_option,
    model_options,
    print_json,
    say,
    settings_from,
    working,
)
from foreplan.errors import DoesNotFitError, UsageError
from foreplan.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from foreplan.cli.options import Settings
    from foreplan.compiled import Compiled
    from foreplan.planner import Plan

BAR = 40  # characters of the longest bar
SCOUTS = (1, 8)  # batches that show what a sample takes


@click.command(short_help="Show what less memory costs.")
@model_options
@json_option
def pareto(model: str, as_json: bool, **options: Any) -> None:
    """Show what less memory costs: the arena of a step of MODEL against added flops and predicted time.

    From no recomputation to the least memory found, with the lowest plans within +1 %, +5 % and +20 %.

    \b
    Examples:
      foreplan pareto resnet50 --batch 32
      foreplan pareto model.onnx --optimizer adamw --json
    """
    from foreplan.pareto import pareto as curve

    if written := given("budget", "remat"):
        raise UsageError(f"--{written[0]} makes no sense here: the curve has every budget; `estimate` takes one")
    if given("checkpoint"):
        raise UsageError(
            "--checkpoint makes no sense here: it says what is recomputed, and along the curve the planner chooses; "
            "leave it out, or see the one plan that it gives with `estimate`"
        )
    compiled = compile_model(model, _plain(settings_from(options)))
    with working(f"recomputing parts of {model}"):
        points = curve(compiled.program, _update_bytes(compiled))
    if as_json:
        print_json(
            {"model": compiled.program.model, "target": compiled.program.target}
            | {"points": [asdict(point) for point in points]}
        )
        return
    most = points[0].arena_bytes
    offload = bool(compiled.program.copies)
    head = f"{'host':>12}  " if offload else ""
    echo(f"{'arena':>12}  {head}{'flops':>8}  {'time':>8}  instructions")
    for point in points:
        bar = "█" * max(1, round(BAR * point.arena_bytes / most))
        host = f"{format_bytes(point.host_bytes):>12}  " if offload else ""
        echo(
            f"{format_bytes(point.arena_bytes):>12}  {host}{point.extra_flops_ratio:>+8.2%}  "
            f"{point.extra_seconds_ratio:>+8.2%}  {point.instructions:>12,}  {bar}"
        )


def _plain(settings: Settings) -> Settings:
    """The settings without recomputation, which the curve adds."""
    return replace(settings, step=replace(settings.step, remat="off"))


def _update_bytes(compiled: Compiled) -> int:
    """What the second half of a step that accumulates gradients needs, whatever the first recomputes."""
    return 0 if compiled.update is None else compiled.update.plan.arena_bytes


def _share(text: str | None) -> float | None:
    """A share from `5%` or `0.05`."""
    if text is None:
        return None
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share < 1000:
        raise UsageError(f"{text!r} is not a share: write 5% or 0.05")
    return share


class _Trials:
    """Batches tried against a memory.

    Attributes:
        fitting: by batch that fits, its arena, plan, and what that adds of flops and predicted time.
    """

    def __init__(self, model: str, settings: Settings, memory: int, share: float | None) -> None:
        self.model, self.settings, self.memory, self.share = model, settings, memory, share
        self.fitting: dict[int, tuple[int, Plan, tuple[float, float]]] = {}
        self._compiled: dict[int, Compiled] = {}
        self._needed: dict[int, int] = {}

    def start(self) -> tuple[int, int]:
        """A batch to begin with, and about how many bytes do not depend on it: by the line through two small batches
        as they are; what the planner may recompute takes about half of that.
        """
        small, large = (self._plain(batch) for batch in SCOUTS)
        slope = max((large - small) // (SCOUTS[1] - SCOUTS[0]), 1)
        fixed = max(small - slope * SCOUTS[0], 0)
        about = max((self.memory - fixed) // slope, 1)
        return self.settings.batch or (2 * about if self._may_choose else about), fixed

    @property
    def _may_choose(self) -> bool:
        """Whether the planner may recompute what it likes, as against nothing or what the settings name."""
        return self.share != 0 and not self.settings.step.checkpoint

    def _compile(self, batch: int) -> Compiled:
        if batch not in self._compiled:
            self._compiled[batch] = compile_model(self.model, replace(self.settings, batch=batch))
        return self._compiled[batch]

    def _plain(self, batch: int) -> int:
        compiled = self._compile(batch)
        return max(compiled.plan.arena_bytes, _update_bytes(compiled))

    def host_bytes(self, batch: int) -> int:
        """Host memory for what the plan of a batch that fits copies there."""
        from foreplan.pareto import host_bytes

        return host_bytes(self._compile(batch).program, self.fitting[batch][1])

    def needed(self, batch: int) -> int:
        """Bytes of the smallest arena found, at most the memory where a plan within the limits fits."""
        if batch not in self._needed:
            self._needed[batch] = self._try(batch)
            fits = "fits" if batch in self.fitting else f"needs {format_bytes(self._needed[batch])}"
            say(f"batch {batch:,} {fits}")
        return self._needed[batch]

    def _try(self, batch: int) -> int:
        from foreplan.pareto import affordable
        from foreplan.planner import totals

        compiled = self._compile(batch)
        found, least, rest = compiled.plan, compiled.plan.arena_bytes, _update_bytes(compiled)
        if found.arena_bytes > self.memory and self._may_choose:
            with working(f"recomputing parts of {self.model} at batch {batch:,}"):
                curve = affordable(compiled.program, self.share)
                try:
                    found = curve.within(self.memory)
                except DoesNotFitError as error:
                    return max(error.needed, rest)
            least = min(found.arena_bytes, curve.plan(len(curve) - 1).arena_bytes)
        arena = max(found.arena_bytes, rest)
        if arena > self.memory:
            return arena
        costs = totals(compiled.program, [[step.action for step in found.steps]])[0]
        self.fitting[batch] = arena, found, (costs.extra_flops_ratio, costs.extra_seconds_ratio)
        return max(least, rest)


@click.command(short_help="Find the largest batch that fits a memory.")
@model_options
@click.option("--memory", required=True, metavar="SIZE", help="What the arena may take, such as 8GiB.")
@click.option("--max-extra-flops", "most", metavar="SHARE", help="Most flops added by recomputing, such as 5%.")
@json_option
def fit(model: str, memory: str, most: str | None, as_json: bool, **options: Any) -> None:
    """Find the largest batch with which a step of MODEL fits a memory, recomputing where it helps, or the segments that
    --checkpoint names and nothing else.

    The answer has a verified plan, and the next larger batch was tried and does not fit; more than that is not known of
    larger ones still. Exits with 3 if not even one sample fits.

    \b
    Examples:
      foreplan fit resnet50 --memory 8GiB
      foreplan fit model.onnx --memory 2GiB --max-extra-flops 5% --optimizer adamw
      foreplan fit gpt2_small --memory 8GiB --checkpoint 'h.*'
    """
    from foreplan.pareto import largest

    if written := given("budget", "remat"):
        raise UsageError(f"--{written[0]} makes no sense here: --memory is the budget, --max-extra-flops its price")
    if given("checkpoint") and given("most"):
        raise UsageError(
            "--checkpoint says what is recomputed, and --max-extra-flops limits what the planner chooses to: give one"
        )
    allowed = parse_bytes(memory)
    trials = _Trials(model, _plain(settings_from(options)), allowed, _share(most))
    start, fixed = trials.start()
    batch = largest(trials.needed, allowed, start, fixed)
    if not batch:
        least = trials.needed(1)
        raise DoesNotFitError(
            f"not even a batch of 1 fits: it needs {format_bytes(least)}, and there are {format_bytes(allowed)}",
            needed=least,
            capacity=allowed,
            lower_bound=least,
        )
    arena, found, ratios = trials.fitting[batch]
    host = trials.host_bytes(batch)
    if as_json:
        print_json(
            {
                "batch": batch,
                "memory_bytes": allowed,
                "arena_bytes": arena,
                "host_bytes": host,
                "lower_bound_bytes": found.lower_bound_bytes,
                "extra_flops_ratio": ratios[0],
                "extra_seconds_ratio": ratios[1],
            }
        )
        return
    echo(
        f"batch {batch}: arena {format_bytes(arena)} of {format_bytes(allowed)}, "
        f"{f'{format_bytes(host)} of host memory, ' if host else ''}"
        f"{ratios[0]:+.2%} flops, {ratios[1]:+.2%} predicted time"
    )


COMMANDS = (pareto, fit)
