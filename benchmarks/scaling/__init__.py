"""Weak scaling on paper: from models and clusters that grow together to predicted throughput.

`run` plans every case of `cases.CASES` in a process of its own and writes a row each; `tables` and
`plots` show the rows beside what others measured (`benchmarks.published`). Nothing is compiled, run
or measured here: all of our figures are predictions of the cost model.
"""

from benchmarks.scaling.running import run

__all__ = ["run"]
