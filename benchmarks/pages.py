"""Tables in pages: what scripts that measure have in common."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MIB = 2**20


def put(page: str, name: str, text: str) -> None:
    """Write a text between the marks of a page: `<!-- name -->` and `<!-- /name -->`.

    Args:
        page: its path from the repository's root.
    """
    path = ROOT / page
    before, begin, rest = path.read_text().partition(f"<!-- {name} -->\n")
    _, end, after = rest.partition(f"<!-- /{name} -->")
    if not begin or not end:
        raise SystemExit(
            f"{page} has no marks <!-- {name} --> and <!-- /{name} -->: write them where the table belongs"
        )
    path.write_text(f"{before}{begin}{text}\n{end}{after}")


def change(value: int | None, usual: int) -> str:
    """A number against the usual one."""
    return "not met" if value is None else "=" if value == usual else f"{value / usual - 1:+.2%}"
