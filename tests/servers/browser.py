"""Debian's Chromium without a window, and a record of what went wrong on a page: scripts that failed, requests out."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from playwright.sync_api import ConsoleMessage, Page, Route, sync_playwright

CHROMIUM = "chromium"
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip  # without them Chromium asks its maker's servers things of its own
INSIDE = ("data:", "blob:", "about:")


@dataclass(kw_only=True)
class Window:
    """A page, and what it did that it should not."""

    page: Page
    failed: list[str] = field(default_factory=list)
    """Errors of scripts, and what the console shows in red."""
    outside: list[str] = field(default_factory=list)
    """Requests to anything but the place that was allowed; none was let through."""

    def is_clean(self) -> bool:
        assert self.failed == []
        assert self.outside == []
        return True


@contextmanager
def window(allowed: str) -> Iterator[Window]:
    """A window whose pages may load from addresses that begin with `allowed`, and nothing else."""
    program = shutil.which(CHROMIUM)
    if program is None:
        if "CI" in os.environ:
            pytest.fail("there is no chromium, and CI may not skip what needs it: tests/cluster/packages.sh")
        pytest.skip("there is no chromium: tests/cluster/packages.sh")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=FLAGS)
        opened = Window(page=browser.new_page())
        opened.page.on("pageerror", lambda error: opened.failed.append(str(error)))
        opened.page.on("console", lambda message: opened.failed.extend(_red(message)))

        def judge(route: Route) -> None:
            if route.request.url.startswith((allowed, *INSIDE)):
                route.continue_()
            else:
                opened.outside.append(route.request.url)
                route.abort()

        opened.page.route("**/*", judge)
        try:
            yield opened
        finally:
            browser.close()


def _red(message: ConsoleMessage) -> list[str]:
    """What the console shows in red, with its place."""
    return [f"{message.text} ({message.location.get('url', '')})"] if message.type == "error" else []
