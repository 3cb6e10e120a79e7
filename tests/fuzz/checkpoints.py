"""Checkpoints: safetensors files with headers, metadata, names, types and shapes that are wrong in every way."""

from __future__ import annotations

import contextlib
import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import foreplan as fp
from foreplan.runtime.session import Session
from tests.fuzz.mutate import damaged
from tests.fuzz.target import Target

MODEL = "mlp:batch=2,width=4,layers=2,inputs=3,classes=2"
TYPES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "X": 4}
ODD = (None, True, 0, -1, 1.5, "", "float32", [], {}, [[]], 2**63, 2**64, 10**30, [0], [-1], [2**62, 4], [1] * 70)
METADATA = (
    "",
    "{",
    "[]",
    "null",
    '{"state":3}',
    '{"state":[1]}',
    "[" * 5000,
    '{"a":' * 5000,
    "1" * 5000,
    "NaN",
    '"\\ud800"',
)


@cache
def _session() -> Session:
    optimizer = fp.optim.Nesterov(0.1)
    return fp.compile(fp.models.build(MODEL), fp.losses.cross_entropy, optimizer).bind()


@cache
def _parts() -> tuple[dict[str, Any], bytes]:
    """The header of a right file, and what lies behind it."""
    header: dict[str, Any] = {}
    data = b""
    for name, array in sorted(_session().stored.items()):
        kind = {"float32": "F32", "int64": "I64", "uint64": "I64", "float64": "F64", "int32": "I32"}[str(array.dtype)]
        end = len(data) + array.nbytes
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [len(data), end]}
        data += array.tobytes()
    return header, data


def _draw(rng: random.Random) -> bytes:
    header, data = _parts()
    header = json.loads(json.dumps(header))
    for _ in range(rng.randrange(4)):
        name = rng.choice(sorted(header))
        kind = rng.randrange(9)
        entry = header[name]
        if kind == 0:
            del header[name]
        elif kind == 1:
            header[rng.choice(("", "x", "\0", "é" * 300, "__metadata__", name + " "))] = header.pop(name)
        elif kind == 2:
            header["__metadata__"] = {rng.choice(("foreplan", "format")): rng.choice(METADATA)}
        elif kind == 3:
            header["__metadata__"] = rng.choice(ODD)
        elif kind == 4:
            header[name] = rng.choice(ODD)
        elif isinstance(entry, dict) and kind == 5:
            entry["dtype"] = rng.choice(list(TYPES))
        elif isinstance(entry, dict) and kind == 6 and isinstance(entry.get("shape"), list):
            entry["shape"] = rng.choice((entry["shape"][::-1], [*entry["shape"], 1], *ODD))
        elif isinstance(entry, dict):
            entry[rng.choice(("dtype", "shape", "data_offsets", "more"))] = rng.choice((*ODD, [0, 4], [4, 0]))
        if not header:
            break
    text = json.dumps(header).encode()
    size = (
        len(text) if rng.random() < 0.9 else rng.choice((0, 7, len(text) - 1, len(text) + 1, 2**31, 2**63, 2**64 - 1))
    )
    content = size.to_bytes(8, "little") + text + data
    return damaged(rng, content) if rng.random() < 0.4 else content


def _run(content: bytes, folder: Path) -> None:
    path = folder / "c.safetensors"
    path.write_bytes(content)
    with contextlib.suppress(fp.ForeplanError):
        _load(path, strict=False)
    _load(path, strict=True)


def _load(path: Path, strict: bool) -> None:
    """Load a file; if it is refused, all values are as they were, but where a number had no room."""
    session = _session()
    before = {name: array.tobytes() for name, array in session.stored.items()}
    try:
        session.load(path, strict=strict)
    except fp.ForeplanError as error:
        same = before == {name: array.tobytes() for name, array in session.stored.items()}
        assert same or (not strict and "no room" in str(error)), "half of it was loaded"
        raise


TARGET = Target("checkpoints", _draw, _run, prepare=lambda: _parts() and None, sample=2000)
