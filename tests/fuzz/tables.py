"""Tables of numbers: .npz files for `run` and `train`, CSV files for the placer."""

from __future__ import annotations

import io
import random
import zipfile
from functools import cache
from pathlib import Path

import numpy as np

import foreplan as fp
from foreplan.cli.data import epoch, read_arrays, samples_in
from foreplan.compiler.compiled import Compiled
from foreplan.planner import place_intervals, read_intervals, write_intervals
from tests.fuzz.mutate import damaged
from tests.fuzz.target import Target

DTYPES = (
    "float32",
    "float64",
    "float16",
    "int64",
    "int32",
    "uint8",
    "bool",
    "complex64",
    "S3",
    "U2",
    "M8[s]",
    "V4",
    ">f4",
)
NUMBERS = (
    "0",
    "1",
    "7",
    "64",
    "-1",
    "",
    " 3 ",
    "1e3",
    "1.5",
    "nan",
    "٣",
    "1_0",
    "9" * 30,
    "9" * 5000,
    str(2**59),
    "x",
    '"',
)
HEADERS = (
    "id,lower,upper,size",
    "size,id,upper,lower",
    "id,lower,upper,size,alignment,offset",
    "id,lower",
    "",
    "id;lower",
)
WORK = 1_000_000  # for the placer: a fraction of a second


@cache
def _step() -> Compiled:
    model = fp.models.build("mlp:batch=2,width=4,layers=2,inputs=3,classes=2")
    return fp.compile(model, fp.losses.cross_entropy, fp.optim.SGD(0.1))


def _arrays(rng: random.Random) -> bytes:
    arrays = {}
    for name in ("x", "target", *rng.choices(("y", "", "a/b", "é", "file"), k=rng.randrange(2))):
        if rng.random() < 0.9:
            rank = rng.choice((0, 1, 1, 2, 2, 3, 9))
            shape = (
                tuple(rng.choice((0, 1, 2, 3, 5)) for _ in range(rank))
                if rng.random() < 0.4
                else (5, 3)[: 1 + (name == "x")]
            )
            own = "float32" if name == "x" else "int64"
            dtype = np.dtype(own if rng.random() < 0.7 else rng.choice(DTYPES))
            count = int(np.prod(shape))
            content = rng.randbytes(count * dtype.itemsize) if rng.random() < 0.2 else bytes(count * dtype.itemsize)
            arrays[name] = np.frombuffer(content, dtype).reshape(shape) if count else np.zeros(shape, dtype)
    out = io.BytesIO()
    if rng.random() < 0.2:
        np.save(out, next(iter(arrays.values()), np.zeros(2)))
    else:
        with zipfile.ZipFile(out, "w", rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))) as archive:
            for name, array in arrays.items():
                one = io.BytesIO()
                np.save(one, array)
                npy = one.getvalue()
                archive.writestr(f"{name}.npy", damaged(rng, npy[:128]) + npy[128:] if rng.random() < 0.2 else npy)
    content = out.getvalue()
    return damaged(rng, content) if rng.random() < 0.4 else content


def _csv(rng: random.Random) -> bytes:
    header = rng.choice(HEADERS[:3] if rng.random() < 0.9 else HEADERS)
    lines = [header]
    for i in range(rng.randrange(9)):
        values = {"id": str(i), "lower": str(rng.randrange(5)), "upper": str(5 + rng.randrange(5))}
        values |= {
            "size": str(rng.choice((0, 1, 64, 2**40, 2**59))),
            "alignment": rng.choice(("1", "64", "")),
            "offset": "",
        }
        if rng.random() < 0.1:
            values[rng.choice(list(values))] = rng.choice(NUMBERS)
        lines.append(",".join(values.get(name, "") for name in header.split(",")))
    mark = rng.choice((b"", b"", b"\xef\xbb\xbf", b"\xff\xfe"))
    content = mark + rng.choice(("\n", "\r\n", "\r")).join(lines).encode()
    return damaged(rng, content) if rng.random() < 0.3 else content


def _draw(rng: random.Random) -> bytes:
    return _csv(rng) if rng.random() < 0.5 else _arrays(rng)


def _run(content: bytes, folder: Path) -> None:
    path = folder / "table"
    path.write_bytes(content)
    if content[:2] != b"PK" and content[:1] != b"\x93":
        found = read_intervals(path)
        placed = place_intervals(found, work=WORK)
        write_intervals(folder / "out.csv", found, placed.offsets.tolist())
        assert len(read_intervals(folder / "out.csv")) == len(found)
        return
    arrays = read_arrays(str(path))
    program = _step().program
    samples, size = samples_in(program, arrays, str(path))
    session = _step().bind()
    for batch in epoch(program, arrays, samples, size, 0, 0):
        session.step(batch)


def _prepare() -> None:
    _step()
    place_intervals([], work=WORK)


TARGET = Target("tables", _draw, _run, _prepare, sample=500)
