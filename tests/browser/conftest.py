"""One browser for all tests here: pages that may not ask the network for anything, nor complain."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from autopar.inspect.report_page import write_report
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
def context() -> Iterator[sync_api.BrowserContext]:
    path = find_browser()
    if path is None:
        pytest.skip("no Chromium: install it, or set AUTOPAR_CHROMIUM to its path")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        context = browser.new_context(offline=True, reduced_motion="reduce")
        context.set_default_timeout(30_000)
        yield context
        browser.close()


@pytest.fixture
def open_page(context: sync_api.BrowserContext, tmp_path: Path) -> Iterator[OpenPage]:
    """Writes the report of a plan and opens it. Any request to the network, message of the console
    or error of a script fails the test."""
    complaints: list[str] = []
    pages = []

    def note_request(request: sync_api.Request) -> None:
        if not request.url.startswith(("file:", "data:")):
            complaints.append(f"request: {request.url}")

    def open_page(
        plan: ParallelPlan,
        measured: Timeline | None = None,
        size: tuple[int, int] = (1280, 900),
        scheme: str = "light",
        compare: dict[str, ParallelPlan | str] | None = None,
    ) -> sync_api.Page:
        target = tmp_path / "plan.html"
        write_report(plan, target, measured, compare)
        page = context.new_page()
        pages.append(page)
        page.set_viewport_size({"width": size[0], "height": size[1]})
        page.emulate_media(color_scheme=scheme)
        page.on("console", lambda message: complaints.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
        page.on("request", note_request)
        page.goto(target.as_uri())
        page.wait_for_selector("html[data-ready=yes]")
        return page

    yield open_page
    for page in pages:
        page.close()
    assert not complaints
