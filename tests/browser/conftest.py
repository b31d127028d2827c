"""One browser for all tests here: pages that may not ask the network for anything, nor complain."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from autopar.inspect.report import write_report
from autopar.ir.plan import ParallelPlan
from autopar.ir.timeline import Timeline

sync_api = pytest.importorskip("playwright.sync_api")

ARGUMENTS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
OpenPage = Callable[..., "sync_api.Page"]


def find_browser() -> str | None:
    given = os.environ.get("AUTOPAR_CHROMIUM")
    return given or next((path for name in NAMES if (path := shutil.which(name))), None)


@pytest.fixture(scope="session")
def browser() -> Iterator[sync_api.Browser]:
    path = find_browser()
    if path is None:
        pytest.skip("no Chromium: install it, or set AUTOPAR_CHROMIUM to its path")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: sync_api.Browser, tmp_path: Path) -> Iterator[OpenPage]:
    """Writes the report of a plan and opens it. Any request to the network, message of the console
    or error of a script fails the test."""
    complaints: list[str] = []
    contexts = []

    def open_page(
        plan: ParallelPlan,
        measured: Timeline | None = None,
        size: tuple[int, int] = (1280, 900),
        scheme: str = "light",
    ) -> sync_api.Page:
        target = tmp_path / "plan.html"
        write_report(plan, target, measured)
        context = browser.new_context(
            viewport={"width": size[0], "height": size[1]},
            color_scheme=scheme,
            offline=True,
            reduced_motion="reduce",
        )
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(15_000)
        page.on("console", lambda message: complaints.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
        page.on(
            "request",
            lambda request: (
                request.url.startswith(("file:", "data:"))
                or complaints.append(f"request: {request.url}")
            ),
        )
        page.goto(target.as_uri())
        page.wait_for_selector("html[data-ready=yes]")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not complaints
