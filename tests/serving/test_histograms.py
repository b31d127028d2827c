"""Histograms as Prometheus reads them."""

from examples.llm_serving.histograms import Histogram


def test_counts_are_cumulative() -> None:
    histogram = Histogram((0.1, 1.0))
    for value in (0.05, 0.1, 0.5, 7.0):
        histogram.add(value)
    histogram.add(0.5, count=2)
    assert histogram.lines("x_seconds") == [
        "# TYPE x_seconds histogram",
        'x_seconds_bucket{le="0.1"} 2',
        'x_seconds_bucket{le="1"} 5',
        'x_seconds_bucket{le="+Inf"} 6',
        f"x_seconds_sum {0.05 + 0.1 + 0.5 + 7.0 + 1.0:.17g}",
        "x_seconds_count 6",
    ]
