"""Whether a step fits its card, what would fit, and budgets of a whole card."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import foreplan as fp
from foreplan.base.errors import UsageError
from foreplan.base.units import as_size, in_common, parse_bytes
from foreplan.fit import trials
from foreplan.fit.fitting import batch_of
from foreplan.fit.remedies import remedies
from foreplan.report.verdict import Verdict
from foreplan.runtime.cuda import device as devices_module
from foreplan.runtime.cuda.device import device_named
from foreplan.runtime.cuda.outside import PAGE
from foreplan.runtime.regions import allocated
from tests.cli.shell import MODEL, answer, foreplan
from tests.fit.card import FIXED, MIB, small_card

WIDE = "mlp:batch=2048,width=256,layers=6,inputs=16,classes=5"
TWO = WIDE.replace("layers=6", "layers=2")
T4_BYTES = 15_843_721_216  # of the driver, in runtime/cuda/devices/t4.toml


def compiled(target: str, model: str = WIDE, **options: object) -> fp.Compiled:
    return fp.compile(
        fp.models.build(model), fp.losses.cross_entropy, fp.optim.Nesterov(0.01), target=target, **options
    )


def test_a_step_that_fits_says_so_in_its_last_line() -> None:
    done = foreplan("estimate", MODEL, "--target", "cuda:t4")
    assert done.stdout.splitlines()[-1] == "fits: 0.1 of 14.8 GiB"
    figures = answer("estimate", MODEL, "--target", "cuda:t4")
    assert figures["device_bytes"] == T4_BYTES and figures["fits"] is True and figures["remedies"] == []
    outside = {part["name"]: part["nbytes"] for part in figures["outside"]}
    assert figures["whole_bytes"] == figures["arena_bytes"] + sum(outside.values())
    assert sum(outside.values()) - outside["captured graph"] - outside["rest of the arena's last page"] == FIXED
    assert figures["whole_bytes"] % PAGE == 0 and figures["whole_basis"] == "assumed"
    assert figures["predicted_seconds"] > 0


def test_a_target_on_the_host_names_no_memory() -> None:
    figures = answer("estimate", MODEL)
    assert figures["device_bytes"] is None and figures["fits"] is None
    assert figures["whole_bytes"] == figures["peak_bytes"] > figures["arena_bytes"]
    assert "fits" not in foreplan("estimate", MODEL).stdout


def test_what_does_not_fit_is_told_with_a_batch_that_does(tmp_path: Path) -> None:
    options = ("estimate", TWO, "--target", small_card(tmp_path, FIXED + 8 * MIB), "--fission", "off")
    smaller, budget, narrow = answer(*options, code=3)["remedies"]
    assert smaller["batch"] < 2048 == budget["batch"] and narrow["precision"] == "fp16"
    same = answer(*options, "--batch", smaller["batch"])
    assert same["fits"] is True and same["whole_bytes"] == smaller["whole_bytes"]


@pytest.mark.thorough
def test_what_does_not_fit_is_told_with_what_would(tmp_path: Path) -> None:
    target = small_card(tmp_path, FIXED + 12 * MIB)
    options = ("estimate", WIDE, "--target", target, "--fission", "off")
    figures = answer(*options, code=3)
    assert figures["fits"] is False and figures["whole_bytes"] > figures["device_bytes"] == FIXED + 12 * MIB
    smaller, budget, narrow = figures["remedies"]
    for remedy, more in ((smaller, ()), (narrow, ("--precision", "fp16"))):
        same = answer(*options, "--batch", remedy["batch"], *more)
        assert same["fits"] is True and same["whole_bytes"] == remedy["whole_bytes"] <= figures["device_bytes"]
        assert same["predicted_seconds"] == remedy["predicted_seconds"]
        assert answer(*options, "--batch", remedy["batch"] + 1, *more, code=3)["fits"] is False
    assert smaller["batch"] < 2048 and narrow["precision"] == "fp16"  # a T4 has no bfloat16
    same = answer(*options, "--budget", budget["budget"])
    assert same["whole_bytes"] == budget["whole_bytes"] <= parse_bytes(budget["budget"]) <= figures["device_bytes"]
    assert same["extra_seconds_ratio"] == budget["extra_seconds_ratio"] > 0 and budget["batch"] == 2048
    line = foreplan(*options, code=3).stdout.splitlines()[-1]
    size = in_common(figures["whole_bytes"], figures["device_bytes"])
    price = f"+{100 * budget['extra_seconds_ratio']:.0f} % time"
    assert line.startswith(f"does not fit: {size}")
    assert line.endswith(
        f". Fits: batch {smaller['batch']}; or --budget {budget['budget']} ({price}); or fp16 at batch "
        f"{narrow['batch']}"
    )


def test_where_nothing_fits_nothing_is_offered(tmp_path: Path) -> None:
    done = foreplan("estimate", WIDE, "--target", small_card(tmp_path, FIXED), "--fission", "off", code=3)
    assert done.stdout.splitlines()[-1].startswith("does not fit: ") and "Fits:" not in done.stdout


def test_nothing_is_tried_where_the_weights_alone_do_not_fit() -> None:
    step = compiled("cuda:t4", "mlp:batch=1,width=32768,layers=4,inputs=16,classes=5")
    assert step.memory.persistent > T4_BYTES

    def again(batch: int, options: object) -> fp.Compiled:
        raise AssertionError("no other form of this step is compiled")

    assert list(remedies(step, 1, again)) == []


def test_a_plan_file_has_a_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card = device_named(small_card(tmp_path, FIXED).partition(":")[2])
    monkeypatch.setattr(devices_module, "devices", lambda: {"none": card})
    foreplan("plan", WIDE, "--target", "cuda:none", "-o", tmp_path / "step.plan")
    done = foreplan("estimate", tmp_path / "step.plan", code=3)
    assert "\ndoes not fit: " in done.stdout and "Fits:" not in done.stdout


def test_a_verdict_says_what_is_assumed_where_that_decides() -> None:
    near, far = (Verdict(whole, 1000 * MIB, 100 * MIB, "assumed") for whole in (950 * MIB, 850 * MIB))
    assert str(near) == "fits: 950.0 of 1,000.0 MiB, of which 100.00 MiB outside the arena are assumed"
    assert str(far) == "fits: 850.0 of 1,000.0 MiB"
    assert str(Verdict(1000 * MIB, 1000 * MIB, 0, "exact")) == "fits: 1,000.0 of 1,000.0 MiB"
    assert str(Verdict(1000 * MIB + 1, 1000 * MIB, 0, "exact")).startswith("does not fit: ")


def test_a_budget_on_a_card_holds_for_the_whole_card() -> None:
    free = compiled("cuda:t4", remat="off")
    whole = free.memory.peak
    assert whole > free.arena_bytes + FIXED
    same, tight = compiled("cuda:t4", budget=whole), compiled("cuda:t4", budget=whole - PAGE)
    assert same.memory.peak <= whole and same.plan.budget == whole
    assert same.estimate()["extra_seconds_ratio"] == 0 < tight.estimate()["extra_seconds_ratio"]
    assert tight.memory.peak <= whole - PAGE
    again = fp.plan(free.program, budget=whole - PAGE)
    assert again == tight.plan
    with pytest.raises(fp.DoesNotFitError) as caught:
        compiled("cuda:t4", budget=FIXED, fission="off")
    error = caught.value
    assert error.plan is not None and error.capacity == FIXED
    assert error.needed > error.plan.arena_bytes + FIXED and error.needed % PAGE == 0
    assert "bytes: the arena, and" in str(error)
    assert compiled("cuda:t4", budget=error.needed, fission="off").memory.peak == error.needed


def test_a_share_is_one_of_the_arena_on_cards_too() -> None:
    free, half = compiled("cuda:t4", remat="off"), compiled("cuda:t4", budget=0.8)
    assert half.plan.budget == int(0.8 * free.arena_bytes) >= half.arena_bytes


def test_a_budget_holds_for_both_halves_of_a_step() -> None:
    free = compiled("cuda:t4", accumulate=2, remat="off")
    budget = free.memory.peak - 2 * PAGE
    tight = compiled("cuda:t4", accumulate=2, budget=budget)
    assert tight.memory.peak <= budget < free.memory.peak
    with pytest.raises(fp.DoesNotFitError) as caught:
        compiled("cuda:t4", accumulate=2, budget=FIXED, fission="off")
    assert caught.value.needed > FIXED


def test_fit_takes_the_memory_of_the_card_and_counts_all_of_it(tmp_path: Path) -> None:
    target, once = small_card(tmp_path, FIXED + 8 * MIB), ("--max-extra-time", 0)
    found = answer("fit", TWO, "--target", target, *once)
    assert found["memory_bytes"] == found["device_bytes"] == FIXED + 8 * MIB
    assert found["arena_bytes"] + FIXED < found["whole_bytes"] <= found["memory_bytes"]
    for batch, fits in ((found["batch"], True), (found["batch"] + 1, False)):
        assert compiled(target, TWO.replace("2048", str(batch)), remat="off").verdict.fits is fits
    less = answer("fit", TWO, "--target", target, "--memory", FIXED + 6 * MIB, *once)
    assert less["batch"] < found["batch"] and less["whole_bytes"] <= FIXED + 6 * MIB
    assert "whole card" in foreplan("fit", TWO, "--target", target, *once).stdout
    told = answer("fit", TWO, "--target", target, "--memory", "40MiB", code=3)
    assert told["error"] == "does not fit" and told["needed_bytes"] > FIXED
    assert "--memory 8GiB" in foreplan("fit", TWO, code=2).stderr


def test_where_the_search_ends_before_the_memory_does_fit_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "MOST", 64)
    once = "--max-extra-time", 0
    most, fewer = (foreplan("fit", MODEL, *once, "--memory", x).stdout for x in ("1MiB", "6KiB"))
    assert most.startswith("batch 64:") and "none beyond 64 is tried" in most
    assert fewer.startswith("batch ") and "is tried" not in fewer


def test_a_table_of_all_cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"large": FIXED + 12 * MIB, "none": FIXED, "small": FIXED + 8 * MIB}
    cards = {name: device_named(small_card(tmp_path, size, name).partition(":")[2]) for name, size in sizes.items()}
    monkeypatch.setattr(devices_module, "devices", lambda: cards)
    options = ("fit", TWO, "--all-cards", "--max-extra-time", 0)
    rows = {row["card"]: row for row in answer(*options)["cards"]}
    assert list(rows) == list(sizes)
    for name in ("large", "small"):
        one = answer("fit", TWO, "--target", f"cuda:{name}", "--max-extra-time", 0)
        row = rows[name]
        assert (row["batch"], row["whole_bytes"]) == (one["batch"], one["whole_bytes"])
        assert row["samples_per_second"] == pytest.approx(one["batch"] / one["predicted_seconds"])
    assert rows["none"]["batch"] == 0 and rows["none"]["samples_per_second"] is None
    header, *lines = foreplan(*options).stdout.splitlines()
    assert header.split()[0] == "card" and [line.split()[0] for line in lines] == list(sizes)
    assert lines[1].endswith("none fits") and f"{rows['large']['batch']:,}" in lines[0]
    monkeypatch.setattr(devices_module, "devices", lambda: {"none": cards["none"]})
    foreplan(*options, code=3)
    for more in (("--memory", "1GiB"), ("--target", "cpu")):
        assert more[0] in foreplan(*options, *more, code=2).stderr


def test_the_batch_of_a_model() -> None:
    assert batch_of(fp.models.build("dlrm:batch=16")) == 16  # two inputs
    assert batch_of(fp.trace(lambda x, y: x @ y, fp.spec((2, 3)), fp.spec((3, 4)))) is None
    assert batch_of(fp.trace(lambda x: x + 1, fp.spec(()))) is None


@given(st.integers(0, 2**45), st.integers(0, 2**20))
def test_a_size_for_an_option_is_read_back_within_its_limits(nbytes: int, room: int) -> None:
    assert nbytes <= parse_bytes(as_size(nbytes, nbytes + room)) <= nbytes + room


def test_sizes_in_one_unit() -> None:
    assert in_common(26_092_000_000, T4_BYTES) == "24.3 of 14.8 GiB"
    assert in_common(T4_BYTES + (1 << 24), T4_BYTES) == "14.77 of 14.76 GiB"
    assert as_size(14_900_000_000, T4_BYTES) == "13.9GiB"
    with pytest.raises(UsageError):
        parse_bytes("13.9 of 14")


@pytest.mark.thorough
@pytest.mark.whole_search
def test_the_verdict_in_the_readme_is_what_its_command_prints() -> None:
    """No cuDNN is asked for it, installed or not: a T4 has no kernels of its for attention."""
    text = " ".join((Path(__file__).parents[2] / "README.md").read_text().split())
    command, line = re.findall(r"`foreplan (estimate [^`]*)` ends with `(does not fit[^`]*)`", text)[0]
    assert foreplan(*command.split(), code=3).stdout.splitlines()[-1] == line


def test_an_arena_that_cannot_be_allocated_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(heights: object) -> None:
        raise MemoryError

    step = compiled("numpy", MODEL)
    with pytest.raises(fp.DoesNotFitError, match="no memory for an arena of") as caught:
        allocated(refuse, step.plan.heights, "an arena")
    assert caught.value.exit_code == 3 and caught.value.needed == step.arena_bytes
