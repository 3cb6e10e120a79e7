"""The table of `fit --ranks 1,2,4,8`: the largest batch for each number of ranks and each sharding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from foreplan.base.arguments import SHARDS
from foreplan.base.errors import UsageError
from foreplan.base.units import format_bytes, in_common
from foreplan.cli.options import echo, print_json, say

if TYPE_CHECKING:
    from foreplan.cli.settings import Settings
    from foreplan.fit.trials import Trials


@dataclass(frozen=True)
class RanksRow:
    """The largest batch of each rank, for a number of ranks that hold parts of something.

    Attributes:
        ranks: how many.
        shard: what each holds a part of.
        memory_bytes: that each rank may take.
        batch: of each rank, or group; 0: not even one sample fits.
        whole_bytes: that a step takes on each rank; of one sample where no batch fits.
        predicted_seconds: of a step.
        samples_per_second: of all ranks together.
        sent_bytes: that each rank sends in a step.
        tensor: so many ranks make a group with the same samples.
    """

    ranks: int
    shard: str
    memory_bytes: int
    batch: int
    whole_bytes: int
    predicted_seconds: float | None = None
    samples_per_second: float | None = None
    sent_bytes: int = 0
    tensor: int = 1

    @property
    def samples(self) -> int:
        """Of all ranks together, in a step without accumulation."""
        return self.batch * self.ranks // self.tensor


def ranks_in(text: str) -> tuple[int, ...]:
    """Numbers of ranks, from a text such as `1,2,4,8`.

    Raises:
        UsageError: it is none.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and int(word) for word in words):
        raise UsageError(f"--ranks {text!r} is no number of ranks, and no list of such as 1,2,4,8")
    return tuple(dict.fromkeys(map(int, words)))


def rows_of_ranks(
    settings: Settings, counts: tuple[int, ...], chosen: bool, trials_of: Callable[[Settings], Trials]
) -> Iterator[RanksRow]:
    """One row for each number of ranks and each sharding.

    Args:
        chosen: whether the settings say that; else all are tried.
        trials_of: what tries batches with some settings.
    """

    first, tensor = settings.batch, settings.step.tensor
    for count in counts:
        for shard in (settings.step.shard,) if chosen else SHARDS if count > 1 else SHARDS[:1]:
            trials = trials_of(replace(settings, step=replace(settings.step, ranks=count, shard=shard)))
            say(f"{count} ranks, {shard} in parts:")
            batch = trials.largest(first)
            if not batch:
                yield RanksRow(count, shard, trials.memory, 0, trials.needed(1), tensor=tensor)
                continue
            step = trials.cheapest(batch)
            figures, first = step.estimate(), batch
            seconds, samples = figures["predicted_seconds"], batch * step.accumulate * count // tensor
            rate = samples / seconds if seconds else None
            size = step.counted_bytes
            yield RanksRow(count, shard, trials.memory, batch, size, seconds, rate, figures["sent_bytes"], tensor)


def print_ranks(found: Iterator[RanksRow], as_json: bool) -> list[RanksRow]:
    """Print rows, each as soon as it is found."""
    if as_json:
        rows = list(found)
        print_json({"ranks": [vars(row) for row in rows]})
        return rows
    rows = []
    heads = ("ranks", "in parts", "a rank takes", "largest batch", "of all ranks", "samples a second", "a rank sends")
    echo("{:>6}  {:<10}  {:>18}  {:>13}  {:>12}  {:>16}  {:>12}".format(*heads))
    for row in found:
        rows.append(row)
        size = in_common(row.whole_bytes, row.memory_bytes)
        start = f"{row.ranks:>6,}  {row.shard:<10}  {size:>18}"
        if not row.batch:
            echo(f"{start}  {'none fits':>13}")
            continue
        rate = "" if row.samples_per_second is None else f"{row.samples_per_second:,.1f}"
        whole, sent = f"{row.samples:,}", format_bytes(row.sent_bytes)
        echo(f"{start}  {row.batch:>13,}  {whole:>12}  {rate:>16}  {sent:>12}")
    return rows
