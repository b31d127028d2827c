"""The page of a sweep in a real browser: it draws without the network, in light and in dark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autopar.inspect.sweep_page import sweep_page
from autopar.ir.sweep import Sweep, SweepPoint

_LABELS_INSIDE = """Array.from(document.querySelectorAll("svg text")).every(text => {
  const own = text.getBoundingClientRect(), plot = text.ownerSVGElement.getBoundingClientRect();
  return own.left >= plot.left - 1 && own.right <= plot.right + 1;
})"""


def made_sweep() -> Sweep:
    points = [
        SweepPoint(
            (("devices", devices), ("batch", batch)),
            devices,
            plan=f"{devices}",
            num_stages=1,
            num_micro_batches=1,
            step_s=batch / devices / 100,
            samples_per_s=100.0 * devices,
            tokens_per_s=1e5 * devices,
            peak_bytes=2e9 * batch / devices,
            budget_bytes=36e9,
            cost=0.02,
        )
        for devices in (8, 16, 32)
        for batch in (64, 128)
    ]
    misfit = SweepPoint((("devices", 4), ("batch", 64)), 4, problem="does not fit: needs 50 GiB")
    return Sweep("autopar sweep …", "a100", ("devices", "batch"), "tokens", 2.5, (misfit, *points))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_sweep_is_drawn(context: Any, tmp_path: Path, scheme: str) -> None:
    target = tmp_path / "sweep.html"
    target.write_text(sweep_page(made_sweep()), encoding="utf-8")
    complaints: list[str] = []
    page = context.new_page()
    try:
        page.emulate_media(color_scheme=scheme)
        page.on("console", lambda message: complaints.append(message.text))
        page.on("request", lambda r: r.url.startswith("file:") or complaints.append(r.url))
        page.goto(target.as_uri())
        assert page.locator("svg").count() == 4
        assert page.locator("svg").first.locator("circle").count() == 6
        assert page.locator("tbody tr").count() == 7
        assert page.locator(".legend li").count() == 2
        assert page.locator(".box li").first.inner_text().startswith("fastest: devices 32")
        background, text, line = page.evaluate(
            "[getComputedStyle(document.body).backgroundColor,"
            " getComputedStyle(document.body).color,"
            " getComputedStyle(document.querySelector('svg .line')).stroke]"
        )
        assert len({background, text, line}) == 3
        is_dark = max(int(part) for part in background[4:-1].split(",")) < 60
        assert is_dark == (scheme == "dark")
        assert page.evaluate(_LABELS_INSIDE)
        page.set_viewport_size({"width": 375, "height": 700})  # a phone: only the table scrolls
        assert page.evaluate("document.documentElement.scrollWidth") <= 375
    finally:
        page.close()
    assert not complaints
