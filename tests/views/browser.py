"""A real browser without a window, for pages that draw: Chromium, driven by playwright."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
HOW = "`make setup-browser` installs one"


@contextmanager
def browser() -> Iterator[Any]:
    """Chromium; the test is skipped where there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason=f"needs playwright: {HOW}")
    with playwright.sync_playwright() as started:
        found = next(filter(None, map(shutil.which, NAMES)), started.chromium.executable_path)
        if not os.path.exists(found):
            pytest.skip(f"needs Chromium: {HOW}")
        chromium = started.chromium.launch(executable_path=found, args=["--no-sandbox"])
        try:
            yield chromium
        finally:
            chromium.close()


class Screen:
    """A page in a browser, with what its scripts complained about."""

    def __init__(self, chromium: Any, folder: Path) -> None:
        self.chromium, self.folder = chromium, folder
        self.page: Any = None
        self.errors: list[str] = []

    def open(self, text: str, behind: str = "") -> Any:
        """Show a page of its own context, with something behind its address."""
        path = self.folder / "page.html"
        path.write_text(text)
        self.page = self.chromium.new_page(viewport={"width": 1500, "height": 1200})
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", lambda line: line.type == "error" and self.errors.append(line.text))
        self.page.on(
            "request", lambda asked: asked.url.startswith("file:") or self.errors.append(f"asked for {asked.url}")
        )
        self.page.goto(f"file://{path}{behind}")
        return self.page

    def state(self, expression: str) -> Any:
        """What the page's own variables say."""
        return self.page.evaluate(expression)

    def until(self, expression: str) -> None:
        """Wait until it is true. (playwright's own wait evaluates texts, which the page's policy forbids.)"""
        for _ in range(200):
            if self.state(expression):
                return
            self.page.wait_for_timeout(25)
        raise AssertionError(f"never true: {expression}")
