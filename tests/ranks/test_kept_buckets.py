"""Which buckets of weights stay where a step turns from one phase to the next."""

from __future__ import annotations

from random import Random

import pytest

from foreplan.graph import Fill, Kind, TensorType, Value
from foreplan.graph.types import FLOAT32
from foreplan.passes.ranks import Ranks
from foreplan.passes.ranks.kept_buckets import KeptBuckets
from foreplan.passes.ranks.layout import Bucket, made_bucket
from tests.profile import pick

RANKS = Ranks(2, "parameters")


def bucket(name: str) -> Bucket:
    """One of a single weight."""
    weight = Value(name, TensorType(FLOAT32, (4,)), Kind.PARAMETER, Fill(0.0))
    return made_bucket(0, [weight], RANKS, {})


BUCKETS = {name: bucket(name) for name in "abcdefs"}


def staying(*phases: str) -> list[str]:
    """By phase but the first, which of the buckets that it reads have stayed; a phase is a letter a read."""
    reads = [(number, BUCKETS[name]) for number, phase in enumerate(phases) for name in phase]
    stays = KeptBuckets(reads)
    return [
        "".join(name for name in dict.fromkeys(phase) if stays.since(number, BUCKETS[name]) < number)
        for number, phase in enumerate(phases)
        if number
    ]


def test_the_last_one_stays() -> None:
    assert staying("abc", "cba") == ["c"]
    assert staying("abc", "abc") == ["c"]
    assert staying("abc", "cba", "abc", "cba") == ["c", "a", "c"]


def test_one_that_lives_long_stays() -> None:
    """Read along with others: to drop it would let nothing else take its place."""
    assert staying("asbscs", "scsbsa") == ["s"]
    assert staying("asbscsd", "dscsbsa") == ["ds"]


def test_one_that_is_dropped_for_long_does_not() -> None:
    assert staying("asbscde", "edcsbsa") == ["e"]


def test_one_that_lives_for_a_short_time_does_not() -> None:
    assert staying("abcsds", "sdscba") == ["s"]
    assert staying("abcsdse", "edscba") == ["e"]


@pytest.mark.parametrize("seed", range(pick(20, 200, 2000)))
def test_drawn_reads(seed: int) -> None:
    """Held against the rule, read by read."""
    rng = Random(seed)
    phases = ["".join(rng.choice("abcs") for _ in range(rng.randint(1, 9))) for _ in range(rng.randint(2, 4))]
    for before, now, found in zip(phases, phases[1:], staying(*phases)):
        for name in dict.fromkeys(now):
            long = pause = 0
            if name in before:
                long = len(set(before[before.index(name) : before.rindex(name)]) - {name})
                pause = len(set(before[before.rindex(name) :] + now[: now.index(name)]) - {name})
            stays = before[-1] == name or (name in before and long >= 2 and pause < 2)
            assert (name in found) == stays, (phases, name)
