"""Proof by compiling: from programs of a plan to what XLA's GPU compiler says of them, without a
GPU. `targets.py` knows GPUs, `compiling.py` runs the compiler in processes of its own (`child.py`),
`comparing.py`, `report.py` and `text.py` put its figures beside the predicted ones."""
