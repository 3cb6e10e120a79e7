"""Device profiles and calibrations: TOML files that describe a card."""

from __future__ import annotations

import contextlib
import random
from functools import cache
from pathlib import Path

import foreplan as fp
from foreplan.base import calibration
from foreplan.runtime.cuda import device
from foreplan.runtime.cuda.calibration import CARDS
from foreplan.runtime.processes import PROCESSES
from tests.fuzz.mutate import damaged
from tests.fuzz.target import Target

GOOD = Path(device.__file__).parent / "devices" / "h100.toml"
TABLE = Path(device.__file__).parent / "calibration.toml"
VALUES = (
    "0",
    "1",
    "-1",
    "1.5",
    "nan",
    "inf",
    "true",
    '""',
    '"9.0"',
    '"x.y"',
    '"٩.0"',
    '"99999999999.0"',
    "[]",
    "{}",
    "[[]]",
)
VALUES += (
    "[" * 3000,
    '"a\\u0000"',
    "1979-05-27",
    str(2**63),
    str(2**64),
    "9" * 400,
    "0x" + "f" * 5000,
    "a.b=1",
    "''''''",
)
MODEL = "mlp:batch=2,width=4,layers=2,inputs=3,classes=2"


@cache
def _texts() -> tuple[str, ...]:
    return tuple(file.read_text() for file in (GOOD, TABLE))


def _draw(rng: random.Random) -> bytes:
    lines = rng.choice(_texts()).splitlines()
    for _ in range(rng.randrange(4)):
        at = rng.randrange(len(lines))
        key = lines[at].partition("=")[0]
        kind = rng.randrange(4)
        if kind == 0:
            del lines[at]
        elif kind == 1:
            lines.insert(at, lines[rng.randrange(len(lines))])
        else:
            lines[at] = f"{key or 'more'}= {rng.choice(VALUES)}"
        if not lines:
            break
    content = "\n".join(lines).encode()
    return damaged(rng, content) if rng.random() < 0.3 else content


def _run(content: bytes, folder: Path) -> None:
    path = folder / "card.toml"
    path.write_bytes(content)
    for kind in (CARDS, PROCESSES):
        with contextlib.suppress(fp.ForeplanError):
            calibration.read_entries(content.decode("utf-8", "replace"), str(path), kind)
    card = device.device_named(str(path))
    assert device.read_device(card.as_toml(), "again") == card
    fp.compile(fp.models.build(MODEL), target=f"cuda:{path}").estimate()


def _prepare() -> None:
    fp.compile(fp.models.build(MODEL), target="cuda:h100").estimate()


TARGET = Target("devices", _draw, _run, _prepare, sample=300)
