"""The command line: every command, with options and values drawn without mercy."""

from __future__ import annotations

import io
import json
import random
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import click
import numpy as np
from click.testing import CliRunner

import foreplan as fp
from foreplan.base.errors import UsageError
from foreplan.cli import cli
from tests.fuzz.target import Target
from tests.profile import SHORT, searching_by

_HELD = ExitStack()  # to the process's end
MODEL = "mlp:batch=2,width=4,layers=2,inputs=3,classes=2"
MODELS = (
    MODEL,
    "conv_chain:size=8",
    "gpt2_small:layers=0",
    "mlp:batch=0",
    "mlp:width=-1",
    "mlp:=,",
    "mlp:batch=2,batch=3",
)
MODELS += ("mlp:batch=1e3", "mlp:batch=4611686018427387904", "mlp:width=99999999999999999999", "mlp:layers=0", "no", "")
MODELS += (
    "s.plan",
    "data.npz",
    "t.csv",
    ".",
    "no.onnx",
    "t.csv.onnx",
    "mlp:dropout=nan",
    "../s.plan",
    "\udcff",
    ":",
    "mlp:a",
)
SIZES = (
    "1",
    "0",
    "-1",
    "1e308",
    "9" * 400,
    "9" * 5000,
    "1GiB",
    "0.5",
    "1.0",
    "nan",
    "inf",
    "0.0000001",
    "1 MiB",
    "",
    "x",
    "8EiB",
)
NUMBERS = ("0", "1", "2", "3", "-1", "1.5", "1e308", "nan", "inf", "9" * 30, "9" * 5000, "", "x", "٣", "1_0", "0x10")
TEXTS = (
    "",
    "x",
    "x:2x3",
    "x:",
    ":2",
    "x:0x3",
    "x:2x3,x:2x3",
    "x:-1",
    "x:99999999999999999999",
    "x:" + "1x" * 80 + "1",
    "out",
)
TEXTS += (
    "hidden1",
    "*",
    "[",
    "a..b",
    "..",
    "h.*",
    "\0",
    "\udcff",
    "numpy",
    "cpu",
    "cpu:threads=2",
    "cpu:threads=x",
    "cuda:h100",
)
TEXTS += (
    "cuda:",
    "cuda:no.toml",
    "cuda:t.csv",
    "gpu",
    "bf16",
    "fp16",
    "float32",
    "float8",
    "unlimited",
    "auto",
    "5%",
    "1e9%",
)
FILES = (
    "s.plan",
    "data.npz",
    "t.csv",
    "step.toml",
    "w.safetensors",
    "no",
    "",
    ".",
    "no/such",
    "out.x",
    "t.csv/x",
    "link",
)
OPTIMIZERS = ("sgd", "lamb", "muon:iterations=1", "rmsprop:centered=true,momentum=0.5", "adam:beta1=nan", "adam:ema=x")
OPTIMIZERS += ("adafactor:,", "lion:=", "adagrad:initial", "muon:coefficients=1", ":", "SGD")
SCHEDULES = ("cosine:steps=3,warmup=1", "cosine", "linear:steps=1e3", "one_cycle:steps=2,rise=0", "constant:warmup=2")
SCHEDULES += ("inverse_sqrt:warmup=9999999999999999999", "polynomial:steps=9,power=-1", "staircase:every=0", "joined")
RUNS = {"bench", "train", "run"}
LONG = ("--steps", "--epochs")
FEW = (*LONG, "--threads", "--accumulate", "--batch")  # what a command may rightly take long for


@cache
def _commands() -> dict[str, list[click.Parameter]]:
    return {name: list(command.params) for name, command in sorted(cli.commands.items())}


@cache
def _files() -> dict[str, bytes]:
    """What lies in the folder."""
    rng, data = np.random.default_rng(0), io.BytesIO()
    np.savez(data, x=rng.standard_normal((6, 3), np.float32), target=rng.integers(0, 2, 6))
    table = b"id,lower,upper,size\na,0,3,64\nb,1,4,32\nc,2,9,16\n"
    step = b"budget = 0.9\n[model]\nbatch = 3\n"
    return {
        "data.npz": data.getvalue(),
        "t.csv": table,
        "step.toml": step,
        "s.plan": _saved("plan", MODEL, "-o", "s.plan"),
    }


def _saved(*arguments: str) -> bytes:
    with CliRunner().isolated_filesystem():
        assert CliRunner().invoke(cli, arguments).exit_code == 0
        return Path(arguments[-1]).read_bytes()


def value(rng: random.Random, command: str, parameter: click.Parameter) -> str:
    """What may be written behind a flag, right or wrong."""
    name = parameter.opts[0]
    if isinstance(parameter.type, click.Choice) and rng.random() < 0.8:
        return str(rng.choice(list(parameter.type.choices)))
    if name in ("--optimizer", "--schedule") and rng.random() < 0.8:
        return rng.choice(OPTIMIZERS if name == "--optimizer" else SCHEDULES)
    if name in FEW and command in RUNS:
        return rng.choice(("0", "1", "2", "-1", "x", "", *(() if name in LONG else ("9" * 30,))))
    if name in ("--budget", "--capacity", "--memory", "--workspace"):
        return rng.choice(SIZES)
    if name in (
        "--data",
        "--out",
        "-o",
        "--resume",
        "--weights",
        "--over",
        "--config",
        "table",
        "file",
        "before",
        "after",
    ):
        return rng.choice(FILES) if rng.random() < 0.7 else "data.npz"
    if isinstance(parameter.type, click.types.IntParamType | click.types.FloatParamType):
        return rng.choice(NUMBERS)
    return rng.choice(TEXTS)


def _draw(rng: random.Random) -> bytes:
    command = rng.choice(list(_commands()))
    arguments = [command]
    for parameter in _commands()[command]:
        wanted = parameter.required or rng.random() < 0.12
        if isinstance(parameter, click.Argument):
            good = rng.random() < 0.6 or command in RUNS
            own = {"model": MODEL, "table": "t.csv"}.get(parameter.name or "", "s.plan")
            arguments.append(own if good else rng.choice(MODELS))
        elif wanted and rng.random() < 0.97:
            arguments.append(rng.choice((*parameter.opts, *parameter.secondary_opts)))
            if not getattr(parameter, "is_flag", False):
                good = parameter.name == "data" and rng.random() < 0.7
                arguments.append("data.npz" if good else value(rng, command, parameter))
    if rng.random() < 0.05:
        arguments.insert(rng.randrange(len(arguments) + 1), rng.choice((*TEXTS, "--", "--no-such", "-h", "--json")))
    return json.dumps(arguments).encode()


def _run(content: bytes, folder: Path) -> None:
    for name, data in _files().items():
        (folder / name).write_bytes(data)
    (folder / "link").symlink_to("s.plan")
    done = CliRunner().invoke(cli, json.loads(content))
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert "Traceback" not in done.stderr
    if done.exit_code:
        assert done.stderr.strip() or "--json" in json.loads(content), "no word of what is wrong"
        raise UsageError(done.stderr)


def _prepare() -> None:
    _HELD.enter_context(searching_by(SHORT))  # what a command finds is not asked here
    _files()
    data = ("--data", "data.npz")
    with CliRunner().isolated_filesystem():
        for name, content in _files().items():
            Path(name).write_bytes(content)
        for arguments in (["train", MODEL, *data], ["pareto", MODEL], ["fit", MODEL, "--memory", "2KiB"]):
            CliRunner().invoke(cli, arguments)
        fp.compile(fp.models.build(MODEL), target="cuda:h100")


TARGET = Target("arguments", _draw, _run, _prepare, sample=30)
