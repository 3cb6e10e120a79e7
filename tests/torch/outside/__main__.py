"""`python -m tests.torch.outside [WORD ...]`: judge modules of other people, into benchmarks/results/ and a page.

All models of transformers, timm, torchvision and diffusers, the layers of `torch.nn`, networks written here; or those
whose name has one of the words. The verdicts go to benchmarks/results/torch-outside.json, a table of their counts to
docs/from-pytorch.md. All of them take an hour on one core; each library is a process of its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.pages import put
from tests.profile import SHORT, searching_by
from tests.torch.outside import libraries, small
from tests.torch.outside.judge import Unfit, Verdict, judge, reference, without_draws, without_ties
from tests.torch.outside.layers import from_layers
from tests.torch.outside.written import from_written

MOST_SECONDS = 150  # of one module
RESULTS = Path(__file__).resolve().parents[3] / "benchmarks" / "results" / "torch-outside.json"
KINDS = ("right", "right in float64", "right where it draws nothing", "refused", "not exported", "wrong")
DRAWS = {
    "transformers": libraries.from_transformers,
    "timm": libraries.from_timm,
    "torchvision": libraries.from_torchvision,
    "diffusers": libraries.from_diffusers,
    "torch.nn": from_layers,
    "written": from_written,
}


def main() -> None:
    """Judge them; what is known of the others stays."""
    words = sys.argv[1:]
    if words[:1] == ["--library"]:
        judge_library(words[1], words[2:])
        return
    for library in DRAWS:
        subprocess.run([sys.executable, "-m", "tests.torch.outside", "--library", library, *words], check=True)
    put("docs/from-pytorch.md", "outside", as_table())


def judge_library(library: str, words: list[str]) -> None:
    """Judge its modules, one after the other."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    for name, make in DRAWS[library]():
        if words and not any(word in name for word in words):
            continue
        started = time.perf_counter()
        try:
            with _in_time():
                found = _judged(make)
        except _TooLong:
            print(f"{name}: passed over, as it takes more than {MOST_SECONDS} s", flush=True)
            continue
        if found is None:
            continue
        said = f"{found.kind}: {found.why}" if found.why else found.kind
        print(f"{name}: {said} ({time.perf_counter() - started:.0f} s)", flush=True)
        keep(name, said)


def _judged(make: Callable[[], Any]) -> Verdict | None:
    """What is found of a module; None: this drawing has no such model, which says nothing of foreplan."""
    try:
        torch.manual_seed(0)
        module, args, kwargs = make()
        small.check_size(module)
        module(*args, **kwargs)
        module = without_ties(without_draws(module))
        module(*args, **kwargs)
        module.load_state_dict(module.state_dict())
        reference(module, args, kwargs)
    except Exception:
        return None
    try:
        with searching_by(SHORT):
            return judge(module, args, kwargs)
    except Unfit:
        return None
    except Exception as error:  # anything but a refusal is a defect
        return Verdict("wrong", f"{type(error).__name__}: {error}"[:300])


class _TooLong(BaseException):
    """No `Exception`, which code of a model may catch."""


@contextlib.contextmanager
def _in_time() -> Iterator[None]:
    """End the body by an exception after some time."""

    def end(*_: Any) -> None:
        raise _TooLong

    signal.signal(signal.SIGALRM, end)
    signal.alarm(MOST_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)


def known() -> dict[str, Any]:
    """What was found so far: `modules`, by name, and `versions` of the libraries."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {"versions": {}, "modules": {}}


def keep(name: str, said: str) -> None:
    """Note what was found of a module, and with which versions."""
    library = name.partition("/")[0]
    packages = {"torch", library if library not in ("torch.nn", "written") else "torch"}
    with open(__file__) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process may judge others
        every = known()
        every["modules"] = dict(sorted((every["modules"] | {name: said}).items()))
        every["versions"] |= {package: version(package).partition("+")[0] for package in packages}
        RESULTS.write_text(json.dumps(every, indent=1) + "\n")


def as_table() -> str:
    """How many modules of each library have each verdict."""
    every = known()
    counts = {library: Counter[str]() for library in DRAWS}
    for name, said in every["modules"].items():
        counts[name.partition("/")[0]][said.partition(": ")[0]] += 1
    counts["all"] = sum(counts.values(), Counter[str]())
    lines = ["| of | modules | " + " | ".join(KINDS) + " |", "|---" * (len(KINDS) + 2) + "|"]
    for library, each in counts.items():
        number = every["versions"].get("torch" if library == "torch.nn" else library, "")
        cells = [f"{library} {number}".strip(), each.total(), *(each[kind] for kind in KINDS)]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
