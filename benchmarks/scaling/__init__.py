"""Weak scaling on paper: from models and clusters that grow together to predicted throughput.

`run` plans every case of `cases.CASES` in its own process and writes a row each; `tables` and
`plots` show the rows next to published measurements (`benchmarks.published`). Nothing is compiled,
run or measured here: all of our figures are predictions of the cost model.
"""

from benchmarks.scaling.running import run

__all__ = ["run"]
