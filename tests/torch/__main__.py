"""`python -m tests.torch [MODULE ...]`: judge exported modules, into docs/exports.md and benchmarks/results/.

It needs torch, onnxscript and onnxruntime beside foreplan; half an hour for all modules on one core.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from tests.torch.exports import FORMS, example
from tests.torch.judge import judge
from tests.torch.modules import MODULES
from tests.torch.report import as_page, as_results

ROOT = Path(__file__).resolve().parents[2]
RESULTS, PAGE = ROOT / "benchmarks" / "results" / "torch-exports.json", ROOT / "docs" / "exports.md"
EACH = RESULTS.with_suffix(".md")
PACKAGES = ("torch", "onnxscript", "onnxruntime")


def main() -> None:
    """Judge the modules that are named, or all; what is known of the others stays."""
    torch.set_num_threads(1)
    asked = sys.argv[1:] or list(MODULES)
    if unknown := set(asked) - set(MODULES):
        raise SystemExit(f"no such module: {', '.join(sorted(unknown))}; there are {', '.join(MODULES)}")
    known: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"modules": {}}
    if not sys.argv[1:] or not known["modules"]:
        known["versions"] = {name: version(name) for name in PACKAGES}
    for name in asked:
        made, started = example(name), time.perf_counter()
        found: dict[str, Any] = {}
        for form in FORMS:
            with tempfile.TemporaryDirectory() as folder:
                found[form] = judge(made, form, Path(folder)).to_json()
        known["modules"][name] = found
        print(f"{name}: {time.perf_counter() - started:.1f} s", file=sys.stderr, flush=True)
        known["modules"] = {each: known["modules"][each] for each in MODULES if each in known["modules"]}
        RESULTS.write_text(json.dumps(known, indent=1) + "\n")
        PAGE.write_text(as_page(known["modules"], known["versions"]))
        EACH.write_text(as_results(known["modules"], known["versions"]))


if __name__ == "__main__":
    main()
