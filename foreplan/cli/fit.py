"""The command that finds the largest batch: fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import click

from foreplan.base.errors import DoesNotFitError, UsageError
from foreplan.base.units import format_bytes, in_common, parse_bytes
from foreplan.cli.compiling import at_batch, compile_model, without_recomputation
from foreplan.cli.fit_ranks import print_ranks, ranks_in, rows_of_ranks
from foreplan.cli.flags import command, given, json_option, model_options_without, settings_from
from foreplan.cli.options import echo, print_json, say

if TYPE_CHECKING:
    from foreplan.cli.settings import Settings
    from foreplan.fit.trials import Trials


@command(short_help="Find the largest batch that fits a memory, or every card.")
@model_options_without("ranks")
@click.option("--ranks", metavar="N,N", help="Print a table for these numbers of ranks, and for each --shard.")
@click.option("--memory", metavar="SIZE", help="The memory of a step, such as 8GiB; by default the card's own.")
@click.option("--all-cards", "all_cards", is_flag=True, help="Print a table of every card that foreplan knows.")
@click.option(
    "--max-extra-time", "most", metavar="SHARE", help="How much predicted time recomputation may add, such as 5%."
)
@json_option
def fit(
    model: str,
    ranks: str | None,
    memory: str | None,
    all_cards: bool,
    most: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Find the largest batch with which a step of MODEL fits a memory. The step may run in parts and recompute where
    that helps; with --checkpoint it recomputes the named segments and nothing else.

    On a card, the memory is what the whole process may take: the card's own, unless --memory gives less. On the host,
    --memory limits the arena.

    --all-cards prints one row per card. --ranks 1,2,4,8 prints one row per number of ranks and --shard. Neither
    recomputes anything unless --max-extra-time allows it, which takes minutes.

    The plan of the answer is verified. The next larger batch was tried and does not fit; nothing is known of larger
    ones still. The search ends at a batch of 65,536. Exits with 3 if not even one sample fits.

    \b
    Examples:
      foreplan fit resnet50 --target cuda:t4
      foreplan fit gpt2_small --all-cards --optimizer adamw
      foreplan fit gpt2_small --ranks 1,2,4,8 --target cuda:t4 --optimizer adamw
      foreplan fit model.onnx --memory 2GiB --max-extra-time 5% --optimizer adamw
      foreplan fit gpt2_small --memory 8GiB --checkpoint 'h.*'
    """
    if written := given("budget", "remat"):
        raise UsageError(f"--{written[0]} makes no sense here: --memory is the budget, --max-extra-time its price")
    if given("checkpoint") and given("most"):
        raise UsageError(
            "--checkpoint says what is recomputed, and --max-extra-time limits what the planner chooses to: give one"
        )
    settings, share = without_recomputation(settings_from(options | {"ranks": 1})), _share(most)
    if settings.step.stages > 1:
        raise UsageError("`fit` compares steps that ranks run whole: leave --stages out (`foreplan estimate` has them)")
    if settings.step.accumulate == "auto":
        raise UsageError("--accumulate auto splits a given batch, and fit looks for one: leave one of them out")
    if ranks is not None:
        if all_cards:
            raise UsageError("--all-cards and --ranks each print a table: give one")
        allowed = _memory(memory, settings)
        found = rows_of_ranks(
            settings, ranks_in(ranks), bool(given("shard")), lambda s: _trials(model, s, allowed, share or 0.0)
        )
        if not any(row.batch for row in print_ranks(found, as_json)):
            raise click.exceptions.Exit(DoesNotFitError.exit_code)
        return
    if all_cards:
        if written := given("memory", "target"):
            raise UsageError(f"--{written[0]} makes no sense here: --all-cards tries each card with its own memory")
        rows = _on_all_cards(model, settings, share or 0.0)
        if not any(row.batch for row in _print_cards(rows, as_json)):
            raise click.exceptions.Exit(DoesNotFitError.exit_code)
        return
    allowed = _memory(memory, settings)
    trials = _trials(model, settings, allowed, share)
    _print_batch(trials, trials.largest(settings.batch), as_json)


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


def _memory(text: str | None, settings: Settings) -> int:
    """The memory that a step may take: the one given, or the card's."""
    from foreplan.lower.outside import device_bytes

    if text is not None:
        return parse_bytes(text)
    found = device_bytes(str(settings.step.target))
    if found is None:
        raise UsageError(
            f"the target {settings.step.target} names no machine: say what the arena may take (--memory 8GiB), or name "
            "a card (--target cuda:t4)"
        )
    return found


def _trials(model: str, settings: Settings, memory: int, share: float | None) -> Trials:
    from foreplan.fit.trials import Trials

    return Trials(lambda batch: compile_model(model, at_batch(settings, batch)), memory, share, say)


def _print_batch(trials: Trials, batch: int, as_json: bool) -> None:
    """The batch that was found; 0: none was."""
    from foreplan.fit.trials import MOST

    allowed = trials.memory
    if not batch:
        least = trials.needed(1)
        raise DoesNotFitError(
            f"not even a batch of 1 fits: it needs {format_bytes(least)}, and there are {format_bytes(allowed)}",
            needed=least,
            capacity=allowed,
            lower_bound=least,
        )
    step = trials.cheapest(batch)
    figures = step.estimate()
    if as_json:
        kept = (
            "arena_bytes",
            "whole_bytes",
            "device_bytes",
            "host_bytes",
            "lower_bound_bytes",
            "extra_flops_ratio",
            "lacking",
        )
        told = {name: figures[name] for name in (*kept, "extra_seconds_ratio", "predicted_seconds")}
        print_json({"batch": batch, "memory_bytes": allowed} | told)
        return
    what = "arena" if figures["device_bytes"] is None else "whole card"
    host = f"{format_bytes(figures['host_bytes'])} of host memory, " if figures["host_bytes"] else ""
    echo(
        f"batch {batch}: {what} {in_common(step.counted_bytes, allowed)}, {host}"
        f"{figures['extra_flops_ratio']:+.2%} flops, {figures['extra_seconds_ratio']:+.2%} predicted time"
    )
    if batch == MOST:
        echo(f"Larger batches may fit, too: none beyond {MOST:,} is tried.")
    if figures["lacking"]:
        echo(f"{figures['lacking']}.")


@dataclass(frozen=True)
class _Row:
    """The largest batch on a card.

    Attributes:
        card: its name in targets.
        device_bytes: its memory.
        batch: 0: not even one sample fits.
        whole_bytes: that a step takes; of one sample where no batch fits.
        predicted_seconds: of a step.
        samples_per_second: likewise.
        extra_seconds_ratio: of the time, what recomputation adds.
        lacking: the library that the plan was made without, for people; empty: none.
    """

    card: str
    device_bytes: int
    batch: int
    whole_bytes: int
    predicted_seconds: float | None = None
    samples_per_second: float | None = None
    extra_seconds_ratio: float | None = None
    lacking: str = ""


def _on_all_cards(model: str, settings: Settings, share: float | None) -> Iterator[_Row]:
    """One row per card, by name. Each search starts from the batch that the search before it found."""
    from foreplan.runtime.cuda.device import devices

    first = settings.batch
    for name, device in devices().items():
        memory = device.memory_bytes
        on_card = replace(settings, step=replace(settings.step, target=f"cuda:{name}"))
        trials = _trials(model, on_card, memory, share)
        say(f"{name}, {format_bytes(memory)}:")
        batch = trials.largest(first)
        if not batch:
            yield _Row(name, memory, 0, trials.needed(1))
            continue
        step = trials.cheapest(batch)
        figures = step.estimate()
        seconds, samples = figures["predicted_seconds"], batch * step.accumulate
        rate = samples / seconds if seconds else None
        added, lacking = figures["extra_seconds_ratio"], figures["lacking"]
        yield _Row(name, memory, batch, figures["whole_bytes"], seconds, rate, added, lacking)
        first = batch


def _print_cards(found: Iterator[_Row], as_json: bool) -> list[_Row]:
    """Print rows, each as soon as it is found."""
    if as_json:
        rows = list(found)
        print_json({"cards": [vars(row) for row in rows]})
        return rows
    rows = []
    echo(f"{'card':<12}  {'takes':>18}  {'largest batch':>13}  {'samples a second':>16}  {'recomputing':>11}")
    for row in found:
        rows.append(row)
        size = in_common(row.whole_bytes, row.device_bytes)
        if row.samples_per_second is None or row.extra_seconds_ratio is None:
            echo(f"{row.card:<12}  {size:>18}  {'none fits':>13}")
            continue
        echo(
            f"{row.card:<12}  {size:>18}  {row.batch:>13,}  {row.samples_per_second:>16,.1f}  "
            f"{row.extra_seconds_ratio:>+11.1%}"
        )
    for lacking in sorted({row.lacking for row in rows} - {""}):
        echo(f"{lacking}.")
    return rows


COMMANDS = (fit,)
