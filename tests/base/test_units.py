"""Sizes as people write them, and as programs compute them."""

from __future__ import annotations

import numpy as np
import pytest

import foreplan as fp
from foreplan.base.errors import UsageError
from foreplan.base.units import parse_budget, parse_bytes, parse_nanoseconds, parse_rate

SMALL = "mlp:batch=4,width=8,layers=2"


@pytest.mark.parametrize(
    "size, nbytes",
    [
        (7, 7),
        (np.int64(7), 7),
        (np.uint8(255), 255),
        ("7", 7),
        ("1.5KiB", 1536),
        (" .5 kB ", 500),
        ("0.1GiB", 107_374_182),
        ("9007199254740993.0", 2**53 + 1),  # no float
        (str(2**63 - 1), 2**63 - 1),
        ("0" * 400 + "1", 1),
    ],
)
def test_sizes(size: object, nbytes: int) -> None:
    assert parse_bytes(size) == nbytes


LONG = ["9" * 400, "9" * 5000, "0." + "1" * 5000, "9" * 400 + ".5", "1" + "x" * 10**6, 10**400]
NONE = ["1e308", "", "GiB", "-1", -1, 2**63, np.int64(-1), 1.5, np.float32(1), None, True, [1]]


@pytest.mark.parametrize("size", [*LONG, *NONE], ids=lambda size: f"{size!r:.20}" if isinstance(size, str) else None)
def test_what_is_no_size(size: object) -> None:
    with pytest.raises(UsageError) as said:
        parse_bytes(size)
    assert len(str(said.value)) < 200


@pytest.mark.parametrize("budget", [1e-308, 10**400, "9" * 400, [], True])
def test_what_is_no_budget(budget: object) -> None:
    with pytest.raises((UsageError, fp.DoesNotFitError)):
        fp.compile(fp.models.build(SMALL), fp.losses.mean, fp.optim.SGD(0.1), budget=budget)


@pytest.mark.parametrize("budget", [np.int64(1 << 30), np.float32(1), np.uint32(1 << 30), "1GiB", 1.5, 1e308])
def test_numpys_numbers_and_large_shares_are_budgets(budget: object) -> None:
    step = fp.compile(fp.models.build(SMALL), fp.losses.mean, fp.optim.SGD(0.1), budget=budget)
    assert type(step.plan.budget) is int


@pytest.mark.parametrize(
    "budget, parsed", [("0.5", 0.5), ("2GiB", 2 << 30), (0.5, 0.5), (2.0, 2.0), (7, 7), (np.int64(7), 7), ("1", 1)]
)
def test_budgets(budget: object, parsed: float) -> None:
    assert parse_budget(budget) == parsed and type(parse_budget(budget)) is type(parsed)


@pytest.mark.parametrize(
    "budget", ["lots", "-1", "nan", "inf", "2 parsecs", True, None, 0.0, -0.5, float("inf"), "-0.5"]
)
def test_what_parses_as_no_budget(budget: object) -> None:
    with pytest.raises(UsageError):
        parse_budget(budget)


@pytest.mark.parametrize(
    "text, rate",
    [
        ("12.5GB/s", 12_500_000_000),
        (" 100 Gbit/s ", 12_500_000_000),
        ("2GiB/s", 2 << 30),
        ("8bit/s", 1),
        ("1kB/s", 1000),
        ("1KiB/s", 1024),
        ("1.6Tbit/s", 200_000_000_000),
    ],
)
def test_rates(text: str, rate: int) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize(
    "text",
    ["", "12", "12GB", "12Gb/s", "12gbit/s", "-1GB/s", "0GB/s", "7bit/s", "1iB/s", "1e9B/s", "9" * 400 + "B/s", "fast"],
)
def test_what_is_no_rate(text: str) -> None:
    """`Gb/s` least of all: it means bits to some, and bytes to others."""
    with pytest.raises(UsageError, match=r"12.5GB/s or 100Gbit/s") as said:
        parse_rate(text)
    assert len(str(said.value)) < 200


@pytest.mark.parametrize(
    "text, found", [("5us", 5000), ("5 µs", 5000), (" 5μs ", 5000), ("1.5ms", 1_500_000), ("800ns", 800), ("0s", 0)]
)
def test_times(text: str, found: int) -> None:
    assert parse_nanoseconds(text) == found


@pytest.mark.parametrize("text", ["", "5", "-5us", "5 years", "1e3ns", "9" * 400 + "s", "9" * 18 + "s", "soon"])
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(UsageError, match="such as 5us") as said:
        parse_nanoseconds(text)
    assert len(str(said.value)) < 200
