"""Proof by compiling: from a plan's programs to figures of XLA's GPU compiler, without a GPU.

`targets.py` knows GPUs, `compile.py` runs the compiler in processes of its own (`child.py`),
`compare.py` and `report.py` put its figures beside the predicted ones."""
