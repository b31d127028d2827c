from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from autopar.inspect.plots import HEIGHT, WIDTH, PlotMark, Series, line_plot, nice_ticks


@pytest.mark.parametrize(
    ("most", "ticks"),
    [
        (0.0, [0, 1]),
        (1.0, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (9.0, [0, 2, 4, 6, 8, 10]),
        (101.0, [0, 25, 50, 75, 100, 125]),
        (3e-4, [0, 1e-4, 2e-4, 3e-4]),
    ],
)
def test_ticks_are_round_and_reach_the_top(most: float, ticks: list[float]) -> None:
    assert nice_ticks(most) == pytest.approx(ticks)


def test_a_plot_has_every_point_inside_and_escapes_names() -> None:
    marks = (PlotMark(0, 5.0, "a < b"), PlotMark(1, None, "does not fit"), PlotMark(2, 20.0, "top"))
    guide = Series("in proportion", (PlotMark(0, 5.0, ""), PlotMark(2, 10.0, "")), dashed=True)
    text = line_plot(
        [Series("one & two", marks), guide],
        ["8", "16", "32"],
        x_title="devices",
        y_title="tokens < all",
        y_text=str,
    )
    drawn = ElementTree.fromstring(text)
    circles = drawn.findall(".//circle")
    assert [circle.find("title").text for circle in circles] == ["a < b", "top"]  # type: ignore[union-attr]
    for circle in circles:
        assert 0 < float(circle.attrib["cx"]) < WIDTH and 0 < float(circle.attrib["cy"]) < HEIGHT
    low, high = (float(circle.attrib["cy"]) for circle in circles)
    assert high < low
    (cross,) = drawn.findall(".//path")
    assert cross.find("title").text == "does not fit"  # type: ignore[union-attr]
    lines = drawn.findall(".//polyline")  # the point that is missing parts the first series
    assert [line.attrib.get("stroke-dasharray") for line in lines] == ["4 4"]
