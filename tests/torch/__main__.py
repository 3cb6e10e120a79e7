"""`python -m tests.torch [MODULE ...]`: judge exported modules, into benchmarks/results/torch-exports.json and .md.

It needs torch, onnxscript and onnxruntime beside foreplan; half an hour for all modules on one core.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from tests.torch.exports import FORMS, example
from tests.torch.judge import judge
from tests.torch.modules import MODULES
from tests.torch.report import as_markdown

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "torch-exports.json"


def main() -> None:
    """Judge the modules that are named, or all; what is known of the others stays."""
    torch.set_num_threads(1)
    asked = sys.argv[1:] or list(MODULES)
    if unknown := set(asked) - set(MODULES):
        raise SystemExit(f"no such module: {', '.join(sorted(unknown))}; there are {', '.join(MODULES)}")
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in asked:
        made, started = example(name), time.perf_counter()
        results[name] = {}
        for form in FORMS:
            with tempfile.TemporaryDirectory() as folder:
                results[name][form] = judge(made, form, Path(folder)).to_json()
        print(f"{name}: {time.perf_counter() - started:.1f} s", file=sys.stderr, flush=True)
        kept = {each: results[each] for each in MODULES if each in results}
        RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
        RESULTS.with_suffix(".md").write_text(as_markdown(kept) + "\n")


if __name__ == "__main__":
    main()
