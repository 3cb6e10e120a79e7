"""What was found of all modules, as tables."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tests.torch.judge import LIMIT

Found = dict[str, Any]


def as_markdown(results: dict[str, dict[str, Found]]) -> str:
    """The totals of each form, and a line a module and form."""
    forms = list(next(iter(results.values()), {}))
    totals = {form: _totals([found[form] for found in results.values()]) for form in forms}
    keys = list(dict.fromkeys(key for total in totals.values() for key in total))
    lines = ["| | " + " | ".join(forms) + " |", "|---" * (len(forms) + 1) + "|"]
    lines += [f"| {key} | " + " | ".join(str(totals[form][key]) for form in forms) + " |" for key in keys]
    lines += ["", "| module | form | imports | forward | gradient | right | missed | wrong |", "|---" * 8 + "|"]
    for name, by_form in results.items():
        lines += [f"| {name} | {form} | " + " | ".join(_cells(found)) + " |" for form, found in by_form.items()]
    return "\n".join(lines)


def is_clean(found: Found) -> bool:
    """Whether nothing is to be said against this file's import."""
    return not (
        any(
            found.get(key)
            for key in ("exporter", "refused", "missed", "wrong", "derived_missed", "split", "gradients_off")
        )
        or any(is_off(error) for key in ("forward", "gradient") for error in found[key].values())
    )


def is_off(error: float | str) -> bool:
    """Whether a number is wrong, or there is none."""
    return isinstance(error, str) or not error < LIMIT


def _totals(found: list[Found]) -> Counter[str]:
    total: Counter[str] = Counter()
    for each in found:
        total["modules"] += 1
        total["not exported"] += bool(each.get("exporter"))
        total["refused"] += bool(each.get("refused"))
        total["the file itself is wrong"] += each.get("exporter_forward", 0.0) >= LIMIT
        for key in ("forward", "gradient"):
            errors = each.get(key, {}).values()
            total[f"{key} refused"] += any(isinstance(error, str) for error in errors)
            total[f"{key} off"] += any(is_off(error) and not isinstance(error, str) for error in errors)
        for key in ("right", "missed", "wrong", "frozen", "folded", "derived", "derived_missed", "split", "fresh_lost"):
            count = each.get(key, [])
            total[key.replace("_", " ")] += count if isinstance(count, int) else len(count)
        total["modules with a missed one"] += bool(each.get("missed") or each.get("derived_missed"))
        total["modules with a wrong one"] += bool(each.get("wrong"))
        total["all right"] += is_clean(each)
    return total


def _cells(found: Found) -> list[str]:
    if found.get("exporter"):
        return [f"not exported: {_short(found['exporter'])}", "", "", "", "", ""]
    if found.get("refused"):
        return [f"refused: {_short(found['refused'])}", "", "", "", "", ""]
    missed = [*found.get("missed", []), *(f"{name} (derived)" for name in found.get("derived_missed", []))]
    return [
        "yes",
        _worst(found["forward"]),
        _worst(found["gradient"]),
        str(found.get("right", 0)),
        ", ".join(missed),
        ", ".join(found.get("wrong", [])),
    ]


def _worst(errors: dict[str, float | str]) -> str:
    messages = [_short(error) for error in errors.values() if isinstance(error, str)]
    return messages[0] if messages else f"{max(errors.values(), default=0.0):.0e}"


def _short(message: str) -> str:
    return message[:120].replace("|", "/")
