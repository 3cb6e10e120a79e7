"""What was found of all modules, as tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

LIMIT = 1e-4  # of an error, relative to the largest element
Found = dict[str, Any]
# Fields of a verdict → how a table calls them: what is wrong with an import, and what the exporter did.
FAULTS = {
    "missed": "parameters missed",
    "derived_missed": "computed from parameters, missed",
    "wrong": "trained wrongly",
    "split": "tied parameters trained apart",
    "gradients_off": "gradients off",
}
FACTS = {
    "right": "parameters right",
    "frozen": "frozen parameters that are trained",
    "folded": "parameters folded by the exporter",
    "partly_folded": "parameters folded in one place of two",
    "derived": "computed from parameters, trained",
    "fresh_lost": "trained tensors that files of fresh modules lack",
}


_HEAD = """# Files of PyTorch's exporters

{count} PyTorch modules of many kinds are exported in four forms: by the exporter of `torch.onnx.export(…, dynamo=True)`
with and without its optimizer, and by the older one, TorchScript's, in evaluation and in training mode. Each file is
imported as it is. Then three things are compared with PyTorch: the outputs, on `numpy` and `cpu`; the gradients of a
loss; and which tensors are trained. `python -m tests.torch` does this and writes this page;
`benchmarks/results/torch-exports.md` has every file. These figures are of {versions}.

A file is right in all if it is imported, if every output and gradient agrees, and if what is trained is what the module
trains. Some exporters fold parameters into other tensors, and lose some that are equal or zero in a fresh module; lines
below count these too. `from_torch` needs no guess, since the module itself says what it trains
([training.md](training.md)).

"""


def as_page(results: dict[str, dict[str, Found]], versions: dict[str, str]) -> str:
    """docs/exports.md: what is compared, what it came to, and what is not right."""
    listed = ", ".join(f"{name} {version}" for name, version in versions.items())
    forms = list(next(iter(results.values()), {}))
    totals = {form: _totals([found[form] for found in results.values()]) for form in forms}
    keys = list(next(iter(totals.values()), {}))
    none = [key for key in keys if not any(totals[form][key] for form in forms)]
    lines = ["| | " + " | ".join(forms) + " |", "|---" * (len(forms) + 1) + "|"]
    for key in keys:
        if key not in none:
            lines.append(f"| {key} | " + " | ".join(str(totals[form][key]) for form in forms) + " |")
    lines += [
        "",
        "There are none of these, in any form:",
        "",
        *(f"- {key}" for key in none if not key.startswith("files with ")),
    ]
    lines += ["", "## Files that are not right in all", ""]
    lines += _table(results, lambda found: not (is_right(found) or found.get("exporter")))
    return _HEAD.format(count=len(results), versions=listed) + "\n".join(lines) + "\n"


def as_results(results: dict[str, dict[str, Found]], versions: dict[str, str]) -> str:
    """benchmarks/results/torch-exports.md: a line a module and form."""
    listed = ", ".join(f"{name} {version}" for name, version in versions.items())
    head = f"{listed}; `python -m tests.torch`. `docs/exports.md` says what is compared."
    return "\n".join([head, "", *_table(results, lambda _: True)]) + "\n"


def _table(results: dict[str, dict[str, Found]], shown: Callable[[Found], bool]) -> list[str]:
    """The modules and forms that are shown, a line each."""
    lines = ["| module | form | imports | forward | gradient | right | missed | wrong |", "|---" * 8 + "|"]
    for name, by_form in results.items():
        lines += [
            f"| {name} | {form} | {' | '.join(_cells(found))} |" for form, found in by_form.items() if shown(found)
        ]
    return lines


def is_right(found: Found) -> bool:
    """Whether there is a file, and nothing is to be said against its import."""
    faults = any(found.get(key) for key in ("exporter", "refused", *FAULTS))
    return not faults and not any(_is_off(error) for key in ("forward", "gradient") for error in found[key].values())


def _is_off(error: float | str) -> bool:
    return isinstance(error, str) or not error < LIMIT


def _totals(found: list[Found]) -> Counter[str]:
    total: Counter[str] = Counter()
    for each in found:
        total["files"] += not each.get("exporter")
        total["files that are right in all"] += is_right(each)
        total["not exported"] += bool(each.get("exporter"))
        total["refused"] += bool(each.get("refused"))
        for key in ("forward", "gradient"):
            errors = list(each.get(key, {}).values())
            total[f"{key} pass refused"] += any(isinstance(error, str) for error in errors)
        total["outputs off"] += any(not isinstance(e, str) and _is_off(e) for e in each.get("forward", {}).values())
        total["outputs off, by ONNX Runtime too"] += each.get("exporter_forward", 0.0) >= LIMIT
        for key, text in (FACTS | FAULTS).items():
            count = each.get(key, 0)
            total[text] += count if isinstance(count, int) else len(count)
            if key in FAULTS:
                total[f"files with {text}"] += bool(count)
    return total


def _cells(found: Found) -> list[str]:
    for key, text in (("exporter", "not exported"), ("refused", "refused")):
        if found.get(key):
            return [f"{text}: {_short(found[key])}", "", "", "", "", ""]
    missed = [*found.get("missed", []), *(f"{name} (computed)" for name in found.get("derived_missed", []))]
    wrong = [*found.get("wrong", []), *(f"{name} (tied)" for name in found.get("split", []))]
    off = max(found.get("gradients_off", {}).values(), default=0.0)
    gradient = f"off by {off:.0e}" if off else _worst(found["gradient"])
    return ["yes", _worst(found["forward"]), gradient, str(found["right"]), ", ".join(missed), ", ".join(wrong)]


def _worst(errors: dict[str, float | str]) -> str:
    messages = [_short(error) for error in errors.values() if isinstance(error, str)]
    return messages[0] if messages else f"{max(errors.values(), default=0.0):.0e}"


def _short(message: str) -> str:
    return message[:120].replace("|", "/")
