"""Stands in for CuPy where there is no GPU: the calls that transports make, on memory of the host.

A stream does at once what it is given, memory that other processes map is a file, and so are NCCL's
messages, all in the folder AUTOPAR_FAKE_CUDA. It shows that both sides of a transport agree; what
CUDA does, only a GPU shows.
"""

from cupy import cuda

__all__ = ["cuda"]
