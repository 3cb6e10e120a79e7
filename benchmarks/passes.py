"""What each optional pass brings: models compiled with all passes, and with all but one.

`python benchmarks/passes.py [MODEL ...]` writes the table into docs/adding-a-pass.md and results/passes.json. Nothing
is executed, and no card is needed. A pass is left out only where it changes the graph. Nanoseconds are predicted.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from pages import ROOT, put

import foreplan as fp
from foreplan.base.errors import ForeplanError
from foreplan.compiler.step_graphs import step_graphs
from foreplan.options import Options
from foreplan.passes import KNOWN, Ran
from foreplan.passes import without as left

RESULTS = ROOT / "benchmarks" / "results" / "passes.json"
ZOO = (
    "conv_chain:size=256",
    "mlp",
    "resnet18:batch=4",
    "mobilenet_v2:batch=2",
    "unet:batch=1,size=128",
    "vit_b16:batch=2,layers=2",
    "gpt2_small:batch=2,layers=2,seq=512",
    "bert_base:batch=2,layers=2,seq=256",
    "vgg16:batch=2",
)
FILES = ("densenet121", "inception_v1", "shufflenet")  # that the package onnx ships
TRACED = "gpt, attention written out"
MODELS = (*ZOO, *FILES, TRACED)
FORMS: dict[str, dict[str, Any]] = {
    "training, cpu": {"optimizer": fp.optim.Nesterov(0.1), "target": "cpu:threads=2"},
    "training, h100, bf16": {"optimizer": fp.optim.AdamW(1e-3), "target": "cuda:h100", "precision": "bf16"},
    "inference, cpu": {"target": "cpu:threads=2"},
}
NAMES = tuple(name for name, kind in KNOWN.items() if kind.optional)
KEYS = ("off", "free", "nanoseconds")


def build(name: str) -> tuple[fp.Graph, Any]:
    """A model and the loss that it is trained with."""
    if name in ZOO:
        return fp.models.build(name), getattr(fp.losses, fp.models.default_loss(name))
    if name == TRACED:
        return fp.trace(written_out, fp.spec((2, 256), "int64")), fp.losses.mean
    import onnx

    folder = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
    return fp.from_onnx(folder / f"light_{name}.onnx", batch=2), fp.losses.mean


def written_out(tokens: fp.Tensor) -> fp.Tensor:
    """Two blocks of a GPT as exporters write them: scores, a softmax, and products around them."""
    (batch, positions), width, heads = tokens.shape, 256, 8
    x = fp.nn.embedding(tokens, 1000, width, name="tokens")
    for name in ("h.0", "h.1"):
        y = fp.nn.layer_norm(x, name=f"{name}.norm")
        parts = (fp.nn.linear(y, width, name=f"{name}.{part}") for part in "qkv")
        q, k, v = (part.reshape(batch, positions, heads, -1).transpose(0, 2, 1, 3) for part in parts)
        y = fp.nn.softmax(q @ k.transpose(0, 1, 3, 2) * (width // heads) ** -0.5) @ v
        x = x + fp.nn.linear(y.transpose(0, 2, 1, 3).reshape(batch, positions, width), width, name=f"{name}.o")
    return x


def measure(graph: fp.Graph, options: dict[str, Any]) -> tuple[str, dict[str, int]]:
    """The program's text, its actions, arena bytes without recomputation and with what is free, and nanoseconds."""
    step = fp.compile(graph, remat="off", **options)
    found = {"actions": len(step.program.actions), "off": step.arena_bytes}
    if "loss" in options:
        found["free"] = fp.plan(step.program).arena_bytes
    found["nanoseconds"] = sum(step.program.actions[each.action].nanoseconds for each in step.plan.steps)
    return step.program.as_text(), found


def rows(name: str) -> dict[str, Any]:
    """A model in all its forms: with all passes, and without each that changes something."""
    graph, loss = build(name)
    found: dict[str, Any] = {}
    for form, given in FORMS.items():
        options = given | ({"loss": loss} if "optimizer" in given else {})
        started, ran = time.process_time(), list[Ran]()
        step_graphs(graph, Options(**options), ran.append)
        text, usual = measure(graph, options)
        without: dict[str, Any] = {}
        for left_out in (each for each in NAMES if any(seen.changed and seen.entry.name == each for seen in ran)):
            try:
                other, numbers = measure(graph, options | {"passes": left(left_out)})
            except ForeplanError as error:
                numbers = {"error": str(error)}
                other = ""
            if other != text:
                without[left_out] = numbers
        found[form] = {"usual": usual, "without": without}
        print(f"{name}, {form}: {time.process_time() - started:.0f} s", flush=True)
        for left_out, numbers in without.items():
            print("   ", left_out, *(f"{key} {brought(usual, numbers, key):+.2%}" for key in KEYS if key in usual))
    return found


def brought(usual: dict[str, int], without: dict[str, int], key: str) -> float:
    """What a pass changes of a number: -0.1 where it is a tenth lower with the pass than without."""
    return usual[key] / without[key] - 1 if key in without else 0.0


def lines(results: dict[str, Any]) -> list[str]:
    """Of the table: a line a pass and form, with the least and the greatest change over models."""
    made = []
    for name in NAMES:
        for form in FORMS:
            given = [results[model][form] for model in MODELS if model in results]
            pairs = [(row["usual"], row["without"][name]) for row in given if name in row["without"]]
            if not pairs:
                continue
            cells = [f"`{name}`", form, f"{len(pairs)} of {len(given)}"]
            for key in KEYS:
                shares = [brought(*pair, key) for pair in pairs if key in pair[0]]
                cells.append(f"{min(shares):+.1%} … {max(shares):+.1%}" if shares else "")
            made.append("| " + " | ".join(cells) + " |")
    return made


def write(results: dict[str, Any]) -> None:
    """Into the file of results, and as a table into the page."""
    RESULTS.write_text(json.dumps({name: results[name] for name in MODELS if name in results}, indent=1) + "\n")
    head = ["| pass | step | models it changes | arena, off | arena, free | time |", "|---" * 6 + "|"]
    put("docs/adding-a-pass.md", "passes", "\n".join(head + lines(results)))


def main() -> None:
    """Measure the models that are named, or all; what is known of the others stays."""
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in sys.argv[1:] or MODELS:
        results[name] = rows(name)
        write(results)


if __name__ == "__main__":
    main()
