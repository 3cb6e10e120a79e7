"""The command about cards: devices."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click

from foreplan.base.errors import TargetError, UsageError
from foreplan.base.files import check_writable, write_atomically
from foreplan.base.units import format_bytes, format_count
from foreplan.cli.flags import command, json_option, out_option
from foreplan.cli.options import echo, print_json, say, working

if TYPE_CHECKING:
    from pathlib import Path

    from foreplan.base.calibration import Calibration
    from foreplan.runtime.cuda.device import Device


@command(short_help="List the cards that foreplan can plan for.")
@click.option("--capture", is_flag=True, help="Write a profile of the card in this machine instead.")
@out_option("FILE.toml", "Where to write it; standard output by default.")
@click.option(
    "--calibrate",
    is_flag=True,
    help="Measure the memory of processes outside their arenas, and the links between ranks.",
)
@json_option
def devices(capture: bool, path: str | None, calibrate: bool, as_json: bool) -> None:
    """List the cards that foreplan can plan for, and this machine's processor. No card needs to be in the machine.

    --capture writes a profile of a card; `--target cuda:FILE.toml` plans for it. --calibrate measures the memory of
    processes on this machine, the links between them, and its card if it has one. The figures are kept with the user's
    settings, and later estimates use them. Calibrate while nothing else uses the machine.

    \b
    Examples:
      foreplan devices
      foreplan devices --capture -o mine.toml
      foreplan devices --calibrate
    """
    if path is not None and not capture:
        raise UsageError("-o is where --capture writes a profile: give both, or neither to list the cards")
    if capture and calibrate:
        raise UsageError("--capture asks a card for its profile, and --calibrate measures memory: give one of them")
    if calibrate:
        _calibrate(as_json)
    elif capture:
        _capture(path, as_json)
    else:
        _list(as_json)


def _list(as_json: bool) -> None:
    """Prints every known card, and the processor."""
    from foreplan.runtime.cuda.device import devices as known

    if as_json:
        print_json({"cards": [device.as_json() for device in known().values()], "cpu": _processor()})
        return
    _print_table(known().values())
    echo(f"\nthe processor of this machine: {_processor_text()}")


def _calibrate(as_json: bool) -> None:
    """What was measured of processes on this machine, of links between them, and on its card if it has one, written
    into the user's files.
    """
    from foreplan.base.calibration import own_calibrations, record, writable_file
    from foreplan.calibration import links as calibrate_links
    from foreplan.calibration.processes import calibrate_process
    from foreplan.lower.links import LINKS
    from foreplan.runtime.cuda.calibration import CARDS, LIBRARIES, calibrations
    from foreplan.runtime.processes import PROCESSES, processes

    checks = (PROCESSES, processes), (CARDS, calibrations), (LINKS, lambda: own_calibrations(LINKS))
    for kind, read in checks:  # before it takes long
        read()
        writable_file(kind)
    with working("measuring processes"):
        found, libraries, missing = [calibrate_process()], [["onednn"]], list[str]()
    for link in (calibrate_links.MEMORY, calibrate_links.GLOO):
        try:
            with working(f"measuring the link {link}"):
                found.append(calibrate_links.calibrate_link(link))
                libraries.append([])
        except TargetError as error:
            missing.append(f"the link {link} was not measured: {error}")
    card, why = _calibrated_card()
    if card is None:
        missing.append(f"no card was measured: {why}")
    else:
        found.append(card)
        libraries.append(list(LIBRARIES))
    told = [_recorded(each, record(each), names) for each, names in zip(found, libraries, strict=True)]
    if as_json:
        print_json(told)
        return
    for each, calibration in zip(told, found, strict=True):
        echo(f"# written to {each['file']}")
        for name in each["not_installed"]:
            echo(f"# {name} is not installed: what it takes remains assumed")
        echo(calibration.as_toml())
    for reason in missing:
        echo(f"# {reason}")


def _recorded(found: Calibration, path: Path, libraries: Iterable[str]) -> dict[str, Any]:
    """A calibration, where it was written, and which of some libraries it lacks."""
    missing = [name for name in libraries if f"{name}_bytes" not in found.figures]
    return found.as_json() | {"file": str(path), "not_installed": missing}


def _calibrated_card() -> tuple[Calibration | None, str]:
    """What was measured on the card in this machine; or None, and why there is none."""
    from foreplan.calibration.cards import calibrate
    from foreplan.runtime.cuda.libraries import driver
    from foreplan.runtime.cuda.libraries.nvml import Nvml

    try:
        watched = Nvml()
    except TargetError as error:
        return None, str(error)
    with working("measuring the card"):
        return calibrate(watched, driver.card, driver.versions(watched)), ""


def _capture(path: str | None, as_json: bool) -> None:
    """The profile of the card in this machine."""
    from foreplan.runtime.cuda.libraries.capture import captured

    if path is not None:
        if not path.endswith(".toml"):
            raise UsageError(f"a profile is known by its name: write it to a file that ends in .toml, not {path!r}")
        check_writable(path)
    found = captured()
    if path is not None:
        write_atomically(path, found.as_toml())
        say(f"wrote {path}")
    if as_json:
        print_json(found.as_json())
    elif path is None:
        echo(found.as_toml(), nl=False)


def _processor() -> dict[str, Any] | None:
    """What the target cpu is here; None where oneDNN is missing."""
    from foreplan.runtime.cpu.machine import this_machine
    from foreplan.runtime.cpu.tune import prices

    try:
        machine = this_machine()
    except TargetError:
        return None
    rates = {str(n): prices().known_rates(n) for n in range(1, machine.cores + 1)}
    measured = {n: {"flops_per_second": r[0], "bytes_per_second": r[1]} for n, r in rates.items() if r}
    return dataclasses.asdict(machine) | {"measured_by_threads": measured}


def _processor_text() -> str:
    found = _processor()
    if found is None:
        return "the target cpu needs oneDNN (`pip install 'foreplan[cpu]'`)"
    second, last = (format_bytes(nbytes) if nbytes else "unknown" for nbytes in found["cache_bytes"])
    lines = [
        f"{found['model']}, {found['cores']} cores",
        f"  {found['instruction_set']}, by oneDNN {found['onednn']}; caches: {second} a core, {last} shared",
    ]
    for threads, rates in found["measured_by_threads"].items():
        flops, stream = (
            format_count(rates[f"{n}_per_second"], f"{unit}/s") for n, unit in (("flops", "FLOP"), ("bytes", "B"))
        )
        lines.append(f"  {flops} of float32 and {stream}, measured with {threads} thread{'s' * (threads != '1')}")
    if not found["measured_by_threads"]:
        lines.append("  not measured yet: any compilation for it with --tune does")
    return "\n".join(lines)


def _print_table(listed: Iterable[Device]) -> None:
    """Prints one row per card: memory, bandwidth, peak rates."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("device")
    table.add_column("card", overflow="fold")
    for name in ("cc", "SMs", "memory", "bandwidth", "float32", "TF32", "bfloat16", "float16"):
        table.add_column(name, justify="right", no_wrap=True)
    for device in listed:
        peaks = dict(device.peaks)
        rates = [peaks.get(name) for name in ("float32", "tensorfloat32", "bfloat16", "float16")]
        table.add_row(
            device.name,
            device.title.removeprefix("NVIDIA "),
            device.capability,
            str(device.multiprocessors),
            format_bytes(device.memory_bytes),
            format_count(device.bytes_per_second, "B/s"),
            *("–" if rate is None else format_count(rate, "FLOP/s") for rate in rates),
        )
    shown = Console(width=None if sys.stdout.isatty() else 140)
    with shown.capture() as capture:
        shown.print(table)
    echo(capture.get(), nl=False)  # which tells a pipe that nobody reads as all other output does


COMMANDS = (devices,)
